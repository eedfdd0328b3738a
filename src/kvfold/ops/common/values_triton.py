"""Weighted sums of values: the second pass of two-pass decode attention. Triton kernels.

The first pass, for any kind of keys, leaves the weight exp2(s - top) of every token and the maximum
score `top` of every SPAN tokens. Programs take tiles of value latents (see `pieces.value_pieces`);
the query heads of a latent are the columns of the matrix products.

Shapes: B sequences, G groups of a layer, V value tiles, Hq query heads, NQ of a group, N of a value
latent, padded to GP; I = B * V items, S slices of them (see `plan`).
"""
# mypy: allow-untyped-defs, disable-error-code=assignment

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.common.codes_triton import factor, load_scale, unpack_centred
from kvfold.ops.common.combine import combine
from kvfold.ops.common.launch import launch_options
from kvfold.ops.common.pages import LayerPages, words_of
from kvfold.ops.common.pieces import VALUE_FIELDS, Pieces, equal_values
from kvfold.ops.common.plan import Slices, padded_queries
from kvfold.ops.common.recording import launch
from kvfold.ops.common.split import SPAN, Workspace
from kvfold.ops.common.step_kernel import step_kernel
from kvfold.ops.common.tuning import Tuning
from kvfold.ops.decode.kernels import after_launch, tile_pages, tile_rows

TOPS = tl.constexpr(32)  # read at a time


