"""Decode attention over pages where they are. Numba kernels, for CPUs.

Shapes: B sequences, G groups of a layer, Hq query heads, H query heads that read a group; K
*tasks*, each of at most C rows of one group of one sequence; dv widest value. Tables as in
`common.parts`.

The rows of a page become fp32 in a core's first cache, once for all heads that read them; fp32 is
read where it lies. Tasks depend on neither the number of threads nor the sequences beside, so that
results do not either.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvfold.layout.pages import UNIT
from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.codes_numba import decode_codes, decode_floats, decode_scales, kernel
from kvfold.ops.common.pages import LayerPages, views_of
from kvfold.ops.common.parts import HALF, LANES, SINGLE, Parts
from kvfold.ops.common.products_numba import dots, mix, power_of_2
from kvfold.ops.common.threads import share
from kvfold.ops.decode.limits import Limits

CHUNK = 512  # rows of a task: their weights fit a core's first cache, beside a page


@dataclass(frozen=True)
class Watch:
    """What is added to metrics: attention to the power of 1 or 2, to keys at positions up to
    last [B]; -1: none of a sequence's."""

    power: int
    last: Tensor


def decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, plan: Parts, watch: Watch | None,
    sinks: Tensor | None = None, limits: Limits | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q k^T * scale) v over the rows of every group: fp32 [B, Hq, dv], 0 beyond a head's
    own rank and for a group without rows. Adds what is watched to the metrics.

    q [B, Hq, widest key rank], zeros beyond a head's own rank; slots int64 [B]; sinks fp32 [Hq]: a
    score without a value beside those of a query head, or None; limits: of scores, or None.
    """
    queries = (q.float() * (scale * LOG2_E)).contiguous().numpy()
    chunk = max(1, CHUNK // plan.page) * plan.page
    where = slots.numpy()
    tasks = cut(pages.lengths.numpy(), where, chunk)
    shape = len(tasks), plan.heads.shape[1]
    weights = np.empty((*(shape if watch else (0, 0)), chunk), dtype=np.float32)
    sums = np.empty((*shape, 2), dtype=np.float32)
    found = np.empty((*shape, plan.values), dtype=np.float32)
    arena, halves, singles, ints = views_of(pages.arena)
    tables = pages.tables.numpy(), where
    rows = tasks, *tables, plan.segments, plan.parts, plan.groups, plan.heads, plan.page
    data = arena, halves, singles, ints, plan.factors, plan.small, plan.scales, plan.columns
    cap, window, last = 0.0, 0, where
    if limits is not None:
        cap, window = (limits.softcap or 0.0) * LOG2_E, limits.window or 0
        last = limits.positions.long().numpy()
    bounds = cap, window, last, pages.groups[0].layout.tracked
    share(partial(_attend, queries, *rows, *data, *bounds, chunk, weights, sums, found), len(tasks))
    out = np.zeros((*q.shape[:2], plan.values), dtype=np.float32)
    if sinks is None:
        beside = np.full(q.shape[1], -np.inf, dtype=np.float32)
    else:
        beside = (sinks * LOG2_E).numpy()
    merge(tasks, plan.groups, plan.heads, sums, found, beside, out)
    if watch is not None:
        last = watch.last.numpy()
        observe(
            tasks, *tables, plan.groups, plan.page, weights, sums, last, watch.power, ints, singles
        )
    return torch.from_numpy(out)


def _attend(*arguments: Any) -> None:
    """The tasks of a thread, the last two arguments."""
    *rest, begin, end = arguments
    attend(*rest, begin, end)


@kernel(fast=True)
def powers(scores):
    """Scores become powers of 2, the largest of them 1. The largest score, the powers' sum."""
    most, total = np.float32(-1e30), np.float32(0)  # also where all are hidden
    for i in range(len(scores)):
        most = max(most, scores[i])
    for i in range(len(scores)):
        scores[i] = power_of_2(scores[i] - most)
    for i in range(len(scores)):
        total += scores[i]
    return most, total


@kernel(fast=True)
def limit(scores, first, count, row, positions, tracked, cap, least):
    """Scores [H, C] of `count` rows of a page, columns `first`.. of them: within a cap, where that
    is above 0, and -inf of rows at positions up to `least`. positions: of the page's rows, where
    they are tracked; else they count from `row`."""
    for h in range(len(scores)):
        if cap > 0:
            for p in range(first, first + count):
                scores[h, p] = cap * np.tanh(scores[h, p] / cap)
        for p in range(count):
            position = positions[p] if tracked else row + p
            if position <= least:
                scores[h, first + p] = -np.inf


