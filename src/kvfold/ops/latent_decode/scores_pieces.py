"""Triton kernel of scores with keys reconstructed in pieces: first pass of `triton_pieces`.

Serves latents of any width and several bit widths, on CUDA. The part of the map that belongs to a
piece is loaded again for every tile, so the width of a latent is not limited by on-chip memory. All
pairs are reconstructed.

Shapes as in `scores_triton`; HK KV heads; M pieces (see `pieces.KeyPieces`) of up to W code words,
of C codes each. FORMS: (bits, W) of every bit width in the layer.
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
    load_rotations,
    rotated_means,
    rotated_scores,
)


@triton.jit
def _add_piece(
    x, y, record, up, sums, page, row, inside, codes, arena, scale_row,
    BITS: tl.constexpr, W: tl.constexpr, F: tl.constexpr, ZEROS: tl.constexpr, SCALE: tl.constexpr,
    ALIGN: tl.constexpr, ONE_PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add to both halves x, y [BLOCK, F] of A z what one piece of z contributes.

    record: of the piece. sums fp32 [4, F]: both halves of what the middle code adds, and a zero
        point of 1.
    """
    C: tl.constexpr = 16 // BITS
    row_words = tl.multiple_of(tl.load(record), ALIGN)
    words = tl.multiple_of(tl.load(record + 1) // C, ALIGN)
    start = tl.multiple_of(tl.load(record + 2), 8)
    piece_map = up + tl.load(record + 5).to(tl.int64) * 2 * F
    word, pair = tl.arange(0, W), tl.arange(0, F)
    if ONE_PAGE:
        at = codes + (page + start) + ((row * row_words)[:, None] + word[None, :])
    else:
        at = codes + ((page + start + row * row_words)[:, None] + word[None, :])
    in_range = (word < words)[None, :]
    if MASKED:
        in_range = in_range & inside[:, None]
    z = tl.load(at, in_range, 0)
    a_at = piece_map + word[:, None] * F + pair[None, :]
    if BITS == 16:
        x, y = tl.dot(z, tl.load(a_at), x), tl.dot(z, tl.load(a_at + W * F), y)
    else:
        numbers = unpack_all(z, BITS)
        code_x = tl.broadcast_to(tl.load(sums + pair)[None, :], x.shape[0], F)
        code_y = tl.broadcast_to(tl.load(sums + F + pair)[None, :], x.shape[0], F)
        for J in tl.static_range(C):
            code_x = tl.dot(numbers[J], tl.load(a_at + 2 * J * W * F), code_x)
            code_y = tl.dot(numbers[J], tl.load(a_at + (2 * J + 1) * W * F), code_y)
        scale_at = tl.load(record + 3) + row * scale_row
        scale = (load_scale(arena, page, scale_at, inside, BITS, SCALE) * UNIT)[:, None]
        x, y = x + code_x * scale, y + code_y * scale
        if ZEROS:
            zero = load_scale(arena, page, scale_at + tl.load(record + 4), inside, 16, 2)[:, None]
            x += zero * tl.load(sums + 2 * F + pair)[None, :]
            y += zero * tl.load(sums + 3 * F + pair)[None, :]
    return x, y


@triton.jit
def _scores(
    t, page, row, inside, record, pieces, up, sums, codes, arena, rope, exact, mean, queries,
    rotations,
    FORMS: tl.constexpr, HEAD_FIELDS: tl.constexpr, PIECE_FIELDS: tl.constexpr, F: tl.constexpr,
    QP: tl.constexpr, ZEROS: tl.constexpr, SCALE: tl.constexpr, TRACKED: tl.constexpr,
    BIASED: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    ONE_PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK, QP] of tile t. record: of the KV head."""
    scale_row, position_start = tl.load(record + 2), tl.load(record + 3)
    x, y = tl.zeros([BLOCK, F], tl.float32), tl.zeros([BLOCK, F], tl.float32)
    for f in tl.static_range(len(FORMS)):
        begin, end = tl.load(record + HEAD_FIELDS + f), tl.load(record + HEAD_FIELDS + f + 1)
        for i in tl.range(begin, end, num_stages=STAGES):
            x, y = _add_piece(
                x, y, pieces + i * PIECE_FIELDS, up, sums + i * 4 * F, page, row, inside, codes,
                arena, scale_row, FORMS[f][0], FORMS[f][1], F, ZEROS, SCALE, ALIGN, ONE_PAGE,
                MASKED,
            )  # fmt: skip
    none = tl.zeros([BLOCK, QP], tl.float32)
    return rotated_scores(
        x, y, none, t, page, row, inside, arena, rope, exact, position_start, mean[0], mean[1],
        queries, rotations, TRACKED, BIASED, F, BLOCK,
    )  # fmt: skip


@step_kernel
def piece_score_kernel(
    q, q_stride, up, sums, means, rope, rope_fp16, exact, weights, tops, codes, arena,
    tables, table_slot, table_group, lengths, length_slot, slots, heads, pieces, bases, starts,
    scale,
    FORMS: tl.constexpr, HEAD_FIELDS: tl.constexpr, PIECE_FIELDS: tl.constexpr,
    G: tl.constexpr, HK: tl.constexpr, NQ: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, F: tl.constexpr, ZEROS: tl.constexpr, SCALE: tl.constexpr,
    TRACKED: tl.constexpr, BIASED: tl.constexpr, PAGE: tl.constexpr, ALIGN: tl.constexpr,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute the softmax weights of every tile of a split; items are (sequence, KV head).

    q [B, Hq, D]; up: of every piece [C, 2, W, F], sums fp32 [M, 4, F]: see `_add_piece`; means fp32
    [HK, 2, F]; heads, pieces: see `KeyPieces`; the others as in `scores_triton.score_kernel`.
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
    cos, sin = load_rotations(rope_fp16, BLOCK, F, F)
    while (item < end_item) | ((item == end_item) & (tile < end_tile)):
        b, h = item // HK, item % HK
        record = heads + (HEAD_FIELDS + len(FORMS) + 1) * h
        g, first_head = tl.load(record), tl.load(record + 1)
        slot = tl.load(slots + b).to(tl.int64)
        length = tl.load(lengths + slot * length_slot + g)
        stop = tl.cdiv(length, BLOCK)
        if item == end_item:
            stop = end_tile
        if tile < stop:
            q_x, q_y = load_pairs(q + b * q_stride + first_head * D, n, pair, n < N, D, HALF)
            queries = item_queries(q_x, q_y, TRACKED, BIASED)
            mean = tl.load(means + h * 2 * F + pair), tl.load(means + h * 2 * F + F + pair)
            mean_x, mean_y = rotated_means(mean[0], mean[1], cos, sin, exact, BLOCK, F, F, BIASED)
            rotations = (cos, sin, mean_x, mean_y)
            table = tables + slot * table_slot + g * table_group
            base = tl.load(bases + b * G + g).to(tl.int64) * NQ
            to = base + first_head - g * NQ + n
            for t in tl.range(tile, stop, num_stages=1):
                rows = length - t * BLOCK
                page = tile_pages(table, t, row, length, PAGE, ONE_PAGE).to(tl.int64) * 32
                s = _scores(
                    t, page, tile_rows(t, row, PAGE, ONE_PAGE), row < rows, record, pieces, up,
                    sums, codes, arena, rope, exact, mean, queries, rotations, FORMS, HEAD_FIELDS,
                    PIECE_FIELDS, F, QP, ZEROS, SCALE, TRACKED, BIASED, ALIGN, BLOCK, STAGES,
                    ONE_PAGE, True,
                )  # fmt: skip
                s = tl.where((row < rows)[:, None], s * scale, float("-inf"))
                weights_at = to + t * (BLOCK // SPAN) * NQ
                store_weights(s, weights, tops, weights_at, n < N, rows, BLOCK, QP, NQ, SPAN)
        item += 1
        tile = 0
