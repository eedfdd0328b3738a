"""Triton kernel that sums values with softmax weights: the second pass of the kernel `triton`.

Serves value latents of one segment (16, 8 or 4 bits), on CUDA, after `scores_triton` or
`scores_gluon`. Differs from `common.values_triton`, which serves segments of several bit widths.

Shapes as in `latent_decode`; V value latents; GP query heads of a value latent, padded; I items
(sequence, value latent), S splits of them (see `common.plan`); WV code words of a value, of C codes
each; SPAN entries share a maximum (`top`).
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

from kvfold.ops.common.codes_triton import UNIT, load_fp16, unpack
from kvfold.ops.common.step_kernel import step_kernel
from kvfold.ops.decode.kernels import after_launch, tile_pages, tile_rows


@triton.jit
def _attend(
    state, t, page, row, inside, values, arena, weights, tops, strides, peak,
    BITS: tl.constexpr, ZEROS: tl.constexpr, EXACT: tl.constexpr, WV: tl.constexpr,
    N: tl.constexpr, GP: tl.constexpr, NQ: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    ONE_PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Update the sums with tile t of BLOCK entries.

    weights and tops are stored by span; spans beyond the last entry are not read. state: sum of
    weights, weighted sum of zero points, and output accumulators by code of a word. peak [GP]:
    maximum score of the split.
    """
    SPANS: tl.constexpr = BLOCK // SPAN
    LOW: tl.constexpr = (2**BITS - 1) / 2
    FULL: tl.constexpr = N == GP
    mass, floor, acc0, acc1, acc2, acc3 = state
    row_words, start, scale_start, scale_row, zero_step, column = strides
    word, n = tl.arange(0, WV)[:, None], tl.arange(0, GP)
    if EXACT:
        row_words = WV
    if ONE_PAGE:
        at = values + (page + start) + ((row * row_words)[None, :] + word)
    else:
        at = values + ((page + start + row * row_words)[None, :] + word)
    if EXACT and not MASKED:
        v = tl.load(at)
    else:
        v = tl.load(at, inside[None, :] & (word < row_words), 0)
    span = tl.arange(0, SPANS)
    to = column + (t * SPANS + span)[:, None] * NQ + n[None, :]
    at = weights + to[:, None, :] * SPAN + tl.arange(0, SPAN)[None, :, None]
    if FULL and not MASKED:
        p, top = tl.load(at), tl.load(tops + to)
    else:
        span_exists = tl.max(tl.reshape(inside.to(tl.int32), [SPANS, SPAN]), 1) > 0
        in_range = (n < N)[None, :] & span_exists[:, None]
        p = tl.load(at, in_range[:, None, :], 0.0)
        top = tl.load(tops + to, in_range, float("-inf"))  # 0 would be above very negative scores
    p = p.to(tl.float32) * tl.exp2(top - peak[None, :])[:, None, :]
    p = tl.reshape(p, [BLOCK, GP])
    ones = tl.full([16, BLOCK], 1.0, weights.dtype.element_ty)
    if BITS == 16:
        w = p.to(weights.dtype.element_ty)
        mass = tl.dot(ones, w, mass)
        acc0 = tl.dot(v, w, acc0)
    else:
        v0, v1, v2, v3 = unpack(v, BITS)
        mass = tl.dot(ones, p.to(tl.float16), mass)
        scale_at = page + scale_start + row * scale_row
        scale = load_fp16(arena, scale_at, inside)
        if ZEROS:
            # Relative to the middle code, so that the error of rounded weights stays small.
            zero = load_fp16(arena, scale_at + zero_step, inside) + LOW * scale
            floor = tl.dot(ones, (p * zero[:, None]).to(tl.float16), floor)
        w = (p * scale[:, None]).to(tl.float16)
        # Subtract the middle code tile by tile: summed over a long sequence, its large total
        # would cost the accumulator its precision.
        weight = tl.dot(tl.full([WV, BLOCK], 1.0, tl.float16), w)
        even = weight * (-LOW / UNIT)
        odd = weight * (-LOW / UNIT * (1 if BITS == 8 else 16))
        acc0 += tl.dot(v0, w, even)
        acc1 += tl.dot(v1, w, odd)
        if BITS == 4:
            acc2 += tl.dot(v2, w, even)
            acc3 += tl.dot(v3, w, odd)
    return mass, floor, acc0, acc1, acc2, acc3


