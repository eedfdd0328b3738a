"""The second pass of attention over rebuilt keys: values under given weights. Triton kernels.

Shapes as in `latent_decode`; GP query heads of a value latent, padded; I items, S slices of them
(see `plan`); WV 16-bit words of a value row, of C codes; SPAN rows share a top.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

from kvfold.ops.common.codes_triton import UNIT, load_fp16, unpack
from kvfold.ops.common.step_kernel import step_kernel
from kvfold.ops.decode.kernels import after_launch, tile_pages, tile_rows


@triton.jit
def _attend(
    state, t, page, row, inside, values, arena, weights, tops, about, peak,
    BITS: tl.constexpr, ZEROS: tl.constexpr, EXACT: tl.constexpr, WV: tl.constexpr,
    N: tl.constexpr, GP: tl.constexpr, NQ: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    ONE_PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The softmax's state after tile t of BLOCK rows; weights and tops come by SPAN rows, of which
    those beyond the last row's are not read."""
    SPANS: tl.constexpr = BLOCK // SPAN
    LOW: tl.constexpr = (2**BITS - 1) / 2
    FULL: tl.constexpr = N == GP
    mass, floor, acc0, acc1, acc2, acc3 = state
    row_words, start, scale_start, scale_row, zero_step, column = about
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
        some = tl.max(tl.reshape(inside.to(tl.int32), [SPANS, SPAN]), 1) > 0
        there = (n < N)[None, :] & some[:, None]
        p = tl.load(at, there[:, None, :], 0.0)
        top = tl.load(tops + to, there, float("-inf"))  # 0 would be above very negative scores
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
        place = page + scale_start + row * scale_row
        scale = load_fp16(arena, place, inside)
        if ZEROS:
            # In the middle of the codes: what is weighed by rounded weights is then small.
            zero = load_fp16(arena, place + zero_step, inside) + LOW * scale
            floor = tl.dot(ones, (p * zero[:, None]).to(tl.float16), floor)
        w = (p * scale[:, None]).to(tl.float16)
        # The codes' middle goes tile by tile: in the long run it would drown the rest.
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
    """One slice: its part of every item, (sequence, value latent), it touches.

    N: query heads of a value latent, NQ of a group. out [B, V * N, DO]; part fp32 [S + I, GP, DV],
    part_ml fp32 [S + I, 2, GP]; lse fp32 [B, V * N] in log2; the rest as in `score_kernel`.
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
        line = latents + 8 * v
        g = tl.load(line + 6)
        slot = tl.load(slots + b).to(tl.int64)
        length = tl.load(lengths + slot * length_slot + g)
        stop = tl.cdiv(length, BLOCK)
        if item == end_item:
            stop = end_tile
        if tile < stop:
            first_head = tl.load(line + 7)
            base = tl.load(bases + b * G + g).to(tl.int64) * NQ
            about = (
                tl.multiple_of(tl.load(line), ALIGN), tl.multiple_of(tl.load(line + 2), 8),
                tl.load(line + 3), tl.load(line + 4), tl.load(line + 5), base + first_head - g * NQ,
            )  # fmt: skip
            none = tl.zeros([WV, GP], tl.float32)
            spread = tl.zeros([16, GP], tl.float32)  # sixteen equal rows
            # The slice's highest score, known beforehand: nothing is rescaled on the way.
            top = tl.full([GP], float("-inf"), tl.float32)
            last = tl.cdiv(tl.minimum(stop * BLOCK, length), SPAN)
            for begin in range(tile * BLOCK // SPAN, last, 128):
                t = begin + tl.arange(0, 128)[:, None]
                there = (t < last) & (n < N)[None, :]
                found = tl.load(tops + about[5] + t * NQ + n[None, :], there, float("-inf"))
                top = tl.maximum(top, tl.max(found, 0))
            top = tl.where(n < N, top, 0.0)
            # Mass, mass times the values' zeros, outputs.
            state = (spread, spread, none, none, none, none)
            table = tables + slot * table_slot + g * table_group
            full = tl.minimum(stop, length // BLOCK)
            ahead = tile_pages(table, tile, row, length, PAGE, ONE_PAGE)
            for t in tl.range(tile, full, num_stages=STAGES):
                page = ahead.to(tl.int64) * 32
                ahead = tile_pages(table, t + 1, row, length, PAGE, ONE_PAGE)
                state = _attend(
                    state, t, page, tile_rows(t, row, PAGE, ONE_PAGE), row >= 0, values, arena,
                    weights, tops, about, top, BITS, ZEROS, EXACT, WV, N, GP, NQ, BLOCK, SPAN,
                    ONE_PAGE, False,
                )  # fmt: skip
            if full < stop:
                state = _attend(
                    state, full, ahead.to(tl.int64) * 32, tile_rows(full, row, PAGE, ONE_PAGE),
                    full * BLOCK + row < length, values, arena, weights, tops, about, top,
                    BITS, ZEROS, EXACT, WV, N, GP, NQ, BLOCK, SPAN, ONE_PAGE, True,
                )  # fmt: skip
            spread, floors, acc0, acc1, acc2, acc3 = state
            mass, floor = tl.max(spread, 0), tl.sum(floors, 0) / 16
            whole = tl.load(counts + item) == 1
            norm = 1.0 / mass if whole else mass * 0 + 1
            to = out + (b * V * N + first_head) * DO
            piece = part + (slice + item).to(tl.int64) * GP * DV
            value_width = tl.load(line + 1)
            for J in tl.static_range(C):
                acc = acc0 if J == 0 else (acc1 if J == 1 else (acc2 if J == 2 else acc3))
                if BITS < 16:
                    acc *= UNIT / (16 if BITS == 4 and J % 2 == 1 else 1)
                acc += floor[None, :]
                column = word * C + J
                if whole:
                    tl.store(
                        to + n[None, :] * DO + column[:, None],
                        tl.where((column < value_width)[:, None], acc * norm[None, :], 0.0),
                        (n < N)[None, :] & (column < DO)[:, None],
                    )
                else:
                    tl.store(piece + n[None, :] * DV + column[:, None], acc)
            if whole:
                tl.store(lse + b * V * N + first_head + n, top + tl.log2(mass), n < N)
            else:
                ml = part_ml + (slice + item).to(tl.int64) * 2 * GP
                tl.store(ml + n, top)
                tl.store(ml + GP + n, mass)
        item += 1
        tile = 0
