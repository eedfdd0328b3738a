"""Attention of many new tokens over contiguous keys and values: Triton kernel and its launches.

Shapes as in `prefill`, units and classes as in `prefill.plan`; N = Hq / Hk query heads per KV head;
BM (query, head) pairs of a tile: pair m is query m // N of head m % N; BN tokens of a tile.
"""
# mypy: allow-untyped-defs

from collections.abc import Callable
from dataclasses import replace
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.launch import multiprocessors
from kvfold.ops.common.plan import cdiv
from kvfold.ops.common.recording import launch
from kvfold.ops.common.softcap_triton import softcapped
from kvfold.ops.prefill.plan import (
    Cut,
    Widths,
    any_of_tile,
    classes_of,
    cut_for,
    ends_of_tiles,
    longest_first,
)
from kvfold.ops.prefill.rows import KVView, Seen


@triton.jit
def _multiple(number, ALIGN: tl.constexpr):
    """Return an argument of the kernel so that the compiler knows that ALIGN divides it. Triton
    ignores `multiple_of` on arguments themselves, and would load number by number."""
    return number // ALIGN * ALIGN


@triton.jit
def _load(at, row_stride, rank, in_range, FIRST: tl.constexpr, WIDTH: tl.constexpr,
          BN: tl.constexpr, EXACT: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Load columns FIRST .. FIRST + WIDTH of BN tokens from `at` on: [BN, WIDTH]. 0 beyond the
    rank, and if MASKED for tokens that are not in range."""
    column = FIRST + tl.arange(0, WIDTH)
    address = at + (tl.arange(0, BN) * row_stride)[:, None] + column[None, :]
    if EXACT:
        x = tl.load(address, in_range[:, None], 0.0) if MASKED else tl.load(address)
    elif MASKED:
        x = tl.load(address, in_range[:, None] & (column < rank)[None, :], 0.0)
    else:
        x = tl.load(address, (column < rank)[None, :], 0.0)
    return x


@triton.jit
def _tile(
    state, queries, first, count, query, keys, k_s, k_rank, values, v_s, v_rank, places,
    scale, window, cap,
    DK: tl.constexpr, EK: tl.constexpr, DV: tl.constexpr, EXACT: tl.constexpr,
    BN: tl.constexpr, POSITIONS: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    AMONG: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Return the softmax state after the tokens first .. first + BN of a unit. AMONG: also update
    the state of the softmax over selected tokens. MASKED: some query does not see all tokens of the
    tile."""
    top, mass, acc, top_among, mass_among = state
    q, q_more = queries
    positions, tops, earliest, among, any_among = places
    row = first + tl.arange(0, BN)
    in_range = row < count
    key_at = keys + k_s.to(tl.int64) * first
    value_at = values + v_s.to(tl.int64) * first
    k = _load(key_at, k_s, k_rank, in_range, 0, DK, BN, EXACT, MASKED)
    s = tl.dot(q, tl.trans(k))
    if EK > 0:
        k = _load(key_at, k_s, k_rank, in_range, DK, EK, BN, EXACT, MASKED)
        s = tl.dot(q_more, tl.trans(k), s)
    if CAP:
        s = softcapped(s * scale, cap) / scale
    if POSITIONS:
        # Most tiles lie before all queries, which see all of their tokens: skip the mask there.
        if (tl.load(tops + first // BN) > earliest) | WINDOW:
            position = tl.load(positions + row, in_range, 2147483647)[None, :]
            seen = position <= query[:, None]
            if WINDOW:
                seen = seen & (position > (query - window)[:, None])
            s = tl.where(seen, s, float("-inf"))
    elif MASKED:
        seen = row[None, :] <= tl.minimum(query, count - 1)[:, None]
        if WINDOW:
            seen = seen & (row[None, :] > (query - window)[:, None])
        s = tl.where(seen, s, float("-inf"))
    if AMONG:  # noqa: SIM102 (known when it is compiled)
        if tl.load(any_among + first // BN):
            counted = tl.load(among + row, in_range, 0)[None, :] != 0
            selected = tl.where(counted, s, float("-inf"))
            peak_among = tl.maximum(top_among, tl.max(selected, 1) * scale)
            base_among = tl.where(peak_among == float("-inf"), 0.0, peak_among)
            p_among = tl.exp2(selected * scale - base_among[:, None])
            mass_among = mass_among * tl.exp2(top_among - base_among) + tl.sum(p_among, 1)
            top_among = peak_among
    peak = tl.maximum(top, tl.max(s, 1) * scale)
    base = peak
    if MASKED:
        base = tl.where(peak == float("-inf"), 0.0, peak)
    p = tl.exp2(s * scale - base[:, None])
    fade = tl.exp2(top - base)
    mass = mass * fade + tl.sum(p, 1)
    v = _load(value_at, v_s, v_rank, in_range, 0, DV, BN, EXACT, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
    return peak, mass, acc, top_among, mass_among


INTEGERS = (
    "q_b", "q_h", "q_t", "k_b", "k_s", "v_b", "v_s", "c_b", "c_g", "p_b", "p_g", "t_b", "t_g",
    "a_b", "a_g", "at_b", "B", "U", "T", "H", "DO", "window",
)  # fmt: skip


@triton.jit(do_not_specialize=INTEGERS)
def prefill_kernel(
    q, q_b, q_h, q_t, keys, k_b, k_s, values, v_b, v_s, out, lse, lse_among, units,
    counts, c_b, c_g, positions, p_b, p_g, bottoms, tops, t_b, t_g, among, a_b, a_g, any_among,
    queries, at_b, order,
    B, U, T, H, DO, scale, window, cap,
    N: tl.constexpr, DK: tl.constexpr, EK: tl.constexpr, DV: tl.constexpr,
    EXACT: tl.constexpr, ALIGN: tl.constexpr, POSITIONS: tl.constexpr, WINDOW: tl.constexpr,
    AMONG: tl.constexpr, ORDER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, CAP: tl.constexpr = False,
):  # fmt: skip
    """One tile of queries of one unit: FlashAttention-2's forward pass.

    out [B, T, H, DO], H query heads; lse fp32 [B, H, T]; units int64 [U, 8]: KV head, group, first
    key, key rank, first value, value rank, column of `out`; order int64 [items]: the item of every
    program. x_b, x_h ..: strides over sequences, heads .. in elements. EXACT: no rank is below its
    width. AMONG, only with POSITIONS: write lse_among fp32 [B, H, T], over the tokens that are not
    0 in among int8 [B, G, S]. bottoms, tops: see `ends_of_tiles`; any_among int8: whether a tile
    has selected tokens, with the strides of `tops`. CAP: scores are capped at `cap`.
    """
    item = tl.program_id(0)
    if ORDER:
        item = tl.load(order + item).to(tl.int32)
    unit, b = units + item % U * 8, (item // U % B).to(tl.int64)
    first = (tl.cdiv(T * N, BM) - 1 - item // (U * B)) * BM
    head, group = tl.load(unit) * N, tl.load(unit + 1)
    k_s, v_s = _multiple(k_s, ALIGN), _multiple(v_s, ALIGN)
    keys += tl.multiple_of(b * k_b + tl.load(unit + 2), ALIGN)
    values += tl.multiple_of(b * v_b + tl.load(unit + 4), ALIGN)
    k_rank = tl.multiple_of(tl.load(unit + 3).to(tl.int32), ALIGN)
    v_rank = tl.multiple_of(tl.load(unit + 5).to(tl.int32), ALIGN)
    positions += b * p_b + group * p_g
    bottoms += b * t_b + group * t_g
    tops += b * t_b + group * t_g
    among += b * a_b + group * a_g
    any_among += b * t_b + group * t_g

    m, start = first + tl.arange(0, BM), first // N
    t, head_offset, in_range = m // N, m % N, m < T * N
    query = tl.load(queries + b * at_b + tl.minimum(t, T - 1)).to(tl.int32)
    earliest = tl.load(queries + b * at_b + start).to(tl.int32)
    latest = tl.load(queries + b * at_b + tl.minimum((first + BM - 1) // N, T - 1)).to(tl.int32)
    q_h, q_t = _multiple(q_h, ALIGN), _multiple(q_t, ALIGN)
    q += tl.multiple_of(b * q_b + head * q_h + start.to(tl.int64) * q_t, ALIGN)
    q_at = ((t - start) * q_t + head_offset * q_h)[:, None]
    column = tl.arange(0, DK)
    q0 = tl.load(q + (q_at + column), in_range[:, None] & (column < k_rank), 0.0)
    q1 = q0
    if EK > 0:
        column = DK + tl.arange(0, EK)
        q1 = tl.load(q + (q_at + column), in_range[:, None] & (column < k_rank), 0.0)

    # Tiles begin .. low and high .. stop need a mask; all queries see all tokens of those between.
    count = tl.load(counts + b * c_b + group * c_g).to(tl.int32)
    if POSITIONS:
        begin, low, high, stop = 0, 0, 0, 0
        number = tl.arange(0, 128)
        for i in tl.range(0, tl.cdiv(count, BN), 128):  # stop: behind the last tile that is seen
            bottom = tl.load(bottoms + i + number, i + number < tl.cdiv(count, BN), 2147483647)
            stop = tl.maximum(stop, tl.max(tl.where(bottom <= latest, i + number + 1, 0)))
    else:
        begin, low = 0, 0
        if WINDOW:
            begin = tl.maximum(earliest - window + 1, 0) // BN
        stop = tl.cdiv(tl.maximum(tl.minimum(count, latest + 1), 0), BN)
        high = tl.maximum(tl.minimum(count, earliest + 1) // BN, begin)
        if WINDOW:
            low = tl.minimum(tl.cdiv(tl.maximum(latest - window + 1, 0), BN), high)
    top = tl.full([BM], float("-inf"), tl.float32)
    mass = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DV], tl.float32)
    state = (top, mass, acc, top, mass)
    places = (positions, tops, earliest, among, any_among)
    for i in tl.range(low, high, num_stages=STAGES):
        state = _tile(
            state, (q0, q1), i * BN, count, query, keys, k_s, k_rank, values, v_s, v_rank,
            places, scale, window, cap, DK, EK, DV, EXACT, BN, POSITIONS, WINDOW, False, False,
            CAP,
        )  # fmt: skip
    for i in tl.range(begin, stop - high + low, num_stages=STAGES if POSITIONS else 1):
        tile = tl.where(i < low, i, i + high - low)
        state = _tile(
            state, (q0, q1), tile * BN, count, query, keys, k_s, k_rank, values, v_s, v_rank,
            places, scale, window, cap, DK, EK, DV, EXACT, BN, POSITIONS, WINDOW, True, AMONG,
            CAP,
        )  # fmt: skip
    top, mass, acc, top_among, mass_among = state

    norm, begin = tl.where(mass > 0, 1.0 / mass, 0.0)[:, None], tl.load(unit + 6)
    DO = _multiple(DO, ALIGN)
    out += tl.multiple_of(((b * T + start) * H + head) * DO + begin, ALIGN)
    at, column = (((t - start) * H + head_offset) * DO)[:, None], tl.arange(0, DV)
    tl.store(out + (at + column), acc * norm, in_range[:, None] & (column < v_rank))
    if begin == 0:
        lse_row = (b * H + head + head_offset) * T + t
        tl.store(lse + lse_row, top + tl.log2(mass), in_range)
        if AMONG:
            tl.store(lse_among + lse_row, top_among + tl.log2(mass_among), in_range)


def prefill(
    q: Tensor, keys: KVView, values: KVView, seen: Seen, scale: float,
    softcap: float | None = None, *, cut: Callable[[Widths], Cut] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Like `ops.prefill.prefill`, with a launch per class. cut: tile sizes of a class, `cut_for` by
    default."""
    return _prefill(q, keys, values, seen, scale, None, cut, softcap)[:2]


def prefill_among(
    q: Tensor, keys: KVView, values: KVView, seen: Seen, scale: float, among: Tensor,
    *, cut: Callable[[Widths], Cut] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Like `ops.prefill.prefill_among`."""
    assert seen.positions is not None and among.stride(-1) == 1, "rows have positions"
    return _prefill(q, keys, values, seen, scale, among, cut)


def _prefill(
    q: Tensor, keys: KVView, values: KVView, seen: Seen, scale: float, among: Tensor | None,
    cut: Callable[[Widths], Cut] | None, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return outputs and both log2-sum-exp2s; without `among` the second is the first."""
    counts, owner, window = seen.counts, seen.owner, seen.window
    positions, queries = seen.positions, seen.queries
    assert q.stride(-1) == 1 and queries.stride(-1) == 1 and scale > 0
    assert positions is None or (positions.stride(-1) == 1 and positions.dtype is torch.int32)
    (batch, heads, num_queries, _), group = q.shape, q.shape[1] // len(owner)
    classes = classes_of(keys.starts, keys.ranks, values.starts, values.ranks, owner, q.device)
    make = torch.empty if len(set(values.ranks)) == 1 else torch.zeros
    out = make(batch, num_queries, heads, max(values.ranks), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    lse_among = lse if among is None else torch.empty_like(lse)
    strides = (*q.stride()[:3], *keys.data.stride()[:2], *values.data.stride()[:2])
    aligned = gcd(*strides, out.shape[-1], 8)
    few = _idle(batch * sum(x.units.shape[0] for x in classes), num_queries * group, q.device)
    for kind in classes:
        tiling = cut(kind.widths) if cut else cut_for(kind.widths, few)
        num_units = kind.units.shape[0]
        blocks = cdiv(num_queries * group, tiling.pairs)
        position_args: tuple[Tensor | int, ...] = (counts, 0, 0, counts, counts, 0, 0)
        among_args: tuple[Tensor | int, ...] = (counts, 0, 0, counts)
        order = None
        if positions is not None:
            bottoms, tops = ends_of_tiles(positions, counts, tiling.rows)
            position_args = (positions, *positions.stride()[:2], bottoms, tops, *tops.stride()[:2])
        if among is not None:  # needs more registers
            tiling = replace(tiling, registers=None)
            counted = among.view(torch.int8)
            among_args = (counted, *counted.stride()[:2], any_of_tile(counted, tiling.rows))
        if batch > 1 or positions is not None:
            order = longest_first(kind.units, counts, positions, queries, window, blocks)
        launch(
            prefill_kernel, (blocks * batch * num_units,),
            q, *strides[:3], keys.data, *strides[3:5], values.data, *strides[5:], out, lse,
            lse_among, kind.units, counts, *counts.stride(), *position_args, *among_args,
            queries, queries.stride(0), kind.units if order is None else order,
            batch, num_units, num_queries, heads, out.shape[-1], scale * LOG2_E, window or 0,
            softcap or 1.0,
            N=group, **dict(zip(("DK", "EK", "DV"), kind.widths, strict=True)),
            EXACT=kind.exact, ALIGN=gcd(kind.align, aligned), POSITIONS=positions is not None,
            WINDOW=window is not None, AMONG=among is not None, ORDER=order is not None,
            BM=tiling.pairs, BN=tiling.rows, STAGES=tiling.stages, CAP=softcap is not None,
            num_warps=tiling.warps, maxnreg=tiling.registers,
        )  # fmt: skip
    return out.transpose(1, 2), lse, lse_among


def _idle(items: int, pairs: int, device: torch.device) -> bool:
    """Whether tiles of 128 pairs, for `items` items of `pairs` pairs, are fewer than the
    multiprocessors."""
    number = multiprocessors(device) if device.type == "cuda" else 132
    return items * cdiv(pairs, 128) < number
