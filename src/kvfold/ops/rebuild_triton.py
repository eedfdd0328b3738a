"""Decode attention on pages whose keys are rebuilt from latents. Triton kernels.

Shapes as in `rebuild`; GP query heads of a KV head or of a value latent, padded; I items of a pass,
S slices of it (see `plan`); W 16-bit words of a key row in a tile, in pieces W0 + W1, of C codes.

Two passes, because heads disagree on how to share: keys want one program a KV head, which keeps the
head's map A on chip; values want one program for all heads that read them. The first pass turns
every tile of BLOCK rows of a KV head into weights exp2(s - top), their tile's own top beside them;
its tiles are independent. The second is attention with given weights. The weights cost as many
bytes as Hq numbers a row, written and read once.

Keys are not rotated to where they are: score = (R_a^T q) . (R_o u) for u = A z + mu at position
a + o, so that a tile rotates its N queries by its first row's angles a, and its rows by o < BLOCK,
whose table stays on chip. Rows that carry positions look their angles up instead.
"""

# mypy: allow-untyped-defs

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.decode import HeadGroup
from kvfold.ops.codes_triton import INTERPRET, unpack
from kvfold.ops.direct_triton import combine_kernel
from kvfold.ops.pages import words_of
from kvfold.ops.plan import Slices, stream_k
from kvfold.ops.rebuild import KeyMaps, Layer, RebuildGroups, rebuild_groups

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
def _fp16(arena, index, inside):
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
        scale = _fp16(arena, place, inside)[:, None]
        x, y = x * scale, y * scale
        if ZEROS:
            zero = _fp16(arena, place + zero_step, inside)[:, None]
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


