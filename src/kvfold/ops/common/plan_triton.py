"""Split a decode step's work into slices of equal cost, for all layers in one launch:
`plan.stream_k` in Triton.

Shapes: L layers of G groups, B sequences, I = B * G items, S slices.
"""
# mypy: allow-untyped-defs

import torch
import triton.language as tl
from torch import Tensor

from kvfold.ops.common.launch import launch_options
from kvfold.ops.common.plan import Slices, power_of_two
from kvfold.ops.common.recording import launch_once
from kvfold.ops.common.step_kernel import step_kernel
from kvfold.ops.decode.kernels import after_launch

BLOCK = 1024  # items, or slices, that a program takes at a time


def plan_slices(
    lengths: Tensor,
    slots: Tensor | None,
    cost: Tensor,
    rows: int,
    overhead: int,
    num_slices: int,
    smallest: int,
) -> tuple[Slices, Tensor]:
    """`stream_k` of tiles of `rows` rows, for every layer, and the items' lengths int32 [L, I].

    lengths int [S, L * G], of which `slots` int [B] names the rows, or None: all, in order; cost
    int32 [L, G] of a tile of every group. No host sync.
    """
    assert lengths.stride(1) == 1 and cost.is_contiguous(), "rows of lengths are one block"
    layers, groups = cost.shape
    assert lengths.shape[1] == layers * groups, f"{lengths.shape[1]} != {layers} * {groups}"
    items = groups * (lengths if slots is None else slots).shape[0]
    new = cost.new_empty
    ends, counted = new(layers, items, dtype=torch.int64), new(layers, items)
    slices = Slices(new(layers, num_slices + 1, 2), new(layers, items), new(layers, items))
    launch_once(
        plan_kernel, (layers,),
        lengths, lengths.stride(0), lengths if slots is None else slots, cost,
        ends, counted, slices.starts, slices.firsts, slices.counts,
        items, power_of_two(items), num_slices,
        G=groups, ROWS=rows, OVERHEAD=overhead, SMALLEST=smallest, SLOTS=slots is not None,
        BLOCK=BLOCK, num_warps=16, **launch_options(cost.device),
    )  # fmt: skip
    return slices, counted


@step_kernel
def plan_kernel(
    lengths, length_slot, slots, cost, ends, counted, starts, firsts, counts,
    items, most_items, num_slices,
    G: tl.constexpr, ROWS: tl.constexpr, OVERHEAD: tl.constexpr, SMALLEST: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One layer. ends int64 [L, I], the work of all items up to each, is room; most_items: items,
    rounded up to a power of two."""
    layer, lane = tl.program_id(0), tl.arange(0, BLOCK)
    ends += layer * items
    counted += layer * items
    cost += layer * G
    after_launch(PDL)
    total, most = tl.full([], 0, tl.int64), 1  # most divides: from 0, Triton would not compile
    for begin in range(0, items, BLOCK):
        item = begin + lane
        in_range = item < items
        row = (item // G).to(tl.int64)
        if SLOTS:
            row = tl.load(slots + row, in_range, 0).to(tl.int64)
        length = tl.load(lengths + row * length_slot + layer * G + item % G, in_range, 0).to(
            tl.int32
        )
        tile_cost = tl.load(cost + item % G, in_range, 0)
        tiles = tl.cdiv(length, ROWS).to(tl.int64)
        work = tiles * tile_cost + tl.where(tiles > 0, OVERHEAD, 0)
        tl.store(counted + item, length, in_range)
        tl.store(ends + item, total + tl.cumsum(work, 0), in_range)
        total += tl.sum(work, 0)
        most = tl.maximum(most, tl.max(tile_cost, 0))
    total = tl.maximum(total, 1)
    # No slice smaller than a tile: then none is empty between two that share an item.
    used = tl.minimum(tl.maximum(total // (SMALLEST * most), 1), num_slices)
    tl.debug_barrier()  # what a thread has written, others read
    for begin in range(0, items, BLOCK):
        item = begin + lane
        in_range = item < items
        tile_cost = tl.load(cost + item % G, in_range, 0)
        tiles = tl.cdiv(tl.load(counted + item, in_range, 0), ROWS).to(tl.int64)
        end = tl.load(ends + item, in_range, 0)
        start = end - tiles * tile_cost - tl.where(tiles > 0, OVERHEAD, 0)
        first = ((start + OVERHEAD + 1) * used - 1) // total
        last = ((end - tile_cost + 1) * used - 1) // total
        tl.store(firsts + layer * items + item, first.to(tl.int32), in_range)
        count = tl.where(tiles > 0, last - first + 1, 0)
        tl.store(counts + layer * items + item, count.to(tl.int32), in_range)
    for begin in range(0, num_slices + 1, BLOCK):
        number = begin + lane
        bound = tl.minimum(number, used) * total // used
        item = tl.zeros([BLOCK], tl.int32)  # how many end at the bound or before
        step = most_items
        while step > 0:
            probe = item + step
            in_range = probe <= items
            item = tl.where(
                in_range & (tl.load(ends + probe - 1, in_range, 0) <= bound), probe, item
            )
            step //= 2
        item = tl.minimum(item, items - 1)
        before = tl.load(ends + item - 1, item > 0, 0)
        inside = bound - before - OVERHEAD
        tile_cost = tl.load(cost + item % G)
        tiles = tl.cdiv(tl.load(counted + item), ROWS)
        tile = tl.where(inside > 0, (inside + tile_cost - 1) // tile_cost, 0).to(tl.int32)
        to = starts + 2 * (layer * (num_slices + 1) + number)
        tl.store(to, item, number <= num_slices)
        tl.store(to + 1, tl.minimum(tile, tiles), number <= num_slices)
