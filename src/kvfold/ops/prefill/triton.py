"""Attention of many new tokens over rows laid out in one tensor: Triton kernel and its launches.

Shapes as in `prefill`, units and classes as in `prefill.plan`; N = Hq / Hk query heads of a KV
head; BM (query, head) pairs of a tile: pair m is query m // N of head m % N; BN rows of a tile.
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
    """A kernel's argument that is a multiple of ALIGN, as one: of arguments themselves Triton
    forgets what `multiple_of` says, and loads number by number."""
    return number // ALIGN * ALIGN


@triton.jit
def _load(at, row_stride, rank, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr,
          BN: tl.constexpr, EXACT: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Columns FIRST.. of BN rows from `at` on, 0 beyond the rank and where MASKED rows are not
    inside: [BN, WIDTH]."""
    column = FIRST + tl.arange(0, WIDTH)
    place = at + (tl.arange(0, BN) * row_stride)[:, None] + column[None, :]
    if EXACT:
        x = tl.load(place, inside[:, None], 0.0) if MASKED else tl.load(place)
    elif MASKED:
        x = tl.load(place, inside[:, None] & (column < rank)[None, :], 0.0)
    else:
        x = tl.load(place, (column < rank)[None, :], 0.0)
    return x


@triton.jit
def _tile(
    state, queries, first, count, query, keys, k_s, k_rank, values, v_s, v_rank, places,
    scale, window, cap,
    DK: tl.constexpr, EK: tl.constexpr, DV: tl.constexpr, EXACT: tl.constexpr,
    BN: tl.constexpr, POSITIONS: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    AMONG: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The softmax's state after the rows first.. of a unit, and that of the one AMONG some rows.
    MASKED: not all are seen by all."""
    top, mass, acc, top_among, mass_among = state
    q, q_more = queries
    positions, tops, earliest, among, any_among = places
    row = first + tl.arange(0, BN)
    inside = row < count
    key_at = keys + k_s.to(tl.int64) * first
    value_at = values + v_s.to(tl.int64) * first
    k = _load(key_at, k_s, k_rank, inside, 0, DK, BN, EXACT, MASKED)
    s = tl.dot(q, tl.trans(k))
    if EK > 0:
        k = _load(key_at, k_s, k_rank, inside, DK, EK, BN, EXACT, MASKED)
        s = tl.dot(q_more, tl.trans(k), s)
    if CAP:
        s = softcapped(s * scale, cap) / scale
    if POSITIONS:
        # Asked for only where it matters: before most queries, all rows are seen by all.
        if (tl.load(tops + first // BN) > earliest) | WINDOW:
            position = tl.load(positions + row, inside, 2147483647)[None, :]
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
            counted = tl.load(among + row, inside, 0)[None, :] != 0
            some = tl.where(counted, s, float("-inf"))
            peak_among = tl.maximum(top_among, tl.max(some, 1) * scale)
            base_among = tl.where(peak_among == float("-inf"), 0.0, peak_among)
            p_among = tl.exp2(some * scale - base_among[:, None])
            mass_among = mass_among * tl.exp2(top_among - base_among) + tl.sum(p_among, 1)
            top_among = peak_among
    peak = tl.maximum(top, tl.max(s, 1) * scale)
    base = peak
    if MASKED:
        base = tl.where(peak == float("-inf"), 0.0, peak)
    p = tl.exp2(s * scale - base[:, None])
    fade = tl.exp2(top - base)
    mass = mass * fade + tl.sum(p, 1)
    v = _load(value_at, v_s, v_rank, inside, 0, DV, BN, EXACT, MASKED)
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
    key, key rank, first value, value rank, column of `out`; order int64 [items]: which item every
    program takes; x_b, x_h.. strides over sequences, heads.. in elements. EXACT: no rank is below
    its width. AMONG: lse_among fp32 [B, H, T] of rows that are not 0 in among int8 [B, G, S], with
    POSITIONS alone; bottoms, tops: `ends_of_tiles`, and any_among int8, whether a tile has some of
    those rows, share strides. CAP: scores are capped at `cap`.
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
    t, which, live = m // N, m % N, m < T * N
    query = tl.load(queries + b * at_b + tl.minimum(t, T - 1)).to(tl.int32)
    earliest = tl.load(queries + b * at_b + start).to(tl.int32)
    latest = tl.load(queries + b * at_b + tl.minimum((first + BM - 1) // N, T - 1)).to(tl.int32)
    q_h, q_t = _multiple(q_h, ALIGN), _multiple(q_t, ALIGN)
    q += tl.multiple_of(b * q_b + head * q_h + start.to(tl.int64) * q_t, ALIGN)
    q_at = ((t - start) * q_t + which * q_h)[:, None]
    column = tl.arange(0, DK)
    q0 = tl.load(q + (q_at + column), live[:, None] & (column < k_rank), 0.0)
    q1 = q0
    if EK > 0:
        column = DK + tl.arange(0, EK)
        q1 = tl.load(q + (q_at + column), live[:, None] & (column < k_rank), 0.0)

    # Tiles begin .. low and high .. stop need a mask, those between are seen whole by all.
    count = tl.load(counts + b * c_b + group * c_g).to(tl.int32)
    if POSITIONS:
        begin, low, high, stop = 0, 0, 0, 0
        number = tl.arange(0, 128)
        for i in tl.range(0, tl.cdiv(count, BN), 128):  # none behind the last that is seen is read
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
    at, column = (((t - start) * H + which) * DO)[:, None], tl.arange(0, DV)
    tl.store(out + (at + column), acc * norm, live[:, None] & (column < v_rank))
    if begin == 0:
        place = (b * H + head + which) * T + t
        tl.store(lse + place, top + tl.log2(mass), live)
        if AMONG:
            tl.store(lse_among + place, top_among + tl.log2(mass_among), live)


def prefill(
    q: Tensor, keys: KVView, values: KVView, seen: Seen, scale: float,
    softcap: float | None = None, *, cut: Callable[[Widths], Cut] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Like `ops.prefill.prefill`: a launch for every class. cut: of every class, by default
    `cut_for`."""
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
    """Outputs and both log2-sum-exp2s; the second is the first where nothing is `among`."""
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
        how, num_units = cut(kind.widths) if cut else cut_for(kind.widths, few), kind.units.shape[0]
        blocks = cdiv(num_queries * group, how.pairs)
        where: tuple[Tensor | int, ...] = (counts, 0, 0, counts, counts, 0, 0)
        some: tuple[Tensor | int, ...] = (counts, 0, 0, counts)
        order = None
        if positions is not None:
            bottoms, tops = ends_of_tiles(positions, counts, how.rows)
            where = (positions, *positions.stride()[:2], bottoms, tops, *tops.stride()[:2])
        if among is not None:  # which takes more registers
            how = replace(how, registers=None)
            counted = among.view(torch.int8)
            some = (counted, *counted.stride()[:2], any_of_tile(counted, how.rows))
        if batch > 1 or positions is not None:
            order = longest_first(kind.units, counts, positions, queries, window, blocks)
        prefill_kernel[(blocks * batch * num_units,)](
            q, *strides[:3], keys.data, *strides[3:5], values.data, *strides[5:], out, lse,
            lse_among, kind.units, counts, *counts.stride(), *where, *some,
            queries, queries.stride(0), kind.units if order is None else order,
            batch, num_units, num_queries, heads, out.shape[-1], scale * LOG2_E, window or 0,
            softcap or 1.0,
            N=group, **dict(zip(("DK", "EK", "DV"), kind.widths, strict=True)),
            EXACT=kind.exact, ALIGN=gcd(kind.align, aligned), POSITIONS=positions is not None,
            WINDOW=window is not None, AMONG=among is not None, ORDER=order is not None,
            BM=how.pairs, BN=how.rows, STAGES=how.stages, CAP=softcap is not None,
            num_warps=how.warps, maxnreg=how.registers,
        )  # fmt: skip
    return out.transpose(1, 2), lse, lse_among


def _idle(items: int, pairs: int, device: torch.device) -> bool:
    """Whether tiles of 128 of the `pairs` of so many items are fewer than multiprocessors."""
    number = multiprocessors(device) if device.type == "cuda" else 132
    return items * cdiv(pairs, 128) < number
