"""Gluon kernel of scores with reconstructed keys on Hopper: first pass of the kernel `triton`.

Chosen on Hopper where `plan.hopper_heads` is not 0; computes what `scores_triton` computes, whose
docstring explains the method. Entries store no positions here, and codes become numbers before they
are multiplied. A program is one warp group and computes HEADS KV heads of LATENTS latents side by
side: maps stay in shared memory, entries go through registers, and one asynchronous matrix product
computes both halves of all pairs, which Triton cannot express.

Shapes as in `scores_triton`; OUT, SCORES, ROTATED, FOLDED, ROWS, QUERIES: register layouts.
"""
# mypy: ignore-errors
# Tuples grow in unrolled loops.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mma_v2,
    warpgroup_mma_wait,
)

from kvfold.ops.common.rope_triton import ROTATE_BACK
from kvfold.ops.latent_decode.tiles_gluon import (
    BLOCK,
    copy_matrix,
    copy_rows,
    latent_of,
    load_scales,
    matrix_pieces,
    multiply,
    pages_of,
    row_pieces,
    shared,
    token_of,
)

QP = gl.constexpr(8)  # columns of a product with queries
# Rotation of a pair as in `rope_triton`, but nothing is added.
_ROTATE = gl.constexpr(
    "{ .reg .b32 x, y, n; cvt.rn.f16x2.f32 x, $3, $2; cvt.rn.f16x2.f32 y, $5, $4;"
    " neg.f16x2 n, y; mul.f16x2 $0, x, $6; fma.rn.f16x2 $0, n, $7, $0;"
    " mul.f16x2 $1, y, $6; fma.rn.f16x2 $1, x, $7, $1; }"
)


@gluon.jit
def _after_launch(PDL: gl.constexpr):
    """Programmatic dependent launch: see `decode.kernels.after_launch`."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _angles(pair):
    """Split int32 into its two fp16 numbers: cos, sin."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;", "=&r,=r,r,r", [pair],
        dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _pairs(q, n, pair, in_range, scale, D: gl.constexpr, HALF: gl.constexpr):
    """Load both halves of the queries' pairs, as `rope_triton.load_pairs`, times `scale`, in
    fp16."""
    first = gl.where(pair < HALF, pair, pair + HALF)
    second = first + gl.where(pair < HALF, HALF, D // 2 - HALF)
    at = q + n[None, :] * D
    in_range = in_range[None, :] & (pair < D // 2)[:, None]
    x = gl.load(at + first[:, None], in_range, 0.0).to(gl.float32)
    y = gl.load(at + second[:, None], in_range, 0.0).to(gl.float32)
    return (x * scale).to(gl.float16), (y * scale).to(gl.float16)


@gluon.jit
def _halves(x):
    """Split x into the left and the right half of its columns."""
    ROWS: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, [ROWS, 2, WIDTH]), (0, 2, 1)))


@gluon.jit
def _slow(s, mean, u, odd, NP: gl.constexpr, K: gl.constexpr, SCORES: gl.constexpr):
    """Scores of slow pairs [BLOCK, QP] from the products s [BLOCK, GP] of latents with folded
    queries.

    u [BLOCK]: offset in the stretch; odd [BLOCK, QP]: the scale, times u in columns of odd powers.
    """
    GP: gl.constexpr = K * NP
    FOLDED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GP, 16])
    s = gl.convert_layout(s, FOLDED, assert_trivial=True) + mean[None, :]
    low, high = _halves(s)  # powers 0 and 1, 2 and 3
    if NP == 8:
        low, low_odd = _halves(low)
        high, high_odd = _halves(high)
    low = gl.convert_layout(low, SCORES, assert_trivial=True)
    high = gl.convert_layout(high, SCORES, assert_trivial=True)
    if NP == 8:
        low += gl.convert_layout(low_odd, SCORES, assert_trivial=True) * u[:, None]
        high += gl.convert_layout(high_odd, SCORES, assert_trivial=True) * u[:, None]
    return (low + high * (u * u)[:, None]) * odd


@gluon.jit
def _as_keys(memory, ROTATED: gl.constexpr, SCORES: gl.constexpr):
    """Load `memory` [BLOCK, F] in the layout of reconstructed pairs.

    It is loaded as an operand of a product, which has the same elements in the same registers.
    """
    operand = memory.load(gl.DotOperandLayout(0, SCORES, 2))
    return gl.convert_layout(operand, ROTATED, assert_trivial=True)


