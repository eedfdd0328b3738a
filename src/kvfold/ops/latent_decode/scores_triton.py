"""Triton kernel of scores with keys reconstructed from latents: first pass of the kernel `triton`.

Serves latents of one segment on CUDA; on Hopper `scores_gluon` computes the same for common shapes.
Leaves softmax weights of every tile for `values_triton`.

Keys are not rotated to their absolute position. score = (R_a^T q) . (R_o u) with u = A z + mu, for
an entry at position a + o in a tile that begins at position a. So a tile rotates its N queries back
by the angles of a, and its entries by o < BLOCK, whose table stays on chip. Entries that store
their positions (TRACKED) look their angles up instead.

Means mu may be a hundred times larger than the differences between keys (Qwen2.5's biases). With
BIASED, only R_o mu - mu, which is small where mu is large, is added to keys in fp16, and (R_a^T q)
. mu is computed in fp32.

Half of the pairs, the slow pairs, rotate so slowly that they are not reconstructed. Within a
stretch of REACH entries R_o is a polynomial in o with K powers. `fold_kernel` multiplies A^T by the
queries times its coefficients; the K * N resulting vectors are in the latent's space, so latents
are multiplied by them directly (see `maps.Drift`).

Shapes as in `latent_decode`; HG KV heads per group; W code words of a key latent in a tile, in two
pieces W0 + W1 (each a power of two), of C codes each; F of PAIRS pairs are reconstructed; NP: N
rounded up to a power of two; GP = K * NP columns, of which power k has NP from k * NP on; QP: NP,
at least 8.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

from kvfold.ops.common.codes_triton import UNIT, load_fp16, unpack
from kvfold.ops.common.rope_triton import (
    load_angles,
    load_pairs,
    packed_pairs,
    rotate,
    rotate_back,
)
from kvfold.ops.common.step_kernel import step_kernel
from kvfold.ops.common.weights_triton import store_weights
from kvfold.ops.decode.kernels import after_launch, tile_pages, tile_rows
from kvfold.ops.latent_decode import maps as tables_of

OFFSETS, STEP = tl.constexpr(tables_of.OFFSETS), tl.constexpr(tables_of.STEP)


@triton.jit
def _map(up, FIRST: tl.constexpr, W: tl.constexpr, F: tl.constexpr, WORDS: tl.constexpr,
         PAIRS: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Load words FIRST .. FIRST + W of both halves of A^T, F pairs of them, for every code of a
    word.

    If a word has fewer than 4 codes, code 0 is repeated.
    """
    at = up + (FIRST + tl.arange(0, W))[:, None] * PAIRS + tl.arange(0, F)[None, :]
    HALF: tl.constexpr = WORDS * PAIRS
    a0, b0 = tl.load(at), tl.load(at + HALF)
    a1, b1, a2, b2, a3, b3 = a0, b0, a0, b0, a0, b0
    if C > 1:
        a1, b1 = tl.load(at + 2 * HALF), tl.load(at + 3 * HALF)
    if C > 2:
        a2, b2 = tl.load(at + 4 * HALF), tl.load(at + 5 * HALF)
        a3, b3 = tl.load(at + 6 * HALF), tl.load(at + 7 * HALF)
    return a0, b0, a1, b1, a2, b2, a3, b3


@triton.jit
def _reconstruct(x, y, z, maps, BITS: tl.constexpr):
    """Add to x, y [BLOCK, F] both halves of A z, for one piece of z."""
    a0, b0, a1, b1, a2, b2, a3, b3 = maps
    if BITS == 16:
        x, y = tl.dot(z, a0, x), tl.dot(z, b0, y)
    else:
        z0, z1, z2, z3 = unpack(z, BITS)
        x, y = tl.dot(z0, a0, x), tl.dot(z0, b0, y)
        x, y = tl.dot(z1, a1, x), tl.dot(z1, b1, y)
    if BITS == 4:
        x, y = tl.dot(z2, a2, x), tl.dot(z2, b2, y)
        x, y = tl.dot(z3, a3, x), tl.dot(z3, b3, y)
    return x, y