@step_kernel
def value_kernel(
    out, lse, part, part_ml, weights, tops, values, arena,
    tables, table_slot, table_group, lengths, length_slot, slots, latents, bases, starts, counts,
    G: tl.constexpr, V: tl.constexpr, NQ: tl.constexpr, N: tl.constexpr, GP: tl.constexpr,
    DO: tl.constexpr, DV: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr,
    EXACT: tl.constexpr, PAGE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Process one split: its tiles of every item (sequence, value latent) that it touches.

    N: query heads of a value latent, NQ of a group. out [B, V * N, DO]; lse fp32 [B, V * N] in
        log2. Items that several splits share leave part fp32 [S + I, GP, DV] (unnormalised outputs)
        and part_ml fp32 [S + I, 2, GP] (maximum score, sum of weights) for `combine_kernel`.
        latents: `LatentGroups.values`; the others as in `scores_triton.score_kernel`.
    """
    C: tl.constexpr = 16 // BITS
    WV: tl.constexpr = DV // C
    ONE_PAGE: tl.constexpr = PAGE % BLOCK == 0
    after_launch(PDL)
    slice = tl.program_id(0)
    item = tl.load(starts + 2 * slice)
    tile = tl.load(starts + 2 * slice + 1)
    end_item = tl.load(starts + 2 * slice + 2)
    end_tile = tl.load(starts + 2 * slice + 3)
    n, row, word = tl.arange(0, GP), tl.arange(0, BLOCK), tl.arange(0, WV)
    while item <= end_item:
        b, v = item // V, item % V
        record = latents + 8 * v
        g = tl.load(record + 6)
        slot = tl.load(slots + b).to(tl.int64)
        length = tl.load(lengths + slot * length_slot + g)
        stop = tl.cdiv(length, BLOCK)
        if item == end_item:
            stop = end_tile
        if tile < stop:
            first_head = tl.load(record + 7)
            base = tl.load(bases + b * G + g).to(tl.int64) * NQ
            strides = (
                tl.multiple_of(tl.load(record), ALIGN), tl.multiple_of(tl.load(record + 2), 8),
                tl.load(record + 3), tl.load(record + 4), tl.load(record + 5),
                base + first_head - g * NQ,
            )  # fmt: skip
            none = tl.zeros([WV, GP], tl.float32)
            spread = tl.zeros([16, GP], tl.float32)  # 16 equal rows: a product has no fewer
            # The split's maximum score is known beforehand, so sums are never rescaled.
            top = tl.full([GP], float("-inf"), tl.float32)
            last = tl.cdiv(tl.minimum(stop * BLOCK, length), SPAN)
            for begin in range(tile * BLOCK // SPAN, last, 128):
                t = begin + tl.arange(0, 128)[:, None]
                in_range = (t < last) & (n < N)[None, :]
                span_tops = tl.load(
                    tops + strides[5] + t * NQ + n[None, :], in_range, float("-inf")
                )
                top = tl.maximum(top, tl.max(span_tops, 0))
            top = tl.where(n < N, top, 0.0)
            # Sum of weights, weighted sum of zero points, outputs.
            state = (spread, spread, none, none, none, none)
            table = tables + slot * table_slot + g * table_group
            full = tl.minimum(stop, length // BLOCK)
            next_page = tile_pages(table, tile, row, length, PAGE, ONE_PAGE)
            for t in tl.range(tile, full, num_stages=STAGES):
                page = next_page.to(tl.int64) * 32
                next_page = tile_pages(table, t + 1, row, length, PAGE, ONE_PAGE)
                state = _attend(
                    state, t, page, tile_rows(t, row, PAGE, ONE_PAGE), row >= 0, values, arena,
                    weights, tops, strides, top, BITS, ZEROS, EXACT, WV, N, GP, NQ, BLOCK, SPAN,
                    ONE_PAGE, False,
                )  # fmt: skip
            if full < stop:
                state = _attend(
                    state, full, next_page.to(tl.int64) * 32, tile_rows(full, row, PAGE, ONE_PAGE),
                    full * BLOCK + row < length, values, arena, weights, tops, strides, top,
                    BITS, ZEROS, EXACT, WV, N, GP, NQ, BLOCK, SPAN, ONE_PAGE, True,
                )  # fmt: skip
            spread, floors, acc0, acc1, acc2, acc3 = state
            mass, floor = tl.max(spread, 0), tl.sum(floors, 0) / 16
            only_split = tl.load(counts + item) == 1
            norm = 1.0 / mass if only_split else mass * 0 + 1
            to = out + (b * V * N + first_head) * DO
            piece = part + (slice + item).to(tl.int64) * GP * DV
            value_width = tl.load(record + 1)
            for J in tl.static_range(C):
                acc = acc0 if J == 0 else (acc1 if J == 1 else (acc2 if J == 2 else acc3))
                if BITS < 16:
                    acc *= UNIT / (16 if BITS == 4 and J % 2 == 1 else 1)
                acc += floor[None, :]
                column = word * C + J
                if only_split:
                    tl.store(
                        to + n[None, :] * DO + column[:, None],
                        tl.where((column < value_width)[:, None], acc * norm[None, :], 0.0),
                        (n < N)[None, :] & (column < DO)[:, None],
                    )
                else:
                    tl.store(piece + n[None, :] * DV + column[:, None], acc)
            if only_split:
                tl.store(lse + b * V * N + first_head + n, top + tl.log2(mass), n < N)
            else:
                ml = part_ml + (slice + item).to(tl.int64) * 2 * GP
                tl.store(ml + n, top)
                tl.store(ml + GP + n, mass)
        item += 1
        tile = 0
