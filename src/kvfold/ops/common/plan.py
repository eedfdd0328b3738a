"""How a decode step's work is cut into equal slices. Plain PyTorch, also inside a CUDA graph.

Shapes: L layers (or any leading dimensions), I items, S slices. An *item* is one (sequence, group):
`tiles` tiles of equally many rows. A slice takes consecutive tiles of consecutive items, so an item
may be split between slices and a slice may hold many items (stream-K, Osama et al. 2023, weighted).
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
    """Slices of equal cost, to within a tile; fewer, the last ones empty, where there are not as
    many tiles.

    tiles int [..., I]; cost int [I] or [..., I] of a tile; overhead: cost of beginning an item;
    smallest: tiles of a slice. No host sync; costs add up to less than 2^63 / S.
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
    """ZACK §5.3: whole items, the longest first, each to the slice with least work. On the host.

    It never splits an item; kept as what `stream_k` is measured against.
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
    """a / b, rounded up. Triton's takes microseconds, at every launch of every layer."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def padded_queries(queries: int) -> int:
    """Columns of a matrix product that a KV head's queries take: a power of two, 8 or more."""
    return max(8, power_of_two(queries))


def padded_width(width: int) -> int:
    """Numbers of a tile that hold a row of `width`: a power of two, 16 or more."""
    return max(16, power_of_two(width))
