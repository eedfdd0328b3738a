"""Read, write and copy the bytes of whole pages of the arena.

Shapes: C byte classes (distinct page sizes), M pages of one call, sorted by class. Offsets count
units of UNIT bytes.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kvfold.layout.pages import UNIT, Ints, PageLayout

COPIED = 1 << 26  # most bytes copied at once, which bounds the temporary buffer


def copy(arena: Tensor, units: Ints, source: Tensor, target: Tensor, pages: Ints) -> None:
    """Copy pages within the arena, from offsets source [M] to target [M]: `pages` [C] pages of
    `units` [C] units each."""
    sizes = pages.tolist()
    for size, sources, targets in zip(
        units.tolist(), source.split(sizes), target.split(sizes), strict=True
    ):
        limit = max(1, COPIED // (size * UNIT))
        for old, new in zip(sources.split(limit), targets.split(limit), strict=True):
            _write(arena, size, new, read(arena, size, old))


def read(arena: Tensor, size: int, offsets: Tensor) -> Tensor:
    """Bytes of the pages of `size` units at offsets [m]: uint8 [m, size * UNIT]."""
    content = arena.view(-1, UNIT).index_select(0, _cells(offsets, size))
    return content.view(len(offsets), size * UNIT)


def write(
    arena: Tensor, units: Ints, target: Tensor, pages: Ints, content: Sequence[Tensor]
) -> None:
    """Write pages, uint8 [m, bytes] per class, to offsets target [M]."""
    for size, offsets, data in zip(
        units.tolist(), target.split(pages.tolist()), content, strict=True
    ):
        _write(arena, size, offsets, data.to(arena.device))


def _write(arena: Tensor, size: int, offsets: Tensor, content: Tensor) -> None:
    arena.view(-1, UNIT).index_copy_(0, _cells(offsets, size), content.view(-1, UNIT))


def _cells(offsets: Tensor, size: int) -> Tensor:
    """Indices of all units of these pages, int64 [m * size]."""
    return (offsets.long()[:, None] + torch.arange(size, device=offsets.device)).flatten()


def clear_unused(content: Tensor, layout: PageLayout, num_entries: int) -> None:
    """Set the bytes of a page list, uint8 [m, page bytes], that hold none of its `num_entries`
    entries to 0: metrics, gaps between blocks, and the end of the last page. Never waits for the
    device."""
    entry_of_byte, unused = _entry_of_bytes(layout, content.device)
    content.index_fill_(1, unused, 0)
    in_last = num_entries - (len(content) - 1) * layout.page
    content[-1:].masked_fill_(entry_of_byte >= in_last, 0)


@lru_cache
def _entry_of_bytes(layout: PageLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """The entry that each byte of a page belongs to, int64 [page_bytes], and the bytes that belong
    to none, int64: metrics and the gaps between blocks. Their entry is `layout.page`."""
    entry_of_byte = torch.full((layout.page_bytes,), layout.page)
    for block in (*layout.blocks.codes, layout.blocks.scales, layout.blocks.positions):
        entries = torch.arange(layout.page).repeat_interleave(block.size // layout.page)
        entry_of_byte[block.offset : block.offset + block.size] = entries
    unused = (entry_of_byte == layout.page).nonzero().flatten()
    return entry_of_byte.to(device), unused.to(device)
