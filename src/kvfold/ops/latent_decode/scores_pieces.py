"""The first pass over keys rebuilt piece by piece: of any width, in several precisions. A kernel.

Shapes as in `scores_triton`; HK KV heads; a piece is up to W 16-bit words of a row, of C codes. Its
part of the map comes from memory for every tile, so that no width is too much to hold on chip; all
pairs are rebuilt.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

from kvfold.ops.common.codes_triton import UNIT, load_scale, unpack_all
from kvfold.ops.common.rope_triton import load_pairs
from kvfold.ops.common.step_kernel import step_kernel
from kvfold.ops.common.weights_triton import store_weights
from kvfold.ops.decode.kernels import after_launch, tile_pages, tile_rows
from kvfold.ops.latent_decode.scores_triton import (
    item_queries,
    load_turns,
    rotated_scores,
    turned_means,
)


@triton.jit
def _add_piece(
    x, y, line, up, sums, page, row, inside, codes, arena, scale_row,
    BITS: tl.constexpr, W: tl.constexpr, F: tl.constexpr, ZEROS: tl.constexpr, SCALE: tl.constexpr,
    ALIGN: tl.constexpr, ONE_PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Halves x, y [BLOCK, F] of A z and what one piece of z adds. sums fp32 [4, F]: of the piece's
    map, halves of what the codes' middle adds and of a zero of 1."""
    C: tl.constexpr = 16 // BITS
    row_words = tl.multiple_of(tl.load(line), ALIGN)
    words = tl.multiple_of(tl.load(line + 1) // C, ALIGN)
    start = tl.multiple_of(tl.load(line + 2), 8)
    own = up + tl.load(line + 5).to(tl.int64) * 2 * F
    word, pair = tl.arange(0, W), tl.arange(0, F)
    if ONE_PAGE:
        at = codes + (page + start) + ((row * row_words)[:, None] + word[None, :])
    else:
        at = codes + ((page + start + row * row_words)[:, None] + word[None, :])
    there = (word < words)[None, :]
    if MASKED:
        there = there & inside[:, None]
    z = tl.load(at, there, 0)
    a_at = own + word[:, None] * F + pair[None, :]
    if BITS == 16:
        x, y = tl.dot(z, tl.load(a_at), x), tl.dot(z, tl.load(a_at + W * F), y)
    else:
        numbers = unpack_all(z, BITS)
        own_x = tl.broadcast_to(tl.load(sums + pair)[None, :], x.shape[0], F)
        own_y = tl.broadcast_to(tl.load(sums + F + pair)[None, :], x.shape[0], F)
        for J in tl.static_range(C):
            own_x = tl.dot(numbers[J], tl.load(a_at + 2 * J * W * F), own_x)
            own_y = tl.dot(numbers[J], tl.load(a_at + (2 * J + 1) * W * F), own_y)
        place = tl.load(line + 3) + row * scale_row
        scale = (load_scale(arena, page, place, inside, BITS, SCALE) * UNIT)[:, None]
        x, y = x + own_x * scale, y + own_y * scale
        if ZEROS:
            zero = load_scale(arena, page, place + tl.load(line + 4), inside, 16, 2)[:, None]
            x += zero * tl.load(sums + 2 * F + pair)[None, :]
            y += zero * tl.load(sums + 3 * F + pair)[None, :]
    return x, y


@triton.jit
def _scores(
    t, page, row, inside, line, pieces, up, sums, codes, arena, rope, exact, mean, queries, turns,
    FORMS: tl.constexpr, HEAD_FIELDS: tl.constexpr, PIECE_FIELDS: tl.constexpr, F: tl.constexpr,
    QP: tl.constexpr, ZEROS: tl.constexpr, SCALE: tl.constexpr, TRACKED: tl.constexpr,
    BIASED: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    ONE_PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK, QP] of tile t."""
    scale_row, position_start = tl.load(line + 2), tl.load(line + 3)
    x, y = tl.zeros([BLOCK, F], tl.float32), tl.zeros([BLOCK, F], tl.float32)
    for f in tl.static_range(len(FORMS)):
        begin, end = tl.load(line + HEAD_FIELDS + f), tl.load(line + HEAD_FIELDS + f + 1)
        for i in tl.range(begin, end, num_stages=STAGES):
            x, y = _add_piece(
                x, y, pieces + i * PIECE_FIELDS, up, sums + i * 4 * F, page, row, inside, codes,
                arena, scale_row, FORMS[f][0], FORMS[f][1], F, ZEROS, SCALE, ALIGN, ONE_PAGE,
                MASKED,
            )  # fmt: skip
    none = tl.zeros([BLOCK, QP], tl.float32)
    return rotated_scores(
        x, y, none, t, page, row, inside, arena, rope, exact, position_start, mean[0], mean[1],
        queries, turns, TRACKED, BIASED, F, BLOCK,
    )  # fmt: skip


@step_kernel
def piece_score_kernel(
    q, q_stride, up, sums, means, rope, turns, exact, weights, tops, codes, arena,
    tables, table_slot, table_group, lengths, length_slot, slots, heads, pieces, bases, starts,
    scale,
    FORMS: tl.constexpr, HEAD_FIELDS: tl.constexpr, PIECE_FIELDS: tl.constexpr,
    G: tl.constexpr, HK: tl.constexpr, NQ: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, F: tl.constexpr, ZEROS: tl.constexpr, SCALE: tl.constexpr,
    TRACKED: tl.constexpr, BIASED: tl.constexpr, PAGE: tl.constexpr, ALIGN: tl.constexpr,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Weights of every tile of a slice; items are (sequence, KV head).

    q [B, Hq, D]; up: of every piece [C, 2, W, F], sums fp32 [M, 4, F]: see `_add_piece`; means fp32
    [HK, 2, F]; heads, pieces: see `KeyPieces`; the rest as of `scores_triton.score_kernel`.
    """
    QP: tl.constexpr = NP if NP > 8 else 8
    ONE_PAGE: tl.constexpr = PAGE % BLOCK == 0  # a tile lies in one page
    after_launch(PDL)
    slice = tl.program_id(0)
    item = tl.load(starts + 2 * slice)
    tile = tl.load(starts + 2 * slice + 1)
    end_item = tl.load(starts + 2 * slice + 2)
    end_tile = tl.load(starts + 2 * slice + 3)
    n, row, pair = tl.arange(0, QP), tl.arange(0, BLOCK), tl.arange(0, F)
    cos, sin = load_turns(turns, BLOCK, F, F)
    while (item < end_item) | ((item == end_item) & (tile < end_tile)):
        b, h = item // HK, item % HK
        line = heads + (HEAD_FIELDS + len(FORMS) + 1) * h
        g, first_head = tl.load(line), tl.load(line + 1)
        slot = tl.load(slots + b).to(tl.int64)
        length = tl.load(lengths + slot * length_slot + g)
        stop = tl.cdiv(length, BLOCK)
        if item == end_item:
            stop = end_tile
        if tile < stop:
            q_x, q_y = load_pairs(q + b * q_stride + first_head * D, n, pair, n < N, D, HALF)
            queries = item_queries(q_x, q_y, TRACKED, BIASED)
            mean = tl.load(means + h * 2 * F + pair), tl.load(means + h * 2 * F + F + pair)
            mean_x, mean_y = turned_means(mean[0], mean[1], cos, sin, exact, BLOCK, F, F, BIASED)
            turned = (cos, sin, mean_x, mean_y)
            table = tables + slot * table_slot + g * table_group
            base = tl.load(bases + b * G + g).to(tl.int64) * NQ
            to = base + first_head - g * NQ + n
            for t in tl.range(tile, stop, num_stages=1):
                rows = length - t * BLOCK
                page = tile_pages(table, t, row, length, PAGE, ONE_PAGE).to(tl.int64) * 32
                s = _scores(
                    t, page, tile_rows(t, row, PAGE, ONE_PAGE), row < rows, line, pieces, up, sums,
                    codes, arena, rope, exact, mean, queries, turned, FORMS, HEAD_FIELDS,
                    PIECE_FIELDS, F, QP, ZEROS, SCALE, TRACKED, BIASED, ALIGN, BLOCK, STAGES,
                    ONE_PAGE, True,
                )  # fmt: skip
                s = tl.where((row < rows)[:, None], s * scale, float("-inf"))
                own = to + t * (BLOCK // SPAN) * NQ
                store_weights(s, weights, tops, own, n < N, rows, BLOCK, QP, NQ, SPAN)
        item += 1
        tile = 0