@gluon.jit
def _rotated(xy, rotations, F: gl.constexpr):
    """Rotate reconstructed pairs by their entry's offset in the tile: both halves, fp16 [BLOCK, F].

    xy [BLOCK, 2 F]: both halves of A z. rotations: cos and sin.
    """
    ROTATED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F, 16])
    x, y = _halves(xy)
    x = gl.convert_layout(x, ROTATED, assert_trivial=True)
    y = gl.convert_layout(y, ROTATED, assert_trivial=True)
    cos, sin = rotations
    return gl.inline_asm_elementwise(
        _ROTATE, "=&r,=&r,f,f,f,f,r,r", [x, y, cos, sin],
        dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _rotated_back(queries, angles):
    """Rotate both halves of queries back by the angles of their tile."""
    x, y = queries
    cos, sin = angles
    return gl.inline_asm_elementwise(
        ROTATE_BACK, "=&r,=&r,r,r,r,r", [x, y, cos[:, None], sin[:, None]],
        dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _scores(s, keys, means, queries, SCORES: gl.constexpr):
    """Add to s [BLOCK, QP] the products of queries with both halves of A z and of mu."""
    KEYS: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    for half in gl.static_range(2):
        s = mma_v2(means.index(half).load(KEYS), queries[half], s)
    for half in gl.static_range(2):
        s = mma_v2(gl.convert_layout(keys[half], KEYS, assert_trivial=True), queries[half], s)
    return s


@gluon.jit
def _weights(s, rows, NP: gl.constexpr, SPAN: gl.constexpr, OUT: gl.constexpr):
    """Return exp2(s - top) [SPANS, SPAN, NP] and the span maxima top [SPANS, NP] of scores s
    [BLOCK, QP].

    rows: entries of the tile that exist.
    """
    SPANS: gl.constexpr = BLOCK // SPAN
    s = gl.sum(gl.reshape(s, [SPANS, 2, SPAN // 2, s.shape[1] // NP, NP]), 3)
    s = gl.reshape(gl.permute(s, (0, 2, 1, 3)), [SPANS, SPAN, NP])  # see `token_of`
    s = gl.convert_layout(s, OUT, assert_trivial=True)
    inside = gl.arange(0, SPANS)[:, None] * SPAN + gl.arange(0, SPAN)[None, :] < rows
    s = gl.where(inside[:, :, None], s, float("-inf"))
    top = gl.maximum(gl.max(s, 1), -1e30)  # finite, for spans without entries
    return gl.exp2(s - gl.expand_dims(top, 1)), top


@gluon.jit
def _store(
    weights_and_tops, weights, tops, to, rows, N: gl.constexpr, NP: gl.constexpr, NQ: gl.constexpr,
    SPAN: gl.constexpr,
):  # fmt: skip
    """Store what `_weights` returned. to: the column of the first head in the tile's first span."""
    weight, top = weights_and_tops
    SPANS: gl.constexpr = BLOCK // SPAN
    at = gl.arange(0, SPANS)[:, None] * NQ + gl.arange(0, NP)[None, :]
    in_range = (gl.arange(0, NP) < N)[None, :] & (gl.arange(0, SPANS) * SPAN < rows)[:, None]
    gl.store(tops + to + at, top, in_range)
    span, row, n = gl.arange(0, SPANS), gl.arange(0, SPAN), gl.arange(0, NP)
    at = (span[:, None, None] * NQ + n[None, None, :]) * SPAN + row[None, :, None]
    in_range = (n < N)[None, None, :] & (span * SPAN < rows)[:, None, None]
    gl.store(weights + to * SPAN + at, weight.to(weights.dtype.element_ty), in_range)


@gluon.jit
def _fetch(
    t, tile, stop, keys, pages, latents, folded, rows, folds,
    W0: gl.constexpr, W1: gl.constexpr, C: gl.constexpr, FOLDS: gl.constexpr, UNITS: gl.constexpr,
    WIDTH: gl.constexpr, VECTOR: gl.constexpr, PAGE: gl.constexpr, REACH: gl.constexpr,
    SLOW: gl.constexpr,
):  # fmt: skip
    """Start to copy tile t's entries and, if a stretch begins with it, the stretch's folded
    queries."""
    for i in gl.static_range(len(latents)):
        copy_rows(rows[i], keys, latents[i], pages, t, W0, W1, WIDTH, VECTOR, PAGE)
    stretch = t * BLOCK // REACH
    # Two nested conditions: without folds, the inner block would not compile.
    if SLOW:  # noqa: SIM102
        if (t < stop) & ((t == tile) | (t * BLOCK % REACH == 0)):
            for i in gl.static_range(len(latents)):
                at = folded + (stretch * UNITS + i) * (C * (W0 + W1) * FOLDS)
                copy_matrix(folds[i], at, W0, W1, FOLDS, C, stretch % 2)
    async_copy.commit_group()


@gluon.jit
def _rotate_means(to, means, rotations, PAIRS: gl.constexpr):
    """Store mu, rotated by every entry's offset in a tile: both halves into the buffers of `to`.

    means: pointers to mu at the pairs of a column.
    """
    x, y = gl.load(means)[None, :], gl.load(means + PAIRS)[None, :]
    to.index(0).store((x * rotations[0] - y * rotations[1]).to(gl.float16))
    to.index(1).store((y * rotations[0] + x * rotations[1]).to(gl.float16))


@gluon.jit
def _by_head(products, LATENTS: gl.constexpr, SHARE: gl.constexpr, SLOW: gl.constexpr):
    """Divide the results of `multiply` by head: reconstructed pairs, and products with folded
    queries."""
    PRODUCTS: gl.constexpr = 2 if SLOW else 1
    if SHARE == 2:
        xy, slow = _halves(products[0]), _halves(products[PRODUCTS - 1])
    else:
        xy = products[0], products[(LATENTS - 1) * PRODUCTS]
        slow = products[PRODUCTS - 1], products[LATENTS * PRODUCTS - 1]
    return xy, slow


@gluon.jit
def _tile_weights(
    xy, slow, lows, u, odd, row_rotations, means, queries, rows,
    NP: gl.constexpr, K: gl.constexpr, F: gl.constexpr, SPAN: gl.constexpr, SCORES: gl.constexpr,
    OUT: gl.constexpr,
):  # fmt: skip
    """Return `_weights` of every head.

    Heads are computed side by side, so that one head's work fills the time in which another waits.
    """
    HEADS: gl.constexpr = len(queries)
    keys, scores, weights = (), (), ()
    for j in gl.static_range(HEADS):
        keys += (_rotated(xy[j], row_rotations, F),)
    for j in gl.static_range(HEADS):
        s = gl.zeros([BLOCK, QP], gl.float32, SCORES)
        if len(lows) > 0:
            s = _slow(slow[j], lows[j], u, odd, NP, K, SCORES)
        scores += (_scores(s, keys[j], means[j], queries[j], SCORES),)
    for j in gl.static_range(HEADS):
        weights += (_weights(scores[j], rows, NP, SPAN, OUT),)
    return weights


@gluon.jit
def score_kernel(
    q, q_stride, up, means, rope, rope_fp16, folded, extra, weights, tops, keys, scales,
    tables, table_slot, table_group, lengths, length_slot, slots, heads, bases, starts, scale,
    G: gl.constexpr, HG: gl.constexpr, HEADS: gl.constexpr, LATENTS: gl.constexpr,
    N: gl.constexpr, NP: gl.constexpr, K: gl.constexpr, D: gl.constexpr, HALF: gl.constexpr,
    F: gl.constexpr, PAIRS: gl.constexpr, W0: gl.constexpr, W1: gl.constexpr, WIDTH: gl.constexpr,
    BITS: gl.constexpr, ZEROS: gl.constexpr, VECTOR: gl.constexpr, PAGE: gl.constexpr,
    REACH: gl.constexpr, SPAN: gl.constexpr, PDL: gl.constexpr = False,
):  # fmt: skip
    """Compute the softmax weights of every tile of a split; items are (sequence, HEADS KV heads).

    SHARE = HEADS / LATENTS heads of a latent lie side by side.
    up [Hk / SHARE, C, W, SHARE * 2 F]: A^T, both halves of the reconstructed pairs of every head.
    folded [stretches, HG / SHARE, C, W, SHARE * GP]; means fp32 [Hk, 6, PAIRS]: `Packed.sums`.
    keys, scales: the arena as 16-bit words and as fp16.
    WIDTH: words of an entry, 0 if they differ; VECTOR: words that divide all strides.
    The others as in `scores_triton.score_kernel`.
    """
    C: gl.constexpr = 16 // BITS
    W: gl.constexpr = W0 + W1
    GP: gl.constexpr = K * NP
    SHARE: gl.constexpr = HEADS // LATENTS
    KEYS: gl.constexpr = SHARE * 2 * F
    FOLDS: gl.constexpr = SHARE * GP
    UNITS: gl.constexpr = G * HG // HEADS
    NQ: gl.constexpr = HG * N
    SLOW: gl.constexpr = F < PAIRS
    HELD: gl.constexpr = C * W <= 256  # registers hold a tile's entries
    SPARING: gl.constexpr = C * W <= 64  # save registers: three programs per multiprocessor
    TYPE: gl.constexpr = up.dtype.element_ty
    WORD: gl.constexpr = keys.dtype.element_ty
    ROTATED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, F, 16])
    FOLDED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GP, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, QP])
    ROWS: gl.constexpr = gl.DotOperandLayout(0, ROTATED, 2)
    QUERIES: gl.constexpr = gl.DotOperandLayout(1, SCORES, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, ROWS)
    LANE: gl.constexpr = [0, 0, 4] if NP > 4 else [0, 0, 0]
    OUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 0, 1]], [[0, 0, 2], LANE, [0, 2, 0], [0, 4, 0], [0, 8, 0]],
        [[1, 0, 0], [2, 0, 0]], [], [BLOCK // SPAN, SPAN, NP],
    )  # fmt: skip
    # Separate buffers, so that no copy waits for another.
    rows, maps, folds, rotated_means = (), (), (), ()
    for _ in gl.static_range(LATENTS):
        rows += (row_pieces(W0, W1, WORD),)
        maps += (matrix_pieces(C, W0, W1, KEYS, TYPE),)
        if SLOW:
            folds += (matrix_pieces(2 * C, W0, W1, FOLDS, TYPE),)
    for _ in gl.static_range(HEADS):
        rotated_means += (shared(2, BLOCK, F, gl.float16),)
    _after_launch(PDL)
    slice = gl.program_id(0)
    item = gl.load(starts + 2 * slice)
    tile = gl.load(starts + 2 * slice + 1)
    end_item = gl.load(starts + 2 * slice + 2)
    end_tile = gl.load(starts + 2 * slice + 3)
    row = token_of(gl.arange(0, BLOCK, gl.SliceLayout(1, ROTATED)))
    pair = gl.arange(0, F, gl.SliceLayout(0, ROTATED))
    rotation_at = rope_fp16 + (row[:, None] * PAIRS + pair[None, :]) * 2
    row_rotations = gl.load(rotation_at), gl.load(rotation_at + 1)
    if SPARING:
        shared_rotations = shared(2, BLOCK, F, gl.float16)
        shared_rotations.index(0).store(row_rotations[0])
        shared_rotations.index(1).store(row_rotations[1])
    query_pair = gl.arange(0, F, gl.SliceLayout(1, QUERIES))
    column = gl.arange(0, QP, gl.SliceLayout(0, QUERIES))
    k_column = gl.arange(0, GP, gl.SliceLayout(0, FOLDED))
    offset = token_of(gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES))) - REACH // 2
    is_odd = (gl.arange(0, QP, gl.SliceLayout(0, SCORES)) >= NP)[None, :]
    while (item < end_item) | ((item == end_item) & (tile < end_tile)):
        b, h = item // UNITS, item % UNITS * HEADS
        g = h // HG
        slot = gl.load(slots + b).to(gl.int64)
        length = gl.load(lengths + slot * length_slot + g)
        stop = gl.cdiv(length, BLOCK)
        if item == end_item:
            stop = end_tile
        if tile < stop:
            latents, queries, sizes = (), (), ()
            async_copy.wait_group(0)
            gl.thread_barrier()  # the last item's buffers are free
            for i in gl.static_range(LATENTS):
                first = h + i * SHARE
                latents += (latent_of(heads + 8 * first, WIDTH, VECTOR),)
                at = up + (first // SHARE).to(gl.int64) * (C * W * KEYS)
                copy_matrix(maps[i], at, W0, W1, KEYS, C, 0)
            table = tables + slot * table_slot + g * table_group
            group_item = b * G + g
            base = gl.load(bases + group_item)
            to = base.to(gl.int64) * NQ + (h % HG) * N
            stretch = ((base // (REACH // SPAN) + group_item) * HG + h % HG).to(gl.int64)
            group_folded = folded + stretch * (C * W * GP)
            group_extra = extra + stretch * 3 * GP + k_column
            pages = pages_of(tile, stop, table, W0, W1, VECTOR, PAGE)
            _fetch(
                tile, tile, stop, keys, pages, latents, group_folded, rows, folds, W0, W1, C, FOLDS,
                HG // SHARE, WIDTH, VECTOR, PAGE, REACH, SLOW,
            )  # fmt: skip
            if C > 1:
                sizes = load_scales(scales, latents, tile, stop, table, ROW, PAGE, ZEROS)
            pages = pages_of(tile + 1, stop, table, W0, W1, VECTOR, PAGE)
            if SPARING:
                row_rotations = (
                    shared_rotations.index(0).load(ROTATED),
                    shared_rotations.index(1).load(ROTATED),
                )
            for j in gl.static_range(HEADS):
                head_q = q + b * q_stride + (h + j) * N * D
                queries += (_pairs(head_q, column, query_pair, column < N, scale, D, HALF),)
                at = means + (h + j) * 6 * PAIRS + pair
                _rotate_means(rotated_means[j], at, row_rotations, PAIRS)
            for t in range(tile, stop):
                angles = _angles(gl.load(rope + t * BLOCK * PAIRS + query_pair))
                u = (t * BLOCK % REACH + offset).to(gl.float32) * (2 / REACH)
                odd = gl.where(is_odd, u[:, None], 1.0) * scale
                lows, rotated_queries = (), ()
                for j in gl.static_range(HEADS if SLOW else 0):
                    lows += (gl.load(group_extra + (t * BLOCK // REACH * HG + j) * 3 * GP),)
                async_copy.wait_group(0)
                gl.thread_barrier()
                if (t == tile) | (t * BLOCK % REACH == 0):
                    fence_async_shared()  # maps and folded queries have arrived
                products = multiply(
                    rows, maps, folds, sizes, t * BLOCK // REACH % 2 * C, BITS, ZEROS, KEYS, FOLDS,
                    SLOW, ROWS if HELD else None,
                )  # fmt: skip
                if not HELD:
                    products = warpgroup_mma_wait(0, products)
                _fetch(
                    t + 1, tile, stop, keys, pages, latents, group_folded, rows, folds, W0, W1, C,
                    FOLDS, HG // SHARE, WIDTH, VECTOR, PAGE, REACH, SLOW,
                )  # fmt: skip
                if C > 1:
                    sizes = load_scales(scales, latents, t + 1, stop, table, ROW, PAGE, ZEROS)
                pages = pages_of(t + 2, stop, table, W0, W1, VECTOR, PAGE)
                for j in gl.static_range(HEADS):
                    rotated_queries += (_rotated_back(queries[j], angles),)
                if HELD:
                    products = warpgroup_mma_wait(0, products)
                xy, slow = _by_head(products, LATENTS, SHARE, SLOW)
                if SPARING:
                    row_rotations = (
                        _as_keys(shared_rotations.index(0), ROTATED, SCORES),
                        _as_keys(shared_rotations.index(1), ROTATED, SCORES),
                    )
                num_rows = length - t * BLOCK
                weights_and_tops = _tile_weights(
                    xy, slow, lows, u, odd, row_rotations, rotated_means, rotated_queries, num_rows,
                    NP, K, F, SPAN, SCORES, OUT,
                )  # fmt: skip
                for j in gl.static_range(HEADS):
                    head_to = to + t * (BLOCK // SPAN) * NQ + j * N
                    _store(weights_and_tops[j], weights, tops, head_to, num_rows, N, NP, NQ, SPAN)
        item += 1
        tile = 0