@triton.jit
def _piece(
    at, row_words, inside, FIRST: tl.constexpr, W: tl.constexpr,
    EXACT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load words FIRST .. FIRST + W of entries that begin at pointers `at` [BLOCK, 1]."""
    word = FIRST + tl.arange(0, W)[None, :]
    if EXACT and not MASKED:
        return tl.load(at + word)
    return tl.load(at + word, inside[:, None] & (word < row_words), 0)


@triton.jit
def _attend_folded(
    s, z, folded, FIRST: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr, GP: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Add to s [BLOCK, GP] one piece of z times the folded queries at pointer `folded`."""
    at = folded + (FIRST + tl.arange(0, W))[:, None] * GP + tl.arange(0, GP)[None, :]
    if BITS == 16:
        s = tl.dot(z, tl.load(at), s)
    else:
        z0, z1, z2, z3 = unpack(z, BITS)
        s = tl.dot(z1, tl.load(at + WORDS * GP), tl.dot(z0, tl.load(at), s))
        if BITS == 4:
            s = tl.dot(z2, tl.load(at + 2 * WORDS * GP), s)
            s = tl.dot(z3, tl.load(at + 3 * WORDS * GP), s)
    return s


@triton.jit
def _scores(
    t, page, row, inside, keys, arena, rope, exact, head, maps0, maps1, sums, queries, rotations,
    folded, extra,
    BITS: tl.constexpr, ZEROS: tl.constexpr, TRACKED: tl.constexpr, BIASED: tl.constexpr,
    EXACT: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, F: tl.constexpr, PAIRS: tl.constexpr,
    K: tl.constexpr, NP: tl.constexpr, HG: tl.constexpr, REACH: tl.constexpr, BLOCK: tl.constexpr,
    ONE_PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK, NP] of tile t, whose entries are entries `row` of pages `page` (in 16-bit
    words)."""
    GP: tl.constexpr = K * NP
    QP: tl.constexpr = NP if NP > 8 else 8
    WORDS: tl.constexpr = W0 + W1
    row_words, start, scale_start, scale_row, zero_step, position_start = head
    mean_x, mean_y, low_x, low_y, total_x, total_y = sums
    if EXACT:
        row_words = WORDS
    if ONE_PAGE:
        at = keys + (page + start) + (row * row_words)[:, None]
    else:
        at = keys + (page + (start + row * row_words))[:, None]
    z0 = _piece(at, row_words, inside, 0, W0, EXACT, MASKED)
    z1 = z0
    if W1 > 0:
        z1 = _piece(at, row_words, inside, W0, W1, EXACT, MASKED)
    scale, zero = 1.0, 0.0
    if BITS < 16:
        scale_at = page + scale_start + row * scale_row
        scale = load_fp16(arena, scale_at, inside)[:, None] * UNIT
        if ZEROS:
            zero = load_fp16(arena, scale_at + zero_step, inside)[:, None]
    # Slow pairs: latents times folded queries.
    slow = tl.zeros([BLOCK, QP], tl.float32)
    if F < PAIRS:
        s = tl.zeros([BLOCK, GP], tl.float32)
        column, stretch = tl.arange(0, GP), t * BLOCK // REACH * HG
        folded += stretch * (16 // BITS * WORDS * GP)
        extra += stretch * 3 * GP + column
        mean = tl.load(extra)
        if BITS == 16:
            s += mean[None, :]
        else:
            s += tl.load(extra + GP)[None, :]
        s = _attend_folded(s, z0, folded, 0, W0, WORDS, GP, BITS)
        if W1 > 0:
            s = _attend_folded(s, z1, folded, W0, W1, WORDS, GP, BITS)
        if BITS < 16:
            s = s * scale + mean[None, :]
            if ZEROS:
                s += zero * tl.load(extra + 2 * GP)[None, :]
        offset = t * BLOCK % REACH - REACH // 2 + tl.arange(0, BLOCK)
        u = (offset * (2 / REACH))[:, None]
        s *= _powers(u, (column // NP)[None, :], K)
        slow = tl.sum(tl.reshape(s, [BLOCK, GP // QP, QP]), 1)
    # Fast pairs: reconstructed.
    x, y = tl.zeros([BLOCK, F], tl.float32), tl.zeros([BLOCK, F], tl.float32)
    if BITS < 16:
        x, y = tl.broadcast_to(low_x[None, :], BLOCK, F), tl.broadcast_to(low_y[None, :], BLOCK, F)
    x, y = _reconstruct(x, y, z0, maps0, BITS)
    if W1 > 0:
        x, y = _reconstruct(x, y, z1, maps1, BITS)
    if BITS < 16:
        x, y = x * scale, y * scale
        if ZEROS:
            x, y = x + zero * total_x[None, :], y + zero * total_y[None, :]
    s = rotated_scores(
        x, y, slow, t, page, row, inside, arena, rope, exact, position_start, mean_x, mean_y,
        queries, rotations, TRACKED, BIASED, PAIRS, BLOCK,
    )  # fmt: skip
    return tl.sum(tl.reshape(s, [BLOCK, QP // NP, NP]), 1)


@triton.jit
def rotated_scores(
    x, y, s, t, page, row, inside, arena, rope, exact, position_start, mean_x, mean_y, queries,
    rotations,
    TRACKED: tl.constexpr, BIASED: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add to s [BLOCK, QP] the scores of tile t by pairs that are reconstructed.

    x, y [BLOCK, F]: both halves of A z. queries: of `item_queries`; rotations: cos and sin of
    `load_rotations`, then both halves of `rotated_means`.
    """
    pair = tl.arange(0, x.shape[1])
    q_x, q_y = queries
    cos, sin, rotated_x, rotated_y = rotations
    if TRACKED:
        position = tl.load(arena + (page // 2 + position_start + row), inside, 0)
        cos, sin = load_angles(tl.load(rope + position[:, None] * PAIRS + pair[None, :]))
        x, y = x + mean_x[None, :], y + mean_y[None, :]
        x, y = x.to(tl.float16), y.to(tl.float16)
        x, y = x * cos - y * sin, y * cos + x * sin
        q0, q1 = q_x, q_y
    elif BIASED:
        base = exact + ((OFFSETS + t * (BLOCK // STEP)) * PAIRS + pair) * 2
        base_cos, base_sin = tl.load(base)[:, None], tl.load(base + 1)[:, None]
        q0, q1 = q_x * base_cos + q_y * base_sin, q_y * base_cos - q_x * base_sin
        s += tl.sum(q0 * mean_x[:, None] + q1 * mean_y[:, None], 0)[None, :]
        q0, q1 = q0.to(tl.float16), q1.to(tl.float16)
        x, y = rotate(x, y, cos, sin, rotated_x, rotated_y)
    else:
        base_cos, base_sin = load_angles(tl.load(rope + t * BLOCK * PAIRS + pair))
        q0, q1 = rotate_back(q_x, q_y, base_cos[:, None], base_sin[:, None])
        x, y = rotate(x, y, cos, sin, rotated_x, rotated_y)
    return tl.dot(x, q0) + (tl.dot(y, q1) + s)  # two chains, side by side


@triton.jit
def load_rotations(rope_fp16, BLOCK: tl.constexpr, F: tl.constexpr, PAIRS: tl.constexpr):
    """Load cos and sin of a tile's entries relative to its first, fp16 [BLOCK, F].

    They are laid out like the matrix products that they multiply; otherwise every tile would
    rearrange them.
    """
    cos_at = rope_fp16 + (tl.arange(0, BLOCK)[:, None] * PAIRS + tl.arange(0, F)[None, :]) * 2
    like = tl.dot(tl.zeros([BLOCK, 16], tl.float16), tl.zeros([16, F], tl.float16))
    cos = (tl.load(cos_at).to(tl.float32) + like).to(tl.float16)
    sin = (tl.load(cos_at + 1).to(tl.float32) + like).to(tl.float16)
    return packed_pairs(cos, sin)


@triton.jit
def item_queries(q_x, q_y, TRACKED: tl.constexpr, BIASED: tl.constexpr):
    """Return both halves of an item's queries, in the dtype that `rotated_scores` takes."""
    if TRACKED or not BIASED:
        q_x, q_y = q_x.to(tl.float16), q_y.to(tl.float16)
    return q_x, q_y


@triton.jit
def rotated_means(
    mean_x, mean_y, cos, sin, exact, BLOCK: tl.constexpr, F: tl.constexpr, PAIRS: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """Return both halves of R_o mu for the entries o of a tile, fp16 [BLOCK, F]; with BIASED, of
    R_o mu - mu."""
    nothing = cos * 0
    if BIASED:
        at = exact + (tl.arange(0, BLOCK)[:, None] * PAIRS + tl.arange(0, F)[None, :]) * 2
        cos_less_one, sin_exact = tl.load(at) - 1.0, tl.load(at + 1)
        mean_x, mean_y = mean_x[None, :], mean_y[None, :]
        x, y = (
            mean_x * cos_less_one - mean_y * sin_exact,
            mean_y * cos_less_one + mean_x * sin_exact,
        )
        x, y = packed_pairs(x.to(tl.float16) + nothing, y.to(tl.float16) + nothing)
    else:
        mean_x = tl.broadcast_to(mean_x[None, :], BLOCK, F)
        mean_y = tl.broadcast_to(mean_y[None, :], BLOCK, F)
        x, y = rotate(mean_x, mean_y, cos, sin, nothing, nothing)
    return x, y


@triton.jit
def _powers(u, k, K: tl.constexpr):
    """Return u to the power k, for k < K."""
    x = tl.where(k % 2 == 1, u, 1.0)
    x *= tl.where(k % 4 >= 2, u * u, 1.0)
    if K > 4:
        x *= tl.where(k >= 4, u * u * u * u, 1.0)
    return x


@step_kernel
def score_kernel(
    q, q_stride, up, sums, rope, rope_fp16, exact, folded, extra, weights, tops, keys, arena,
    tables, table_slot, table_group, lengths, length_slot, slots, heads, bases, starts, scale,
    G: tl.constexpr, HG: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, F: tl.constexpr, PAIRS: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr,
    BITS: tl.constexpr, ZEROS: tl.constexpr, TRACKED: tl.constexpr, BIASED: tl.constexpr,
    EXACT: tl.constexpr, PAGE: tl.constexpr, ALIGN: tl.constexpr, REACH: tl.constexpr,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute the softmax weights of every tile of a split; items are (sequence, KV head).

    q [B, Hq, D].
    up [Hk, C, 2, W, PAIRS] and sums fp32 [Hk, 6, PAIRS]: see `maps.Packed`.
    rope int32 [M, PAIRS]: `rope_table`; rope_fp16: the same as fp16 numbers; exact: `exact_table`.
    folded, extra: see `fold_kernel`.
    weights [spans, HG * N, SPAN], tops fp32 [spans, HG * N] in log2: the spans of (b, g) begin at
    bases int32 [B * G].
    keys: the arena as 16-bit words, arena: as int32.
    heads: `LatentGroups.keys`; HALF: half of the rotated dims.
    """
    C: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = W0 + W1
    GP: tl.constexpr = K * NP
    QP: tl.constexpr = NP if NP > 8 else 8
    HK: tl.constexpr = G * HG
    NQ: tl.constexpr = HG * N
    ONE_PAGE: tl.constexpr = PAGE % BLOCK == 0  # a tile lies in one page
    after_launch(PDL)
    slice = tl.program_id(0)
    item = tl.load(starts + 2 * slice)
    tile = tl.load(starts + 2 * slice + 1)
    end_item = tl.load(starts + 2 * slice + 2)
    end_tile = tl.load(starts + 2 * slice + 3)
    n, row, pair, column = tl.arange(0, NP), tl.arange(0, BLOCK), tl.arange(0, F), tl.arange(0, QP)
    cos, sin = load_rotations(rope_fp16, BLOCK, F, PAIRS)
    while (item < end_item) | ((item == end_item) & (tile < end_tile)):
        b, h = item // HK, item % HK
        g = h // HG
        slot = tl.load(slots + b).to(tl.int64)
        length = tl.load(lengths + slot * length_slot + g)
        stop = tl.cdiv(length, BLOCK)
        if item == end_item:
            stop = end_tile
        if tile < stop:
            record = heads + 8 * h
            row_words = tl.multiple_of(tl.load(record), ALIGN)
            start = tl.multiple_of(tl.load(record + 2), 8)
            head = (
                row_words, start, tl.load(record + 3), tl.load(record + 4), tl.load(record + 5),
                tl.load(record + 6),
            )  # fmt: skip
            q_x, q_y = load_pairs(q + b * q_stride + h * N * D, column, pair, column < N, D, HALF)
            queries = item_queries(q_x, q_y, TRACKED, BIASED)
            map_at = up + h * C * 2 * WORDS * PAIRS
            maps0 = _map(map_at, 0, W0, F, WORDS, PAIRS, C)
            maps1 = maps0
            if W1 > 0:
                maps1 = _map(map_at, W0, W1, F, WORDS, PAIRS, C)
            sum_at = sums + h * 6 * PAIRS + pair
            six = (
                tl.load(sum_at), tl.load(sum_at + PAIRS), tl.load(sum_at + 2 * PAIRS),
                tl.load(sum_at + 3 * PAIRS), tl.load(sum_at + 4 * PAIRS),
                tl.load(sum_at + 5 * PAIRS),
            )  # fmt: skip
            mean_x, mean_y = rotated_means(six[0], six[1], cos, sin, exact, BLOCK, F, PAIRS, BIASED)
            rotations = (cos, sin, mean_x, mean_y)
            table = tables + slot * table_slot + g * table_group
            group_item = b * G + g
            base = tl.load(bases + group_item)
            to = base.to(tl.int64) * NQ + (h % HG) * N + n
            stretch = ((base // (REACH // SPAN) + group_item) * HG + h % HG).to(tl.int64)
            own_folded, own_extra = folded + stretch * (C * WORDS * GP), extra + stretch * 3 * GP
            full = tl.minimum(stop, length // BLOCK)
            next_page = tile_pages(table, tile, row, length, PAGE, ONE_PAGE)
            for t in tl.range(tile, full, num_stages=STAGES):
                page = next_page.to(tl.int64) * 32
                next_page = tile_pages(table, t + 1, row, length, PAGE, ONE_PAGE)
                s = _scores(
                    t, page, tile_rows(t, row, PAGE, ONE_PAGE), row >= 0, keys, arena, rope, exact,
                    head, maps0, maps1, six, queries, rotations, own_folded, own_extra, BITS, ZEROS,
                    TRACKED, BIASED, EXACT, W0, W1, F, PAIRS, K, NP, HG, REACH, BLOCK, ONE_PAGE,
                    False,
                )  # fmt: skip
                weights_at = to + t * (BLOCK // SPAN) * NQ
                store_weights(
                    s * scale, weights, tops, weights_at, n < N, BLOCK, BLOCK, NP, NQ, SPAN
                )
            for t in tl.range(tl.maximum(tile, full), stop, num_stages=1):
                rows = length - t * BLOCK
                page = tile_pages(table, t, row, length, PAGE, ONE_PAGE).to(tl.int64) * 32
                s = _scores(
                    t, page, tile_rows(t, row, PAGE, ONE_PAGE), row < rows, keys, arena, rope,
                    exact, head, maps0, maps1, six, queries, rotations, own_folded, own_extra, BITS,
                    ZEROS, TRACKED, BIASED, EXACT, W0, W1, F, PAIRS, K, NP, HG, REACH, BLOCK,
                    ONE_PAGE, True,
                )  # fmt: skip
                s = tl.where((row < rows)[:, None], s * scale, float("-inf"))
                weights_at = to + t * (BLOCK // SPAN) * NQ
                store_weights(s, weights, tops, weights_at, n < N, rows, BLOCK, NP, NQ, SPAN)
        item += 1
        tile = 0
