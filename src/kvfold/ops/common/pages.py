"""How to address the token entries in a layer's pages: constants of the layout, as tensors.

Shapes: G groups of the layer, R numbers of a token entry, P tokens per page. A *kind* is the g
groups whose pages have the same layout (only their columns differ), with W words per token.
*Packed* columns are the entry's columns, reordered by kind, then segment, then group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvfold.layout.formats.base import INTS, Format
from kvfold.layout.pages import (
    UNIT,
    Block,
    Group,
    PageLayout,
    Segment,
)

CHUNK = 8  # pages that `locate` keeps together: their keys or values fit a core's cache


@lru_cache
def owner_of(groups: tuple[Group, ...]) -> tuple[int, ...]:
    """The group of every KV head."""
    owner = {head: number for number, group in enumerate(groups) for head in group.heads}
    return tuple(owner[head] for head in sorted(owner))


class LayerPages(NamedTuple):
    """Groups of the pool, a layer's mostly, as ops take them: arena uint8; tables int32 [S, G, n],
    offsets of pages in units; lengths int32 [S, G]."""

    arena: Tensor
    tables: Tensor
    lengths: Tensor
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class PageClass:
    """Groups with equal pages. A row is W words, word i at offsets[i] + row * strides[i].

    channels: scales and zeros of the page's columns, c in all, counted from the page's start.
    """

    layout: PageLayout
    numbers: Tensor  # [g] which of the layer's groups
    columns: tuple[slice, ...]  # packed columns [g * width] of every segment
    word: torch.dtype
    offsets: Tensor  # [W]
    strides: Tensor  # [W]
    channels: Tensor  # [c]
    spots: tuple[tuple[int, int], ...] | None  # of every segment, (first, step) of groups' columns
    # in the row; None: steps are not even

    def split(self, packed: Tensor) -> list[Tensor]:
        """Packed rows [N, R] as the numbers of every segment, [N, g, width]."""
        return [
            packed[:, columns].unflatten(-1, (len(self.numbers), segment.width))
            for segment, columns in zip(self.layout.segments, self.columns, strict=True)
        ]

    def columns_of(self, row: Tensor, index: int) -> Tensor:
        """Columns of segment `index` in rows [..., R]: a view [..., g, width]."""
        assert self.spots is not None, "columns of these groups are no even steps apart"
        (start, step), width = self.spots[index], self.layout.segments[index].width
        stop = start + step * (len(self.numbers) - 1) + width
        return row[..., start:stop].unfold(-1, width, step)

    def address(self, tables: Tensor, slot: Tensor, number: Tensor, row: Tensor) -> Tensor:
        """Words of rows: slot, number and row broadcast to [...] -> [..., W]."""
        page = tables[slot, number, row // self.layout.page].long()
        start = page * (UNIT // self.word.itemsize)
        return start[..., None] + self.offsets + (row % self.layout.page)[..., None] * self.strides

    def channel_address(self, tables: Tensor, slot: Tensor, number: Tensor, row: Tensor) -> Tensor:
        """The channels of the rows' pages, in words of a scale: broadcast to [...] -> [..., c]."""
        page = tables[slot, number, row // self.layout.page].long()
        return page[..., None] * (UNIT // self.layout.scale) + self.channels

    def block(self, pages: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
        """A block of rows of uint8 pages [..., page_bytes], `dtype` [..., P, numbers of a row]."""
        numbers = block.size // (self.layout.page * dtype.itemsize)
        rows = pages[..., block.offset : block.offset + block.size].view(dtype)
        return rows.unflatten(-1, (self.layout.page, numbers))

    def codes(self, pages: Tensor, index: int) -> Tensor:
        """Codes of segment `index` of uint8 pages [..., page_bytes]: [..., P, bytes of a row]."""
        return self.block(pages, self.layout.blocks.codes[index], torch.uint8)

    def metadata(self, pages: Tensor, index: int) -> tuple[Tensor, ...]:
        """Scales (and zeros) of segment `index` of uint8 pages [..., page_bytes]: each [..., P], or
        per channel [..., width]."""
        layout, places = self.layout, self.layout.metadata_indices[index]
        if layout.segments[index].per_channel:
            offset, size = layout.blocks.channels
            stored = pages[..., offset : offset + size].view(layout.metadata)
            width = layout.segments[index].width
            return tuple(stored[..., place : place + width] for place in places)
        stored = self.block(pages, layout.blocks.scales, layout.metadata)
        return tuple(stored[..., place] for place in places)


@dataclass(frozen=True)
class Plan:
    """The kinds of a layer's groups, and the way between row columns and packed columns."""

    kinds: tuple[PageClass, ...]
    width: int  # R
    step: int  # numbers of the blocks of columns that `pack_order` and `row_order` move
    pack_order: Tensor | None  # [R / step] block of the row in every place of the packed columns
    row_order: Tensor | None  # its inverse; None: the row is packed as it is
    page: int
    tracked: bool
    itemsize: int | None  # bytes of an unquantised number; None: there are none

    @property
    def even(self) -> bool:
        """Whether rows can be filled without packing their columns."""
        return all(kind.spots is not None for kind in self.kinds)

    @property
    def in_place(self) -> bool:
        """Whether every page is P rows of fp32 keys, then P as wide of values, and nothing else: an
        arena of such pages alone is one table of rows."""
        kind, *others = self.kinds
        segments = kind.layout.segments
        widths = {x.width for x in segments}
        if others or self.itemsize != 4 or len(segments) != 2 or len(widths) > 1:
            return False
        page_bytes = kind.layout.page_units * UNIT
        unquantized = not any(x.quantized for x in segments)
        return unquantized and page_bytes == 2 * self.page * 4 * widths.pop()

    def pack(self, rows: Tensor) -> Tensor:
        """Row columns to packed columns, [..., R]."""
        return self._reorder(rows, self.pack_order)

    def unpack(self, packed: Tensor) -> Tensor:
        return self._reorder(packed, self.row_order)

    def _reorder(self, x: Tensor, order: Tensor | None) -> Tensor:
        if order is None:
            return x
        # Three dimensions, for which CPU's index_select is some twenty times faster than for four.
        blocks = x.reshape(x.shape[:-1].numel(), len(order), self.step)
        return blocks.index_select(1, order).view(x.shape)


# Pure functions of what never changes, remembered because every layer asks for them in every step.
@lru_cache(maxsize=4096)
def page_classes(
    groups: tuple[Group, ...], device: torch.device
) -> tuple[tuple[PageClass, ...], tuple[Segment, ...]]:
    """The classes of pages of some groups, which may differ in their segments only, and all
    segments in packed order."""
    for name in ("page", "itemsize", "tracked"):
        values = {getattr(group.layout, name) for group in groups}
        assert len(values) == 1, f"groups differ in {name}: {values}"
    members: dict[tuple[tuple[str, int, Format], ...], list[int]] = {}
    for number, group in enumerate(groups):
        key = tuple((x.side, x.width, x.format) for x in group.layout.segments)
        members.setdefault(key, []).append(number)
    kinds: list[PageClass] = []
    segments: list[Segment] = []
    for numbers in members.values():
        layouts = [groups[number].layout for number in numbers]
        columns = list(zip(*(x.segments for x in layouts), strict=True))
        # A group of rank 0 stores nothing unless it is tracked.
        if any(block.size for block in layouts[0].blocks.of_rows):
            spots = _spots([[x.start for x in same] for same in columns])
            first = sum(x.width for x in segments)
            kinds.append(_kind(layouts[0], numbers, first, spots, device))
        segments += [x for same in columns for x in same]
    return tuple(kinds), tuple(segments)


@lru_cache(maxsize=4096)
def plan_pages(groups: tuple[Group, ...], device: torch.device) -> Plan:
    """Make the plan of one layer's groups, which may differ in their segments only."""
    layout = groups[0].layout
    kinds, segments = page_classes(groups, device)
    step, order = _blocks(segments)
    in_place = order == sorted(order)
    pack_order = torch.tensor(order, dtype=torch.int64, device=device)
    return Plan(
        kinds=kinds,
        width=sum(x.width for x in segments),
        step=step,
        pack_order=None if in_place else pack_order,
        row_order=None if in_place else pack_order.argsort(),
        page=layout.page,
        tracked=layout.tracked,
        itemsize=None if all(x.quantized for x in segments) else layout.itemsize,
    )


def _blocks(segments: Sequence[Segment]) -> tuple[int, list[int]]:
    """The columns of `segments` in order, in blocks of the widest step that fits them all."""
    step = gcd(*(x.start for x in segments), *(x.width for x in segments)) or 1
    order = [
        block for x in segments for block in range(x.start // step, (x.start + x.width) // step)
    ]
    assert sorted(order) == list(range(len(order))), "segments do not tile the layer's row"
    return step, order


def _spots(starts: list[list[int]]) -> tuple[tuple[int, int], ...] | None:
    """(first, step) of starts [segments][g], where each segment's are even steps up."""
    steps = [{b - a for a, b in pairwise(increments)} or {1} for increments in starts]
    if any(len(increments) > 1 or min(increments) < 1 for increments in steps):
        return None
    return tuple(
        (increments[0], step.pop()) for increments, step in zip(starts, steps, strict=True)
    )


def _kind(
    layout: PageLayout,
    numbers: list[int],
    start: int,
    spots: tuple[tuple[int, int], ...] | None,
    device: torch.device,
) -> PageClass:
    """The kind of the groups `numbers`, whose packed columns begin at `start`."""
    ends = list(accumulate((len(numbers) * x.width for x in layout.segments), initial=start))
    rows = [(offset, size // layout.page) for offset, size in layout.blocks.of_rows]
    word = gcd(8, *(size for _, size in rows))
    words = [
        (offset // word + i, size // word) for offset, size in rows for i in range(size // word)
    ]
    offsets, strides = torch.tensor(words, dtype=torch.int64, device=device).unbind(-1)
    channels, scale = layout.blocks.channels, layout.scale
    return PageClass(
        layout=layout,
        numbers=torch.tensor(numbers, device=device),
        columns=tuple(slice(a, b) for a, b in pairwise(ends)),
        word=INTS[word],
        offsets=offsets,
        strides=strides,
        channels=torch.arange(channels.size // scale, device=device) + channels.offset // scale,
        spots=spots,
    )


def words_of(arena: Tensor, dtype: torch.dtype) -> Tensor:
    """The arena's whole units (a writable view), as numbers of `dtype`."""
    return arena[: arena.numel() // UNIT * UNIT].view(dtype)


def views_of(arena: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The arena's whole units in the host's memory (writable views), as bytes, 16-bit words, fp32
    and int32."""
    whole = words_of(arena, torch.uint8).numpy()
    return whole, whole.view(np.uint16), whole.view(np.float32), whole.view(np.int32)


def locate(
    pages: LayerPages, slots: Tensor, lengths: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the first lengths[b, g] rows lie, for groups whose plan is `in_place` and an arena of
    such pages alone.

    Arguments as of `store.gather`, lengths at least 1. Returns the arena as rows fp32 [., w], int32
    [B, G, c, s] which of them are the keys (values are P further on), c chunks of some pages, and
    bool [B, G, c, s] which are rows of the group: the others name its first.
    """
    arena, tables, _, groups = pages
    plan = plan_pages(groups, arena.device)
    assert plan.in_place, "pages are not rows of one width"
    (kind,), num_pages = plan.kinds, -(-size // plan.page)
    width = kind.layout.segments[0].width
    floats = words_of(arena, torch.float32)
    table = floats[: floats.numel() // width * width].view(-1, width)
    column = torch.arange(-(-num_pages // CHUNK) * CHUNK, device=arena.device)
    row = torch.arange(plan.page, dtype=torch.int32, device=arena.device)
    where = tables[slots[:, None, None], kind.numbers[:, None], column.clamp(max=num_pages - 1)]
    first = where[..., None] // kind.layout.page_units * (2 * plan.page)
    valid = column.int()[:, None] * plan.page + row < lengths[..., None, None]
    index = torch.where(valid, first + row, first[..., :1, :])
    index, valid = (x.unflatten(2, (-1, CHUNK)).flatten(3) for x in (index, valid))
    return table, index, valid
