"""The first pass of attention over rebuilt keys: weights of every tile of rows. Triton kernels.

Shapes as in `rebuild`; GP query heads of a KV head, padded; W 16-bit words of a key row in a tile,
in pieces W0 + W1, of C codes.

Keys are not rotated to where they are: score = (R_a^T q) . (R_o u) for u = A z + mu at position
a + o, so that a tile rotates its N queries by its first row's angles a, and its rows by o < BLOCK,
whose table stays on chip. Rows that carry positions look their angles up instead.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

from kvfold.ops.codes_triton import INTERPRET, unpack

# fp32 x0 x1 y0 y1 and fp16 pairs cos, sin, a, b -> a + x cos - y sin, b + y cos + x sin.
_ROTATE = tl.constexpr(
    "{ .reg .b32 x, y, n; cvt.rn.f16x2.f32 x, $3, $2; cvt.rn.f16x2.f32 y, $5, $4;"
    " neg.f16x2 n, y; fma.rn.f16x2 $0, x, $6, $8; fma.rn.f16x2 $0, n, $7, $0;"
    " fma.rn.f16x2 $1, y, $6, $9; fma.rn.f16x2 $1, x, $7, $1; }"
)


@triton.jit
def _rotate(x, y, cos, sin, a, b):
    """Halves x, y, fp32, rotated in fp16 and added to a, b. Written out because pairs of fp16s are
    otherwise packed anew in every tile."""
    if INTERPRET:
        x, y = x.to(tl.float16), y.to(tl.float16)
        x, y = (a + x * cos) - y * sin, (b + y * cos) + x * sin
    else:
        x, y = tl.inline_asm_elementwise(
            _ROTATE, "=&r,=&r,f,f,f,f,r,r,r,r", [x, y, cos, sin, a, b],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return x, y


@triton.jit
def _packed(x, y):
    """fp16 x and y as they are, two to a register from here on."""
    if not INTERPRET:
        x, y = tl.inline_asm_elementwise(
            "mov.b32 $0, $2; mov.b32 $1, $3;", "=&r,=r,r,r", [x, y],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return x, y


@triton.jit
def _angles(pair):
    """int32 -> its two fp16s: cos, sin."""
    low = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return low, ((pair >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def load_fp16(arena, index, inside):
    """fp16 number `index` of the arena (int32) as fp32: asynchronous copies want 4 bytes."""
    pair = tl.load(arena + index // 2, inside, 0) >> ((index % 2) * 16).to(tl.int32)
    return (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _map(up, FIRST: tl.constexpr, W: tl.constexpr, F: tl.constexpr, WORDS: tl.constexpr,
         C: tl.constexpr):  # fmt: skip
    """Rows FIRST .. FIRST + W of both halves of A^T, for every code of a word; what is not there
    repeats code 0."""
    at = up + (FIRST + tl.arange(0, W))[:, None] * F + tl.arange(0, F)[None, :]
    a0, b0 = tl.load(at), tl.load(at + WORDS * F)
    a1, b1, a2, b2, a3, b3 = a0, b0, a0, b0, a0, b0
    if C > 1:
        a1, b1 = tl.load(at + 2 * WORDS * F), tl.load(at + 3 * WORDS * F)
    if C > 2:
        a2, b2 = tl.load(at + 4 * WORDS * F), tl.load(at + 5 * WORDS * F)
        a3, b3 = tl.load(at + 6 * WORDS * F), tl.load(at + 7 * WORDS * F)
    return a0, b0, a1, b1, a2, b2, a3, b3


@triton.jit
def _rebuild(x, y, z, maps, BITS: tl.constexpr):
    """x, y [BLOCK, F] and the halves of A z, for one piece of z."""
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
    """Words FIRST .. FIRST + W of rows that begin at pointers `at` [BLOCK, 1]."""
    word = FIRST + tl.arange(0, W)[None, :]
    if EXACT and not MASKED:
        return tl.load(at + word)
    return tl.load(at + word, inside[:, None] & (word < row_words), 0)


@triton.jit
def _scores(
    t, page, row, inside, keys, arena, rope, head, maps0, maps1, sums, queries, turns,
    BITS: tl.constexpr, ZEROS: tl.constexpr, TRACKED: tl.constexpr, EXACT: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
    ONE_PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK, GP] of tile t, whose rows are rows `row` of pages `page` (in 16-bit words)."""
    row_words, start, scale_start, scale_row, zero_step, position_start = head
    mean_x, mean_y, low_x, low_y, total_x, total_y = sums
    if EXACT:
        row_words = W0 + W1
    if ONE_PAGE:
        at = keys + (page + start) + (row * row_words)[:, None]
    else:
        at = keys + (page + start + row * row_words)[:, None]
    z0 = _piece(at, row_words, inside, 0, W0, EXACT, MASKED)
    x, y = tl.zeros([BLOCK, F], tl.float32), tl.zeros([BLOCK, F], tl.float32)
    if BITS < 16:
        x, y = tl.broadcast_to(low_x[None, :], BLOCK, F), tl.broadcast_to(low_y[None, :], BLOCK, F)
    x, y = _rebuild(x, y, z0, maps0, BITS)
    if W1 > 0:
        z1 = _piece(at, row_words, inside, W0, W1, EXACT, MASKED)
        x, y = _rebuild(x, y, z1, maps1, BITS)
    if BITS < 16:
        place = page + scale_start + row * scale_row
        scale = load_fp16(arena, place, inside)[:, None]
        x, y = x * scale, y * scale
        if ZEROS:
            zero = load_fp16(arena, place + zero_step, inside)[:, None]
            x, y = x + zero * total_x[None, :], y + zero * total_y[None, :]
    pair = tl.arange(0, F)
    q_x, q_y = queries
    cos, sin, turned_x, turned_y = turns
    if TRACKED:
        position = tl.load(arena + (page // 2 + position_start + row), inside, 0)
        cos, sin = _angles(tl.load(rope + position[:, None] * F + pair[None, :]))
        x, y = x + mean_x[None, :], y + mean_y[None, :]
        x, y = x.to(tl.float16), y.to(tl.float16)
        x, y = x * cos - y * sin, y * cos + x * sin
        q0, q1 = q_x.to(tl.float16), q_y.to(tl.float16)
    else:
        base_cos, base_sin = _angles(tl.load(rope + t * BLOCK * F + pair))
        base_cos, base_sin = base_cos.to(tl.float32)[:, None], base_sin.to(tl.float32)[:, None]
        q0 = (q_x * base_cos + q_y * base_sin).to(tl.float16)
        q1 = (q_y * base_cos - q_x * base_sin).to(tl.float16)
        x, y = _rotate(x, y, cos, sin, turned_x, turned_y)
    return tl.dot(y, q1, tl.dot(x, q0))


@triton.jit
def _store(s, weights, tops, to, there, BLOCK: tl.constexpr):
    """Weights and top of a tile's scores s [BLOCK, GP], in log2, as columns `to` [GP]."""
    top = tl.max(s, 0)
    weight = tl.exp2(s - top[None, :])
    tl.store(tops + to, top, there)
    tl.store(weights + (to * BLOCK)[None, :] + tl.arange(0, BLOCK)[:, None], weight, there[None, :])


@triton.jit
def score_kernel(
    q, q_stride, up, sums, rope, turns, weights, tops, keys, arena,
    tables, table_slot, table_group, lengths, length_slot, slots, heads, bases, starts, scale,
    G: tl.constexpr, HG: tl.constexpr, N: tl.constexpr, GP: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, F: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
    BITS: tl.constexpr, ZEROS: tl.constexpr, TRACKED: tl.constexpr, EXACT: tl.constexpr,
    PAGE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Weights of every tile of a slice; items are (sequence, KV head).

    q [B, Hq, D]; up [Hk, C, 2, W, F] and sums fp32 [Hk, 6, F]: see `pack_maps`; rope int32 [M, F],
    turns the same as fp16s. weights [tiles, HG * N, BLOCK], tops fp32 [tiles, HG * N] in log2,
    tiles of (b, g) from bases int32 [B * G] on. keys: the arena as 16-bit words, arena: as int32.
    heads: see `RebuildGroups`. HALF: half of the rotated dims.
    """
    C: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = W0 + W1
    HK: tl.constexpr = G * HG
    NQ: tl.constexpr = HG * N
    ONE_PAGE: tl.constexpr = PAGE % BLOCK == 0  # a tile lies in one page
    slice = tl.program_id(0)
    item = tl.load(starts + 2 * slice)
    tile = tl.load(starts + 2 * slice + 1)
    end_item = tl.load(starts + 2 * slice + 2)
    end_tile = tl.load(starts + 2 * slice + 3)
    n, row, pair = tl.arange(0, GP), tl.arange(0, BLOCK), tl.arange(0, F)
    # Of a tile's rows against its first.
    turn = turns + (row[:, None] * F + pair[None, :]) * 2
    # Laid out as the products they will meet, or they would be packed anew in every tile.
    like = tl.dot(tl.zeros([BLOCK, 16], tl.float16), tl.zeros([16, F], tl.float16))
    cos = (tl.load(turn).to(tl.float32) + like).to(tl.float16)
    sin = (tl.load(turn + 1).to(tl.float32) + like).to(tl.float16)
    cos, sin = _packed(cos, sin)
    first = tl.where(pair < HALF, pair, pair + HALF)
    second = first + tl.where(pair < HALF, HALF, D // 2 - HALF)
    while item <= end_item:
        b, h = item // HK, item % HK
        g = h // HG
        slot = tl.load(slots + b).to(tl.int64)
        length = tl.load(lengths + slot * length_slot + g)
        stop = tl.cdiv(length, BLOCK)
        if item == end_item:
            stop = end_tile
        if tile < stop:
            about = heads + 8 * h
            row_words = tl.multiple_of(tl.load(about), ALIGN)
            start = tl.multiple_of(tl.load(about + 2), 8)
            head = (
                row_words, start, tl.load(about + 3), tl.load(about + 4), tl.load(about + 5),
                tl.load(about + 6),
            )  # fmt: skip
            at = q + b * q_stride + (h * N + n)[None, :] * D
            there = (n < N)[None, :] & (pair < D // 2)[:, None]
            queries = (
                tl.load(at + first[:, None], there, 0.0).to(tl.float32),
                tl.load(at + second[:, None], there, 0.0).to(tl.float32),
            )
            map_at = up + h * C * 2 * WORDS * F
            maps0 = _map(map_at, 0, W0, F, WORDS, C)
            maps1 = maps0
            if W1 > 0:
                maps1 = _map(map_at, W0, W1, F, WORDS, C)
            sum_at = sums + h * 6 * F + pair
            six = (
                tl.load(sum_at), tl.load(sum_at + F), tl.load(sum_at + 2 * F),
                tl.load(sum_at + 3 * F), tl.load(sum_at + 4 * F), tl.load(sum_at + 5 * F),
            )  # fmt: skip
            zero = cos * 0
            mean_x = tl.broadcast_to(six[0][None, :], BLOCK, F)
            mean_y = tl.broadcast_to(six[1][None, :], BLOCK, F)
            mean_x, mean_y = _rotate(mean_x, mean_y, cos, sin, zero, zero)
            turned = (cos, sin, mean_x, mean_y)
            table = tables + slot * table_slot + g * table_group
            column = tl.load(bases + b * G + g).to(tl.int64) * NQ + (h % HG) * N
            full = tl.minimum(stop, length // BLOCK)
            ahead = tl.load(table + tile * BLOCK // PAGE)
            for t in tl.range(tile, full, num_stages=STAGES):
                place = t * BLOCK + row
                if ONE_PAGE:
                    page = ahead.to(tl.int64) * 32
                    ahead = tl.load(table + tl.minimum(t + 1, stop - 1) * BLOCK // PAGE)
                    place = row + t * BLOCK % PAGE
                else:
                    page = tl.load(table + place // PAGE).to(tl.int64) * 32
                    place = place % PAGE
                s = _scores(
                    t, page, place, row >= 0, keys, arena, rope, head, maps0, maps1, six, queries,
                    turned, BITS, ZEROS, TRACKED, EXACT, W0, W1, F, BLOCK, ONE_PAGE, False,
                )  # fmt: skip
                _store(s * scale, weights, tops, column + t * NQ + n, n < N, BLOCK)
            for t in tl.range(tl.maximum(tile, full), stop, num_stages=1):
                place = t * BLOCK + row
                inside = place < length
                page = tl.load(table + place // PAGE, inside, 0).to(tl.int64) * 32
                s = _scores(
                    t, page, place % PAGE, inside, keys, arena, rope, head, maps0, maps1, six,
                    queries, turned, BITS, ZEROS, TRACKED, EXACT, W0, W1, F, BLOCK, False, True,
                )  # fmt: skip
                s = tl.where(inside[:, None], s, float("-inf"))
                _store(s * scale, weights, tops, column + t * NQ + n, n < N, BLOCK)
        item += 1
        tile = 0