@triton.jit
def _attend(
    state, t, page, row, inside, values, arena, weights, tops, about, peak,
    BITS: tl.constexpr, ZEROS: tl.constexpr, EXACT: tl.constexpr, WV: tl.constexpr,
    N: tl.constexpr, GP: tl.constexpr, NQ: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    ONE_PAGE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The softmax's state after tile t of BLOCK rows; weights and tops come by SPAN rows."""
    LOW: tl.constexpr = (2**BITS - 1) / 2
    FULL: tl.constexpr = N == GP
    mass, floor, acc0, acc1, acc2, acc3 = state
    row_words, start, scale_start, scale_row, zero_step, column = about
    word, n, r = tl.arange(0, WV)[:, None], tl.arange(0, GP), tl.arange(0, BLOCK)
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
    to = column + t * BLOCK // SPAN * NQ + n
    at = weights + (to * SPAN)[None, :] + (t % (SPAN // BLOCK) * BLOCK + r)[:, None]
    if FULL:
        p, top = tl.load(at), tl.load(tops + to)
    else:
        p, top = tl.load(at, (n < N)[None, :], 0.0), tl.load(tops + to, n < N, 0.0)
    p = p.to(tl.float32) * tl.exp2(top - peak)[None, :]
    ones = tl.full([16, BLOCK], 1.0, weights.dtype.element_ty)
    if BITS == 16:
        w = p.to(weights.dtype.element_ty)
        mass = tl.dot(ones, w, mass)
        acc0 = tl.dot(v, w, acc0)
    else:
        v0, v1, v2, v3 = unpack(v, BITS)
        mass = tl.dot(ones, p.to(tl.float16), mass)
        place = page + scale_start + row * scale_row
        scale = _fp16(arena, place, inside)
        if ZEROS:
            # In the middle of the codes: what is weighed by rounded weights is then small.
            zero = _fp16(arena, place + zero_step, inside) + LOW * scale
            floor = tl.dot(ones, (p * zero[:, None]).to(tl.float16), floor)
        w = (p * scale[:, None]).to(tl.float16)
        # What codes carry extra goes tile by tile: in the long run it would drown the rest.
        weight = tl.dot(tl.full([WV, BLOCK], 1.0, tl.float16), w)
        even = weight * -(1024 + LOW)
        odd = weight * -(1024 + LOW * (1 if BITS == 8 else 16))
        acc0 += tl.dot(v0, w, even)
        acc1 += tl.dot(v1, w, odd)
        if BITS == 4:
            acc2 += tl.dot(v2, w, even)
            acc3 += tl.dot(v3, w, odd)
    return mass, floor, acc0, acc1, acc2, acc3


@triton.jit
def value_kernel(
    out, lse, part, part_ml, weights, tops, values, arena,
    tables, table_slot, table_group, lengths, length_slot, slots, latents, bases, starts, counts,
    G: tl.constexpr, V: tl.constexpr, NQ: tl.constexpr, N: tl.constexpr, GP: tl.constexpr,
    DO: tl.constexpr, DV: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr,
    EXACT: tl.constexpr, PAGE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One slice: its part of every item, (sequence, value latent), it touches.

    N: query heads of a value latent, NQ of a group. out [B, V * N, DO]; part fp32 [S + I, GP, DV],
    part_ml fp32 [S + I, 2, GP]; lse fp32 [B, V * N] in log2; the rest as in `score_kernel`.
    """
    C: tl.constexpr = 16 // BITS
    WV: tl.constexpr = DV // C
    ONE_PAGE: tl.constexpr = PAGE % BLOCK == 0
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
            for begin in range(tile * BLOCK // SPAN, tl.cdiv(stop * BLOCK, SPAN), 32):
                t = begin + tl.arange(0, 32)[:, None]
                there = (t * SPAN < stop * BLOCK) & (n < N)[None, :]
                found = tl.load(tops + about[5] + t * NQ + n[None, :], there, float("-inf"))
                top = tl.maximum(top, tl.max(found, 0))
            top = tl.where(n < N, top, 0.0)
            # Mass, mass times the values' zeros, outputs.
            state = (spread, spread, none, none, none, none)
            table = tables + slot * table_slot + g * table_group
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
                state = _attend(
                    state, t, page, place, row >= 0, values, arena, weights, tops, about, top,
                    BITS, ZEROS, EXACT, WV, N, GP, NQ, BLOCK, SPAN,
                    ONE_PAGE, False,
                )  # fmt: skip
            for t in tl.range(tl.maximum(tile, full), stop, num_stages=1):
                place = t * BLOCK + row
                inside = place < length
                page = tl.load(table + place // PAGE, inside, 0).to(tl.int64) * 32
                state = _attend(
                    state, t, page, place % PAGE, inside, values, arena, weights, tops, about,
                    top, BITS, ZEROS, EXACT, WV, N, GP, NQ, BLOCK, SPAN,
                    False, True,
                )  # fmt: skip
            spread, floors, acc0, acc1, acc2, acc3 = state
            mass, floor = tl.max(spread, 0), tl.sum(floors, 0) / 16
            whole = tl.load(counts + item) == 1
            norm = 1.0 / mass if whole else mass * 0 + 1
            to = out + (b * V * N + first_head) * DO
            piece = part + (slice + item).to(tl.int64) * GP * DV
            value_width = tl.load(line + 1)
            if BITS == 4:
                acc1, acc3 = acc1 / 16, acc3 / 16
            for J in tl.static_range(C):
                acc = acc0 if J == 0 else (acc1 if J == 1 else (acc2 if J == 2 else acc3))
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


def rope_table(inv_freq: Tensor, positions: int, head_dim: int) -> Tensor:
    """cos and sin of positions 0 .. as two fp16s of an int32 [positions, F]; dims that are not
    rotated turn by 0. One for all layers with these angles."""
    pairs = torch.zeros(_power(head_dim // 2), device=inv_freq.device)
    pairs[: len(inv_freq)] = inv_freq
    angles = torch.arange(positions, device=inv_freq.device)[:, None].float() * pairs
    both = torch.stack((angles.cos(), angles.sin()), -1).half()
    return both.view(torch.int32)[..., 0]


def pack_maps(maps: KeyMaps, about: RebuildGroups, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A^T [Hk, C, 2, W, F] by code of a word and half of the pairs, and fp32 [Hk, 6, F]: halves of
    mu, of what the codes' bits add to A z, negative, and of A's sums over the latent.

    Both are multiplied by `maps.scaling` where they are rotated.
    """
    bits, d, half = about.bits[0], maps.up.shape[1], maps.rotary // 2
    codes, words = 16 // bits, sum(_pieces(about))
    up, mean = maps.up.float(), maps.mean.float()
    factor = torch.ones(d, device=up.device)
    factor[: 2 * half] = maps.scaling
    both = torch.cat((up, mean[..., None]), -1) * factor[:, None]
    rest = (d - 2 * half) // 2
    both = torch.cat((both[:, :half], both[:, 2 * half : 2 * half + rest],
                      both[:, half : 2 * half], both[:, 2 * half + rest :]), 1)  # fmt: skip
    padded = both.new_zeros(len(both), 2, _power(d // 2), codes * words + 1)
    padded[:, :, : d // 2, : up.shape[-1]] = both[..., :-1].unflatten(1, (2, -1))
    padded[:, :, : d // 2, -1] = both[..., -1].unflatten(1, (2, -1))
    by_code = padded[..., :-1].unflatten(-1, (words, codes)).permute(0, 4, 1, 3, 2)
    each = torch.ones(codes, device=up.device)
    each[1::2] = 16 if bits == 4 else 1  # unpack leaves these codes as many times as large
    packed = (by_code / each[:, None, None, None]).to(dtype if bits == 16 else torch.float16)
    kept = packed.float()
    total = (kept * each[:, None, None, None]).sum((1, 3))
    low = 0.0 if about.zeros else (2**bits - 1) / 2
    extra = -(1024 * kept.sum((1, 3)) + low * total)
    return packed.contiguous(), torch.cat((padded[..., -1], extra, total), 1).contiguous()


def _pieces(about: RebuildGroups) -> tuple[int, int]:
    """Words of a key row as two powers of 2, the second 0 where one is as good."""
    words = max(16, about.widths[0] * about.bits[0] // 16)
    first = 1 << (words.bit_length() - 1)
    second = _power(words - first) if words > first else 0
    return (first, second) if second < first else (first + second, 0)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """How a pass is cut: rows a tile, tiles in flight, warps, slices a multiprocessor, and most
    registers a thread."""

    block: int = 64
    stages: int = 3
    warps: int = 4
    slices: int = 2
    registers: int | None = None


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Of both passes; the rows of a value tile divide those of a score tile."""

    scores: Pass = Pass()
    values: Pass = Pass()


@dataclass(frozen=True)
class RebuildPlan:
    """One layer's slices of both passes, int32 [B * G] the first tile of every (sequence, group),
    and room for weights, tops and parts."""

    scores: Slices
    values: Slices
    bases: Tensor
    weights: Tensor
    tops: Tensor
    part: Tensor
    part_ml: Tensor


def plan_rebuild(
    lengths: Tensor,
    about: RebuildGroups,
    queries: int,
    dtype: torch.dtype,
    tuning: Tuning,
    sms: int,
    rows: int,
) -> RebuildPlan:
    """lengths int [B, G] of one layer, which add up to `rows` at most. No host sync."""
    device, group_heads, value_heads = lengths.device, *about.heads
    first, second = tuning.scores, tuning.values
    assert first.block % second.block == 0, "value tiles do not divide score tiles"
    tiles = -(-lengths // first.block)
    scores = _cut(tiles.repeat_interleave(group_heads, 1), first, sms)
    each = (-(-lengths // second.block))[:, about.values[:, 6]]
    values = _cut(each, second, sms)
    bases = tiles.flatten().cumsum(0) - tiles.flatten()
    room, heads = rows // first.block + lengths.numel(), group_heads * queries
    number = sms * second.slices + each.numel()
    # Of codes, at least as many words as a product has rows.
    width = max(_power(about.widths[1]), 256 // about.bits[1])
    kept = dtype if about.bits[1] == 16 else torch.float16
    part = torch.empty(number, padded(value_heads * queries), width, device=device)
    return RebuildPlan(
        scores=scores,
        values=values,
        bases=bases.int(),
        weights=torch.empty(room, heads, first.block, dtype=kept, device=device),
        tops=torch.empty(room, heads, device=device),
        part=part,
        part_ml=part.new_empty(number, 2, part.shape[1]),
    )


def _cut(tiles: Tensor, tuning: Pass, sms: int) -> Slices:
    """Tiles [B, .] of equal cost; beginning an item costs as much as one."""
    cost = torch.ones(tiles.numel(), dtype=torch.int64, device=tiles.device)
    return stream_k(tiles.flatten(), cost, 1, sms * tuning.slices)


def padded(queries: int) -> int:
    return max(8, triton.next_power_of_2(queries))


def _power(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def decode(
    q: Tensor,
    arena: Tensor,
    tables: Tensor,
    lengths: Tensor,
    layer: Layer,
    groups: Sequence[HeadGroup],
    slots: Tensor,
    scale: float,
    maps: KeyMaps,
    rope: Tensor,
    plan: RebuildPlan | None = None,
    tuning: Tuning | None = None,
) -> tuple[Tensor, Tensor]:
    """`rebuild.decode_reference` on the device. Returns the outputs and the log2-sum-exp2 of the
    scores, fp32 [B, Hq]."""
    queries, tuning = q.shape[1] // len(maps.up), tuning or Tuning()
    about = rebuild_groups(layer, tuple(groups), queries, arena.device)
    assert q.stride()[1:] == (q.shape[2], 1), "a sequence's queries are one block"
    if plan is None:
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 3
        rows = lengths[slots].numel() * tables.shape[2] * about.page
        plan = plan_rebuild(lengths[slots], about, queries, q.dtype, tuning, sms, rows)
    where = (tables, tables.stride(0), tables.stride(1), lengths, lengths.stride(0), slots)
    same = {"G": len(groups), "ZEROS": about.zeros, "PAGE": about.page, "ALIGN": about.align}
    _score(q, arena, where, about, scale, maps, rope, plan, tuning.scores, queries, same)
    return _attend_values(q, arena, where, about, plan, tuning, queries, same)


def _score(q, arena, where, about, scale, maps, rope, plan, tuning, queries, same) -> None:
    (bits, _), (first, second) = about.bits, _pieces(about)
    if (key := (about, q.dtype)) not in maps.packed:
        maps.packed[key] = pack_maps(maps, about, q.dtype)
    up, sums = maps.packed[key]
    assert rope.shape[1] == up.shape[-1], "the table is of another head dim"
    assert rope.shape[0] >= tuning.block, "the table is shorter than a tile"
    score_kernel[(plan.scores.starts.shape[0] - 1,)](
        q, q.stride(0), up, sums, rope, rope.view(torch.float16), plan.weights, plan.tops,
        words_of(arena, q.dtype if bits == 16 else torch.uint16), words_of(arena, torch.int32),
        *where, about.keys, plan.bases, plan.scores.starts, scale * 1.4426950408889634,
        HG=about.heads[0], N=queries, GP=padded(queries), D=q.shape[-1], HALF=maps.rotary // 2,
        F=rope.shape[1], W0=first, W1=second, BITS=bits, TRACKED=about.tracked,
        EXACT=about.narrowest[0] * bits == 16 * (first + second),
        BLOCK=tuning.block, STAGES=tuning.stages, num_warps=tuning.warps,
        maxnreg=tuning.registers, **same,
    )  # fmt: skip


def _attend_values(q, arena, where, about, plan, tuning, queries, same) -> tuple[Tensor, Tensor]:
    bits, tune, slices = about.bits[1], tuning.values, plan.values
    out = q.new_empty(*q.shape[:2], about.widths[1])
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    heads = about.heads[1] * queries
    widths = {"N": heads, "GP": padded(heads), "DO": out.shape[-1], "DV": plan.part.shape[-1]}
    value_kernel[(slices.starts.shape[0] - 1,)](
        out, lse, plan.part, plan.part_ml, plan.weights, plan.tops,
        words_of(arena, q.dtype if bits == 16 else torch.uint16), words_of(arena, torch.int32),
        *where, about.values, plan.bases, slices.starts, slices.counts,
        V=len(about.values), NQ=about.heads[0] * queries, BITS=bits,
        EXACT=about.narrowest[1] == plan.part.shape[-1], BLOCK=tune.block,
        SPAN=tuning.scores.block, STAGES=tune.stages, num_warps=tune.warps,
        maxnreg=tune.registers, **widths, **same,
    )  # fmt: skip
    combine_kernel[(slices.counts.shape[0], heads)](
        out, lse, plan.part, plan.part_ml, about.values, slices.firsts, slices.counts,
        slices.firsts, G=len(about.values), ORDER=False, BLOCK=16, num_warps=4, **widths,
    )  # fmt: skip
    return out, lse
