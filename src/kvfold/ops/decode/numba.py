"""Decode attention on CPUs over cached pages, without copying them first. Numba kernels.

Chosen by `attention.numba_decode` for score-space keys in formats that `common.parts` supports;
otherwise `cpu.py` or the reference runs. The entries of a page are converted to fp32 in a core's L1
cache, once for all heads that read them; stored fp32 is read in place. Results depend neither on
the number of threads nor on the other sequences of the batch, since tasks do not.

Shapes: B sequences, G groups of a layer, Hq query heads, H query heads that read a group; K tasks,
each of at most C entries of one group of one sequence; dk, dv widest key and value. The tables of
segments, parts, groups and heads are those of `common.parts.Parts`.
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

CHUNK = 512  # entries per task: their weights and a page fit into a core's L1 cache


@dataclass(frozen=True)
class Watch:
    """What attention adds to the eviction metrics of entries.

    power: weights are added as they are (1) or squared (2).
    last int [B]: only entries at positions up to this; -1: none of the sequence's entries.
    """

    power: int
    last: Tensor


def decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, plan: Parts, watch: Watch | None,
    sinks: Tensor | None = None, limits: Limits | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute softmax(q k^T * scale) v over the entries of every group, and update the metrics that
    `watch` asks for.

    q [B, Hq, widest key rank], zero beyond a head's rank; slots int64 [B]; sinks fp32 [Hq]: score
    of an attention sink per query head (a score without a value), or None; limits: softcap and
    window, or None. Returns fp32 [B, Hq, dv], zero beyond a head's rank and for a group without
    entries, and the log2 of the sum of 2^score (scores in log2), the sink's included, fp32 [B, Hq],
    -inf for a group without entries.
    """
    queries = (q.float() * (scale * LOG2_E)).contiguous().numpy()
    chunk = max(1, CHUNK // plan.page) * plan.page
    slot_numbers = slots.numpy()
    tasks = cut(pages.lengths.numpy(), slot_numbers, chunk)
    shape = len(tasks), plan.heads.shape[1]
    weights = np.empty((*(shape if watch else (0, 0)), chunk), dtype=np.float32)
    sums = np.empty((*shape, 2), dtype=np.float32)
    outputs = np.empty((*shape, plan.values), dtype=np.float32)
    arena, halves, singles, ints = views_of(pages.arena)
    tables = pages.tables.numpy(), slot_numbers
    arrays = tasks, *tables, plan.segments, plan.parts, plan.groups, plan.heads, plan.page
    data = arena, halves, singles, ints, plan.factors, plan.small, plan.scales, plan.columns
    cap, window, last = 0.0, 0, slot_numbers
    if limits is not None:
        cap, window = (limits.softcap or 0.0) * LOG2_E, limits.window or 0
        last = limits.positions.long().numpy()
    bounds = cap, window, last, pages.groups[0].layout.tracked
    share(
        partial(_attend, queries, *arrays, *data, *bounds, chunk, weights, sums, outputs),
        len(tasks),
    )
    out = np.zeros((*q.shape[:2], plan.values), dtype=np.float32)
    lse = np.full(q.shape[:2], -np.inf, dtype=np.float32)
    if sinks is None:
        sink_scores = np.full(q.shape[1], -np.inf, dtype=np.float32)
    else:
        sink_scores = (sinks * LOG2_E).numpy()
    merge(tasks, plan.groups, plan.heads, sums, outputs, sink_scores, out, lse)
    if watch is not None:
        last = watch.last.numpy()
        observe(
            tasks, *tables, plan.groups, plan.page, weights, sums, last, watch.power, ints, singles
        )
    return torch.from_numpy(out), torch.from_numpy(lse)


def _attend(*arguments: Any) -> None:
    """Run a thread's tasks; the last two arguments are the first task and the one after the
    last."""
    *rest, begin, end = arguments
    attend(*rest, begin, end)


@kernel(fast=True)
def powers(scores):
    """Replace scores by 2^(score - maximum), in place. Returns the maximum and the sum of the
    powers."""
    most, total = np.float32(-1e30), np.float32(0)  # finite, for tasks whose entries are all hidden
    for i in range(len(scores)):
        most = max(most, scores[i])
    for i in range(len(scores)):
        scores[i] = power_of_2(scores[i] - most)
    for i in range(len(scores)):
        total += scores[i]
    return most, total


@kernel(fast=True)
def limit(scores, first, count, row, positions, tracked, cap, least):
    """Apply softcap and sliding window to scores [H, C] of `count` entries of a page, from column
    `first` on.

    Scores are capped if cap > 0; entries at positions up to `least` become -inf. positions: of the
    page's entries, if they are tracked; otherwise they count from `row`.
    """
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
    """Copy the queries [Hq, dk] of a part's heads to its padded columns [H, columns]."""
    for h in range(part[2], part[2] + part[3]):
        number, column = 0, 0
        for s in range(part[0], part[1]):
            width = segments[s, 2]
            queries[h, column : column + width] = q[heads[h], number : number + width]
            number, column = number + width, column + (width + LANES - 1) // LANES * LANES


@kernel(fast=True)
def gather(total, segments, part, outputs):
    """Copy a part's padded columns [H, columns] back to values [H, dv]: the inverse of `spread`."""
    for h in range(part[2], part[2] + part[3]):
        number, column = 0, 0
        for s in range(part[0], part[1]):
            width = segments[s, 2]
            outputs[h, number : number + width] = total[h, column : column + width]
            number, column = number + width, column + (width + LANES - 1) // LANES * LANES


@kernel(fast=True)
def load(
    base, count, segments, factors, part, arena, halves, singles, scales, per_entry, rows
):  # fmt: skip
    """Convert the first `count` entries of a page to fp32, in a part's columns, entry after entry.

    scales [count * per_entry]: of these entries.
    """
    column, stride = 0, part[4]
    for s in range(part[0], part[1]):
        at, size = base + segments[s, 0], segments[s, 1]
        width, kind = segments[s, 2], segments[s, 3]
        if kind < HALF:
            high, scale, zero = at + segments[s, 4], segments[s, 5], segments[s, 6]
            decode_codes(
                arena, at, high, size, width, kind, count, scales, per_entry, scale, zero,
                factors[s], rows, column, stride,
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
    """List tasks int64 [K, 4]: sequence, group, first entry and number of entries. A group's tasks
    are consecutive."""
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
    arena, halves, singles, ints, factors, small, most_scales, columns, cap, window, positions,
    tracked, chunk, weights, sums, outputs, begin, end,
):  # fmt: skip
    """Compute attention of tasks begin..end.

    Writes for every task the weights [K, H, C] (if they are kept), powers of 2 of which the largest
    is 1; sums [K, H, 2], the maximum score and the sum of the powers; and outputs [K, H, dv], the
    values summed with these weights.
    cap: softcap in log2, 0: none.
    window: 0: none, otherwise entries at positions up to positions - window are hidden.
    positions [B]: of the queries.
    """
    most = heads.shape[1]
    rows = np.zeros(page * columns, dtype=np.float32)  # a page's entries as fp32
    queries = np.empty((most, columns), dtype=np.float32)
    total = np.empty((most, columns), dtype=np.float32)
    local = np.empty((most, chunk), dtype=np.float32)
    scales = np.empty(page * most_scales, dtype=np.float32)
    for t in range(begin, end):
        b, g, row, count = tasks[t, 0], tasks[t, 1], tasks[t, 2], tasks[t, 3]
        weight = weights[t] if len(weights) else local
        weight[: groups[g, 3], :count] = 0
        queries[:] = 0
        for k in range(groups[g, 0], groups[g, 1]):
            spread(q[b], heads[g], segments, parts[k], queries)
        for first in range(0, count, page):
            base = np.int64(tables[slots[b], g, (row + first) // page]) * UNIT
            num_rows, per_entry = min(page, count - first), groups[g, 4]
            decode_scales(arena, halves, base + groups[g, 5], num_rows * per_entry, small, scales)
            for k in range(groups[g, 0], groups[g, 1]):
                part = parts[k]
                head, stop, width = part[2], part[2] + part[3], part[4]
                if part[5]:
                    s = segments[part[0]]
                    at = (base + s[0]) // 4
                    dots(
                        queries[head:stop], singles[at:], s[2], num_rows, weight[head:stop, first:]
                    )
                else:
                    load(base, num_rows, segments, factors, part, arena, halves, singles, scales,
                         per_entry, rows)  # fmt: skip
                    dots(queries[head:stop], rows, width, num_rows, weight[head:stop, first:])
        if cap > 0 or window > 0:
            least = positions[b] - window if window > 0 else np.int64(-1)
            for first in range(0, count, page):
                base = np.int64(tables[slots[b], g, (row + first) // page]) * UNIT
                at, num_rows = (base + groups[g, 6]) // 4, min(page, count - first)
                rows_of = weight[: groups[g, 3]]
                limit(rows_of, first, num_rows, row + first, ints[at:], tracked, cap, least)
        for h in range(groups[g, 3]):
            sums[t, h, 0], sums[t, h, 1] = powers(weight[h, :count])
        total[:] = 0
        for first in range(0, count, page):
            base = np.int64(tables[slots[b], g, (row + first) // page]) * UNIT
            num_rows, per_entry = min(page, count - first), groups[g, 4]
            decode_scales(arena, halves, base + groups[g, 5], num_rows * per_entry, small, scales)
            for k in range(groups[g, 1], groups[g, 2]):
                part = parts[k]
                head, stop, width = part[2], part[2] + part[3], part[4]
                if part[5]:
                    s = segments[part[0]]
                    at = (base + s[0]) // 4
                    mix(weight[head:stop, first:], singles[at:], s[2], num_rows, total[head:stop])
                else:
                    load(base, num_rows, segments, factors, part, arena, halves, singles, scales,
                         per_entry, rows)  # fmt: skip
                    mix(weight[head:stop, first:], rows, width, num_rows, total[head:stop])
        outputs[t] = 0
        for k in range(groups[g, 1], groups[g, 2]):
            gather(total, segments, parts[k], outputs[t])


@kernel(
    "void(int64[:,::1], int64[:,::1], int64[:,::1], float32[:,:,::1], float32[:,:,::1],"
    "float32[::1], float32[:,:,::1], float32[:,::1])",
    fast=True,
)
def merge(tasks, groups, heads, sums, outputs, sinks, out, lse):
    """Merge the tasks of every group: out [B, Hq, dv], lse [B, Hq].

    The maximum scores in `sums` are replaced by the factor of each task's weights in the softmax.
    sinks [Hq]: -inf if there are none.
    """
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
            lse[b, heads[g, h]] = most + np.log2(total)
            head_out = out[b, heads[g, h]]
            for t in range(k, end):
                factor = sums[t, h, 0] / total
                sums[t, h, 0] = factor
                for i in range(len(head_out)):
                    head_out[i] += factor * outputs[t, h, i]
        k = end


@kernel(
    "void(int64[:,::1], int32[:,:,:], int64[::1], int64[:,::1], int64, float32[:,:,::1],"
    "float32[:,:,::1], int64[::1], int64, int32[::1], float32[::1])",
    fast=True,
)
def observe(
    tasks, tables, slots, groups, page, weights, sums, last, power, ints, singles
):  # fmt: skip
    """Add the attention weights of tasks to the metrics of their entries. sums: as `merge` leaves
    them."""
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
