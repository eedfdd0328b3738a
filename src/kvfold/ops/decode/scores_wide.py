"""Triton kernel of scores with stored keys of any width: as `scores_triton`, for wide keys.

Chosen by `triton_split` on CUDA where a warp cannot hold a tile of keys with its queries. It reads
W code words of a segment at a time, and reads the queries from memory again for every tile, so
neither a latent's width nor the number of heads that share it is limited by registers.

Shapes as in `scores_triton`.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

from kvfold.ops.common.codes_triton import UNIT, load_scale, unpack_all
from kvfold.ops.common.step_kernel import step_kernel
from kvfold.ops.common.weights_triton import store_weights
from kvfold.ops.decode.kernels import after_launch, tile_pages, tile_rows
from kvfold.ops.decode.scores_triton import limited, stored_queries


@triton.jit
def _run(
    s, at, query, in_range, page, row, inside, arena, record, scale_row,
    BITS: tl.constexpr, W: tl.constexpr, ZEROS: tl.constexpr, SCALE: tl.constexpr,
    ALIGN: tl.constexpr, STAGES: tl.constexpr, ONE_PAGE: tl.constexpr,
):  # fmt: skip
    """Add to s [BLOCK, GP] the scores that one segment of every entry contributes.

    at: pointer to a page's words; query: pointers to the queries [GP]; in_range [GP]: columns
        that are no padding; record: the segment's numbers in `heads`, see `pieces.key_pieces`.
    """
    C: tl.constexpr = 16 // BITS
    LOW: tl.constexpr = 0.0 if ZEROS else (2**BITS - 1) / 2
    words = tl.multiple_of(tl.load(record), ALIGN)
    start, column = (
        tl.multiple_of(tl.load(record + 1), 8),
        tl.multiple_of(tl.load(record + 3), ALIGN),
    )
    if ONE_PAGE:
        at = at + (page + start) + (row * words)[:, None]
    else:
        at = at + (page + start + row * words)[:, None]
    code_scores, total = s, tl.zeros(in_range.shape, tl.float32)
    if BITS < 16:
        code_scores = s * 0
    for first in tl.range(0, words, W, num_stages=STAGES):
        word = first + tl.arange(0, W)
        z = tl.load(at + word[None, :], (word < words)[None, :], 0)
        queries, sums = stored_queries(
            query + column + first * C, in_range, (words - first) * C, W, BITS
        )
        numbers = unpack_all(z, BITS)
        for J in tl.static_range(C):
            code_scores = tl.dot(numbers[J], queries[J], code_scores)
        if BITS < 16:
            total += sums
    if BITS < 16:
        scale_at, inside = tl.load(record + 4) + row * scale_row, inside & (words > 0)
        scale = load_scale(arena, page, scale_at, inside, BITS, SCALE) * UNIT
        s += (code_scores - (total * (LOW / UNIT))[None, :]) * scale[:, None]
        if ZEROS:
            zero = load_scale(arena, page, scale_at + tl.load(record + 5), inside, 16, 2)
            s += zero[:, None] * total[None, :]
    else:
        s = code_scores
    return s


@step_kernel
def wide_score_kernel(
    q, q_stride, weights, tops, codes, arena,
    tables, table_slot, table_group, lengths, length_slot, slots, heads, bases, starts, scale,
    positions, places, cap, window,
    FORMS: tl.constexpr, KEY_FIELDS: tl.constexpr, FORM_FIELDS: tl.constexpr,
    G: tl.constexpr, HK: tl.constexpr, NQ: tl.constexpr, N: tl.constexpr, GP: tl.constexpr,
    DQ: tl.constexpr, ZEROS: tl.constexpr, SCALE: tl.constexpr, PAGE: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr = False, CAP: tl.constexpr = False, WINDOW: tl.constexpr = False,
    TRACKED: tl.constexpr = False,
):  # fmt: skip
    """Compute the softmax weights of every tile of a split. Arguments as of
    `stored_score_kernel`."""
    ONE_PAGE: tl.constexpr = PAGE % BLOCK == 0  # a tile lies in one page
    after_launch(PDL)
    slice = tl.program_id(0)
    item = tl.load(starts + 2 * slice)
    tile = tl.load(starts + 2 * slice + 1)
    end_item = tl.load(starts + 2 * slice + 2)
    end_tile = tl.load(starts + 2 * slice + 3)
    n, row = tl.arange(0, GP), tl.arange(0, BLOCK)
    while (item < end_item) | ((item == end_item) & (tile < end_tile)):
        b, h = item // HK, item % HK
        record = heads + (KEY_FIELDS + FORM_FIELDS * len(FORMS)) * h
        g, first_head, scale_row = tl.load(record), tl.load(record + 1), tl.load(record + 2)
        slot = tl.load(slots + b).to(tl.int64)
        length = tl.load(lengths + slot * length_slot + g)
        stop = tl.cdiv(length, BLOCK)
        if item == end_item:
            stop = end_tile
        if tile < stop:
            query = q + b * q_stride + (first_head + n) * DQ
            table = tables + slot * table_slot + g * table_group
            base = tl.load(bases + b * G + g).to(tl.int64) * NQ
            to = base + first_head - g * NQ + n
            position, place = 0, 0
            if WINDOW:
                position, place = tl.load(positions + b).to(tl.int32), tl.load(places + g)
            for t in tl.range(tile, stop, num_stages=1):
                rows = length - t * BLOCK
                page = tile_pages(table, t, row, length, PAGE, ONE_PAGE).to(tl.int64) * 32
                entry_rows = tile_rows(t, row, PAGE, ONE_PAGE)
                s = tl.zeros([BLOCK, GP], tl.float32)
                for f in tl.static_range(len(FORMS)):
                    s = _run(
                        s, codes, query, n < N, page, entry_rows, row < rows, arena,
                        record + (KEY_FIELDS + FORM_FIELDS * f), scale_row, FORMS[f][0],
                        FORMS[f][1], ZEROS, SCALE, ALIGN, STAGES, ONE_PAGE,
                    )  # fmt: skip
                s = limited(
                    s * scale, t * BLOCK, page, entry_rows, row < rows,
                    position, place, arena, cap, window, CAP, WINDOW, TRACKED,
                )  # fmt: skip
                s = tl.where((row < rows)[:, None], s, float("-inf"))
                at = to + t * (BLOCK // SPAN) * NQ
                store_weights(s, weights, tops, at, n < N, rows, BLOCK, GP, NQ, SPAN)
        item += 1
        tile = 0