@triton.jit
def _attend(
    state, t, page, row, inside, values, arena, weights, tops, about, peak,
    BITS: tl.constexpr, ZEROS: tl.constexpr, SCALE: tl.constexpr, WV: tl.constexpr,
    N: tl.constexpr, GP: tl.constexpr, NQ: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    ONE_PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The softmax's state after tile t of BLOCK rows: mass, mass times the values' zeros, outputs
    by code of a word. Weights and tops come by SPAN rows, of which those beyond the last row's are
    not read.

    Codes are taken from their middle: in the long run it would drown the rest.
    """
    SPANS: tl.constexpr = BLOCK // SPAN
    FULL: tl.constexpr = N == GP
    KIND: tl.constexpr = values.dtype.element_ty if BITS == 16 else tl.float16
    mass, floor = state[0], state[1]
    row_words, words, start, scale_start, scale_row, zero_step, column = about
    word, n = tl.arange(0, WV)[:, None], tl.arange(0, GP)
    if ONE_PAGE:
        at = values + (page + start) + ((row * row_words)[None, :] + word)
    else:
        at = values + ((page + start + row * row_words)[None, :] + word)
    there = word < words
    if MASKED:
        there = there & inside[None, :]
    v = tl.load(at, there, 0)
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
    ones = tl.full([16, BLOCK], 1.0, tl.float32).to(KIND)
    mass = tl.dot(ones, p.to(KIND), mass)
    outputs = ()
    if BITS == 16:
        outputs = (tl.dot(v, p.to(KIND), state[2]),)
    else:
        place = scale_start + row * scale_row
        inside = inside & (words > 0)  # where nothing is stored, neither is a scale
        scale = load_scale(arena, page, place, inside, BITS, SCALE)
        w = (p * scale[:, None]).to(tl.float16)
        if ZEROS:
            zero = load_scale(arena, page, place + zero_step, inside, 16, 2)
            zero += ((1 << BITS) - 1) / 2 * scale
            floor = tl.dot(ones, (p * zero[:, None]).to(tl.float16), floor)
        codes = unpack_centred(v, BITS)
        for J in tl.static_range(16 // BITS):
            outputs = outputs + (tl.dot(codes[J], w, state[2 + J]),)
    return (mass, floor) + outputs


@triton.jit
def _in_turn(x, C: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    """Interleave C tensors [W, N] to [W, N, C], so that neighbouring numbers are stored
    together."""
    if C == 1:
        joined = x[0]
    elif C == 2:
        joined = tl.join(x[0], x[1])
    elif C == 4:
        joined = tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3]))
    else:
        even = tl.join(tl.join(x[0], x[4]), tl.join(x[2], x[6]))
        joined = tl.join(even, tl.join(tl.join(x[1], x[5]), tl.join(x[3], x[7])))
    return tl.reshape(joined, [W, N, C])


@triton.jit
def _piece(
    item, b, line, tile, stop, length, slot, out, lse, part, part_ml, weights, tops, values, arena,
    tables, table_slot, table_group, bases, counts, slice,
    BITS: tl.constexpr, WV: tl.constexpr, G: tl.constexpr, HQ: tl.constexpr, NQ: tl.constexpr,
    N: tl.constexpr, GP: tl.constexpr, DO: tl.constexpr, DV: tl.constexpr, ZEROS: tl.constexpr,
    SCALE: tl.constexpr, PAGE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
    SPAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Process tiles `tile` to `stop` of one item."""
    C: tl.constexpr = 16 // BITS
    ONE_PAGE: tl.constexpr = PAGE % BLOCK == 0
    n, row, word = tl.arange(0, GP), tl.arange(0, BLOCK), tl.arange(0, WV)
    width, g, first_head = tl.load(line + 1), tl.load(line + 6), tl.load(line + 7)
    first_column, leads = tl.load(line + 8), tl.load(line + 10)
    words = tl.multiple_of(width // C, ALIGN)
    base = tl.load(bases + b * G + g).to(tl.int64) * NQ
    source = (
        tl.multiple_of(tl.load(line), ALIGN), words, tl.multiple_of(tl.load(line + 2), 8),
        tl.load(line + 3), tl.load(line + 4), tl.load(line + 5), base + first_head - g * NQ,
    )  # fmt: skip
    # The slice's highest score, known beforehand: nothing is rescaled on the way.
    top = tl.full([GP], float("-inf"), tl.float32)
    last = tl.cdiv(tl.minimum(stop * BLOCK, length), SPAN)
    for begin in range(tile * BLOCK // SPAN, last, TOPS):
        t = begin + tl.arange(0, TOPS)[:, None]
        in_range = (t < last) & (n < N)[None, :]
        maxima = tl.load(tops + source[6] + t * NQ + n[None, :], in_range, float("-inf"))
        top = tl.maximum(top, tl.max(maxima, 0))
    top = tl.where(n < N, top, 0.0)
    spread = tl.zeros([16, GP], tl.float32)  # sixteen equal rows
    state = (spread, spread)
    for _ in tl.static_range(C):
        state = state + (tl.zeros([WV, GP], tl.float32),)
    table = tables + slot * table_slot + g * table_group
    full = tl.minimum(stop, length // BLOCK)
    ahead = tile_pages(table, tile, row, length, PAGE, ONE_PAGE)
    for t in tl.range(tile, full, num_stages=STAGES):
        page = ahead.to(tl.int64) * 32
        ahead = tile_pages(table, t + 1, row, length, PAGE, ONE_PAGE)
        state = _attend(
            state, t, page, tile_rows(t, row, PAGE, ONE_PAGE), row >= 0, values, arena,
            weights, tops, source, top, BITS, ZEROS, SCALE, WV, N, GP, NQ, BLOCK, SPAN,
            ONE_PAGE, False,
        )  # fmt: skip
    if full < stop:
        state = _attend(
            state, full, ahead.to(tl.int64) * 32, tile_rows(full, row, PAGE, ONE_PAGE),
            full * BLOCK + row < length, values, arena, weights, tops, source, top,
            BITS, ZEROS, SCALE, WV, N, GP, NQ, BLOCK, SPAN, ONE_PAGE, True,
        )  # fmt: skip
    mass, floor = tl.max(state[0], 0), tl.sum(state[1], 0) / 16
    whole = tl.load(counts + item) == 1
    norm = 1.0 / mass if whole else mass * 0 + 1
    outputs = ()
    for J in tl.static_range(C):
        acc = state[2 + J]
        if BITS < 16:
            acc = acc / (2 * factor(BITS, J)) + floor[None, :]
        outputs = outputs + (acc,)
    result = _in_turn(outputs, C, WV, GP)
    column = word[:, None, None] * C + tl.arange(0, C)[None, None, :]
    if whole:
        in_range = (n < N)[None, :, None] & (column < width)
        to = out + (b * HQ + first_head) * DO + first_column
        tl.store(to + (n[None, :, None] * DO + column), result * norm[None, :, None], in_range)
    else:
        piece = part + (slice + item).to(tl.int64) * GP * DV
        tl.store(piece + (n[None, :, None] * DV + column), result)
    if whole:
        tl.store(lse + b * HQ + first_head + n, top + tl.log2(mass), (n < N) & (leads > 0))
    else:
        ml = part_ml + (slice + item).to(tl.int64) * 2 * GP
        tl.store(ml + n, top)
        tl.store(ml + GP + n, mass)


@step_kernel
def value_kernel(
    out, lse, part, part_ml, weights, tops, values, arena,
    tables, table_slot, table_group, lengths, length_slot, slots, pieces, bases, starts, counts,
    FORMS: tl.constexpr, FIELDS: tl.constexpr,
    G: tl.constexpr, V: tl.constexpr, HQ: tl.constexpr, NQ: tl.constexpr, N: tl.constexpr,
    GP: tl.constexpr, DO: tl.constexpr, DV: tl.constexpr, ZEROS: tl.constexpr, SCALE: tl.constexpr,
    PAGE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One slice: its part of every item, (sequence, piece), it touches.

    out [B, Hq, DO]; part fp32 [S + I, GP, DV], part_ml fp32 [S + I, 2, GP]; lse fp32 [B, Hq] in
    log2; weights [spans, NQ, SPAN], tops fp32 [spans, NQ] in log2, spans of (b, g) from bases int32
    [B * G] on; values: the arena as 16-bit words, arena: as int32.
    """
    after_launch(PDL)
    slice = tl.program_id(0)
    item = tl.load(starts + 2 * slice)
    tile = tl.load(starts + 2 * slice + 1)
    end_item = tl.load(starts + 2 * slice + 2)
    end_tile = tl.load(starts + 2 * slice + 3)
    while item <= end_item:
        b, line = item // V, pieces + FIELDS * (item % V)
        slot = tl.load(slots + b).to(tl.int64)
        length = tl.load(lengths + slot * length_slot + tl.load(line + 6))
        stop = tl.cdiv(length, BLOCK)
        if item == end_item:
            stop = end_tile
        if tile < stop:
            form = tl.load(line + 9)
            for f in tl.static_range(len(FORMS)):
                if form == f:
                    _piece(
                        item, b, line, tile, stop, length, slot, out, lse, part, part_ml,
                        weights, tops, values, arena, tables, table_slot, table_group, bases,
                        counts, slice, FORMS[f][0], FORMS[f][1], G, HQ, NQ, N, GP, DO, DV, ZEROS,
                        SCALE, PAGE, ALIGN, BLOCK, SPAN, STAGES,
                    )  # fmt: skip
        item += 1
        tile = 0


def attend_values(
    q: Tensor, width: int, pages: LayerPages, slots: Tensor, pieces: Pieces, heads: int,
    slices: Slices, bases: Tensor, room: Workspace, tune: Tuning,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs [B, Hq, width] and log2-sum-exp2s fp32 [B, Hq] of the weights in `room`.

    q [B, Hq, .]: of whose dtype they are; heads: query heads of a value latent; bases int32
    [B * G]: where spans begin.
    """
    arena, tables, lengths, groups = pages
    (batch, num_heads, _), coded = q.shape, pieces.forms[0][0] < 16
    # Pieces write their own columns: what none has is 0.
    out = (q.new_empty if equal_values(groups) else q.new_zeros)(batch, num_heads, width)
    lse = torch.empty(batch, num_heads, dtype=torch.float32, device=q.device)
    widths = {
        "HQ": num_heads, "N": heads, "GP": padded_queries(heads), "DO": width,
        "DV": room.part.shape[-1], "FIELDS": VALUE_FIELDS,
    }  # fmt: skip
    launch(
        value_kernel, (slices.starts.shape[0] - 1,),
        out, lse, room.part, room.part_ml, room.weights, room.tops,
        words_of(arena, torch.uint16 if coded else q.dtype), words_of(arena, torch.int32),
        tables, tables.stride(0), tables.stride(1), lengths, lengths.stride(0), slots,
        pieces.table, bases, slices.starts, slices.counts,
        FORMS=pieces.forms, G=len(groups), V=len(pieces.table), NQ=num_heads // len(groups),
        ZEROS=pieces.zeros, SCALE=pieces.scale, PAGE=groups[0].layout.page, ALIGN=pieces.align,
        BLOCK=tune.block, SPAN=SPAN, STAGES=tune.stages, num_warps=tune.warps,
        maxnreg=tune.registers, **widths, **launch_options(q.device),
    )  # fmt: skip
    combine(out, lse, room.part, room.part_ml, pieces.table, slices, heads, widths["DV"])
    return out, lse