@kernel(fast=True)
def spread(q, heads, segments, part, queries):
    """Queries [Hq, dk] of a part's heads to its columns [H, columns]."""
    for h in range(part[2], part[2] + part[3]):
        number, column = 0, 0
        for s in range(part[0], part[1]):
            width = segments[s, 2]
            queries[h, column : column + width] = q[heads[h], number : number + width]
            number, column = number + width, column + (width + LANES - 1) // LANES * LANES


@kernel(fast=True)
def gather(total, segments, part, found):
    """The way back: columns [H, columns] of a part's heads to values [H, dv]."""
    for h in range(part[2], part[2] + part[3]):
        number, column = 0, 0
        for s in range(part[0], part[1]):
            width = segments[s, 2]
            found[h, number : number + width] = total[h, column : column + width]
            number, column = number + width, column + (width + LANES - 1) // LANES * LANES


@kernel(fast=True)
def load(
    base, count, segments, factors, part, arena, halves, singles, scales, each, rows
):  # fmt: skip
    """The first rows of a page, decoded: fp32 of a part's columns, row after row. scales
    [count * each]: of these rows."""
    column, stride = 0, part[4]
    for s in range(part[0], part[1]):
        at, size = base + segments[s, 0], segments[s, 1]
        width, kind = segments[s, 2], segments[s, 3]
        if kind < HALF:
            high, scale, zero = at + segments[s, 4], segments[s, 5], segments[s, 6]
            decode_codes(
                arena, at, high, size, width, kind, count, scales, each, scale, zero, factors[s],
                rows, column, stride,
            )  # fmt: skip
        elif kind == SINGLE:
            for p in range(count):
                first, to = (at + p * size) // 4, p * stride + column
                rows[to : to + width] = singles[first : first + width]
        else:
            for p in range(count):
                decode_floats(halves, (at + p * size) // 2, width, kind, rows, p * stride + column)
        column += (width + LANES - 1) // LANES * LANES


@kernel("int64[:,::1](int32[:,:], int64[::1], int64)")
def cut(lengths, slots, chunk):
    """Tasks int64 [K, 4]: sequence, group, first row and rows; a group's one after another."""
    count = 0
    for b in range(len(slots)):
        for g in range(lengths.shape[1]):
            count += (lengths[slots[b], g] + chunk - 1) // chunk
    tasks, k = np.empty((count, 4), dtype=np.int64), 0
    for b in range(len(slots)):
        for g in range(lengths.shape[1]):
            rows = lengths[slots[b], g]
            for first in range(0, rows, chunk):
                tasks[k, 0], tasks[k, 1] = b, g
                tasks[k, 2], tasks[k, 3] = first, min(chunk, rows - first)
                k += 1
    return tasks


@kernel(
    "void(float32[:,:,::1], int64[:,::1], int32[:,:,:], int64[::1], int64[:,::1], int64[:,::1],"
    "int64[:,::1], int64[:,::1], int64, uint8[::1], uint16[::1], float32[::1], int32[::1],"
    "float32[::1], boolean, int64, int64, float32, int64, int64[:], boolean, int64,"
    "float32[:,:,::1], float32[:,:,::1], float32[:,:,::1],"
    "int64, int64)",
    fast=True,
)
def attend(
    q, tasks, tables, slots, segments, parts, groups, heads, page,
    arena, halves, singles, ints, factors, small, most_scales, columns, cap, window, asked, tracked,
    chunk, weights, sums, found, begin, end,
):  # fmt: skip
    """Attention of tasks begin..end: powers of 2 whose largest is 1 to `weights` [K, H, C], where
    these are kept, the largest score and the powers' sum to `sums` [K, H, 2], and the values added
    up by them to `found` [K, H, dv]. cap: in log2, 0: none; window: 0: none, else rows up to
    asked - window are hidden, asked [B]: positions of the queries."""
    most = heads.shape[1]
    rows = np.zeros(page * columns, dtype=np.float32)  # of a page, decoded
    queries = np.empty((most, columns), dtype=np.float32)
    total = np.empty((most, columns), dtype=np.float32)
    local = np.empty((most, chunk), dtype=np.float32)
    scales = np.empty(page * most_scales, dtype=np.float32)
    for t in range(begin, end):
        b, g, row, count = tasks[t, 0], tasks[t, 1], tasks[t, 2], tasks[t, 3]
        mine = weights[t] if len(weights) else local
        mine[: groups[g, 3], :count] = 0
        queries[:] = 0
        for k in range(groups[g, 0], groups[g, 1]):
            spread(q[b], heads[g], segments, parts[k], queries)
        for first in range(0, count, page):
            base = np.int64(tables[slots[b], g, (row + first) // page]) * UNIT
            inside, each = min(page, count - first), groups[g, 4]
            decode_scales(arena, halves, base + groups[g, 5], inside * each, small, scales)
            for k in range(groups[g, 0], groups[g, 1]):
                part = parts[k]
                own, last, width = part[2], part[2] + part[3], part[4]
                if part[5]:
                    s = segments[part[0]]
                    at = (base + s[0]) // 4
                    dots(queries[own:last], singles[at:], s[2], inside, mine[own:last, first:])
                else:
                    load(base, inside, segments, factors, part, arena, halves, singles, scales,
                         each, rows)  # fmt: skip
                    dots(queries[own:last], rows, width, inside, mine[own:last, first:])
        if cap > 0 or window > 0:
            least = asked[b] - window if window > 0 else np.int64(-1)
            for first in range(0, count, page):
                base = np.int64(tables[slots[b], g, (row + first) // page]) * UNIT
                at, inside = (base + groups[g, 6]) // 4, min(page, count - first)
                rows_of = mine[: groups[g, 3]]
                limit(rows_of, first, inside, row + first, ints[at:], tracked, cap, least)
        for h in range(groups[g, 3]):
            sums[t, h, 0], sums[t, h, 1] = powers(mine[h, :count])
        total[:] = 0
        for first in range(0, count, page):
            base = np.int64(tables[slots[b], g, (row + first) // page]) * UNIT
            inside, each = min(page, count - first), groups[g, 4]
            decode_scales(arena, halves, base + groups[g, 5], inside * each, small, scales)
            for k in range(groups[g, 1], groups[g, 2]):
                part = parts[k]
                own, last, width = part[2], part[2] + part[3], part[4]
                if part[5]:
                    s = segments[part[0]]
                    at = (base + s[0]) // 4
                    mix(mine[own:last, first:], singles[at:], s[2], inside, total[own:last])
                else:
                    load(base, inside, segments, factors, part, arena, halves, singles, scales,
                         each, rows)  # fmt: skip
                    mix(mine[own:last, first:], rows, width, inside, total[own:last])
        found[t] = 0
        for k in range(groups[g, 1], groups[g, 2]):
            gather(total, segments, parts[k], found[t])


@kernel(
    "void(int64[:,::1], int64[:,::1], int64[:,::1], float32[:,:,::1], float32[:,:,::1],"
    "float32[::1], float32[:,:,::1])",
    fast=True,
)
def merge(tasks, groups, heads, sums, found, sinks, out):
    """Tasks of a group together: out [B, Hq, dv]. The largest scores in `sums` become what a task's
    powers are to be multiplied by. sinks [Hq]: -inf where there are none."""
    k = 0
    while k < len(tasks):
        b, g, end = tasks[k, 0], tasks[k, 1], k + 1
        while end < len(tasks) and tasks[end, 0] == b and tasks[end, 1] == g:
            end += 1
        for h in range(groups[g, 3]):
            most = sinks[heads[g, h]]
            for t in range(k, end):
                most = max(most, sums[t, h, 0])
            total = power_of_2(sinks[heads[g, h]] - most)
            for t in range(k, end):
                sums[t, h, 0] = power_of_2(sums[t, h, 0] - most)
                total += sums[t, h, 0] * sums[t, h, 1]
            own = out[b, heads[g, h]]
            for t in range(k, end):
                factor = sums[t, h, 0] / total
                sums[t, h, 0] = factor
                for i in range(len(own)):
                    own[i] += factor * found[t, h, i]
        k = end


@kernel(
    "void(int64[:,::1], int32[:,:,:], int64[::1], int64[:,::1], int64, float32[:,:,::1],"
    "float32[:,:,::1], int64[::1], int64, int32[::1], float32[::1])",
    fast=True,
)
def observe(
    tasks, tables, slots, groups, page, weights, sums, last, power, ints, singles
):  # fmt: skip
    """Add the attention of tasks, whose factors are in `sums`, to the metrics of their rows."""
    for t in range(len(tasks)):
        b, g, row = tasks[t, 0], tasks[t, 1], tasks[t, 2]
        for p in range(tasks[t, 3]):
            base = np.int64(tables[slots[b], g, (row + p) // page]) * UNIT
            inside = (row + p) % page
            if ints[(base + groups[g, 6]) // 4 + inside] > last[b]:
                continue
            mass = np.float32(0)
            for h in range(groups[g, 3]):
                x = weights[t, h, p] * sums[t, h, 0]
                mass += x if power == 1 else x * x
            singles[(base + groups[g, 7]) // 4 + inside] += mass
