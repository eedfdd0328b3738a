"""Split a decode step's work into slices of equal cost. Plain PyTorch, also inside a CUDA graph.

Shapes: L layers (or any leading dimensions), I items, S slices. An *item* is one (sequence, group)
with `tiles` tiles of equally many tokens. A slice takes consecutive tiles of consecutive items, so
an item may be split between slices and a slice may hold many items (stream-K, Osama et al. 2023,
weighted).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slices:
    """starts int32 [..., S + 1, 2]: the (item, tile) where a slice begins and the one before ends.

    firsts int32 [..., I]: slice of an item's first tile; counts int32 [..., I]: slices that hold a
    part of it, 0 for an item without tiles. The part of item i in slice s is part s + i.
    order int32 [..., I]: the item that is meant by every item number; None: itself.
    """

    starts: Tensor
    firsts: Tensor
    counts: Tensor
    order: Tensor | None = None

    def layer(self, number: int) -> "Slices":
        """Of one of the leading dimension."""
        return Slices(self.starts[number], self.firsts[number], self.counts[number])

    def to(self, device: torch.device) -> "Slices":
        order = None if self.order is None else self.order.to(device)
        return Slices(self.starts.to(device), self.firsts.to(device), self.counts.to(device), order)


def stream_k(
    tiles: Tensor, cost: Tensor, overhead: int, num_slices: int, smallest: int = 1
) -> Slices:
    """Split items into slices of equal cost, to within a tile. With too few tiles, the last slices
    are empty.

    tiles int [..., I]; cost int [I] or [..., I] per tile; overhead: cost of starting an item;
    smallest: least tiles per slice. No host sync; costs must add up to less than 2^63 / S.
    """
    tiles, cost = tiles.long(), cost.long()
    work = tiles * cost + overhead * (tiles > 0)
    ends = work.cumsum(-1)
    begins, total = ends - work, ends[..., -1:].clamp(min=1)
    # No slice smaller than a tile: then none is empty between two that share an item.
    used = (total // (smallest * cost.amax(-1, keepdim=True))).clamp(1, num_slices)
    numbers = torch.arange(num_slices + 1, device=tiles.device).minimum(used)
    bounds = numbers * total // used
    item = torch.searchsorted(ends, bounds, right=True).clamp(max=tiles.shape[-1] - 1)
    inside = bounds - begins.gather(-1, item) - overhead
    item_cost = cost.expand_as(tiles).gather(-1, item)
    tile = (-(-inside // item_cost)).clamp(min=0).minimum(tiles.gather(-1, item))
    first = ((begins + overhead + 1) * used - 1) // total
    last = ((ends - cost + 1) * used - 1) // total
    counts = torch.where(tiles > 0, last - first + 1, 0)
    return Slices(torch.stack((item, tile), -1).int(), first.int(), counts.int())


def longest_first(tiles: Sequence[int], cost: Sequence[int], num_slices: int) -> Slices:
    """Assign whole items to slices, the longest first, each to the least loaded slice (ZACK §5.3).
    On the host.

    It never splits an item. Kept as a baseline for `stream_k`.
    """
    work = [n * c for n, c in zip(tiles, cost, strict=True)]
    heap = [(0, s) for s in range(num_slices)]
    members: list[list[int]] = [[] for _ in range(num_slices)]
    for item in sorted(range(len(work)), key=lambda i: -work[i]):
        load, s = heapq.heappop(heap)
        members[s].append(item)
        heapq.heappush(heap, (load + work[item], s))
    order = [item for items in members for item in items]
    begins = [0]
    for items in members:
        begins.append(begins[-1] + len(items))
    owner = [s for s, items in enumerate(members) for _ in items]
    counts = [int(tiles[item] > 0) for item in order]
    starts = [(begin, 0) for begin in begins]
    return Slices(*(torch.tensor(x, dtype=torch.int32) for x in (starts, owner, counts, order)))


def whole_items(tiles: Sequence[int]) -> Slices:
    """One slice per item, in order: attention without the load balancing of ZACK §5.3. On the
    host."""
    number = len(tiles)
    starts = torch.tensor([(item, 0) for item in range(number + 1)], dtype=torch.int32)
    counts = torch.tensor([int(n > 0) for n in tiles], dtype=torch.int32)
    return Slices(starts, torch.arange(number, dtype=torch.int32), counts)


def columns_of(lengths: Tensor, num_layers: int, layers: Sequence[int]) -> Tensor:
    """The columns of `layers` in lengths [B, groups of all layers], in that order; every layer has
    equally many groups."""
    if list(layers) == list(range(num_layers)):
        return lengths
    by_layer = lengths.unflatten(1, (num_layers, -1)).unbind(
        1
    )  # no index, which the host would send
    return torch.cat([by_layer[i] for i in layers], 1)


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up. Triton's `cdiv` takes microseconds, at every launch of every
    layer."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def padded_queries(queries: int) -> int:
    """Columns that a KV head's queries take in a matrix product: a power of two, at least 8."""
    return max(8, power_of_two(queries))


def padded_width(width: int) -> int:
    """Width of a tile that holds vectors of `width` numbers: a power of two, at least 16."""
    return max(16, power_of_two(width))
