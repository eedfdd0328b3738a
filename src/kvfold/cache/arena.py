"""Bytes of whole pages, wherever they lie in an arena.

Shapes: C byte classes, M pages of one call, class after class. Offsets count units of UNIT bytes.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kvfold.spec.layout import UNIT, Ints, PageLayout

COPIED = 1 << 26  # bytes of pages that are copied at once, as many as it takes beside them


def copy(arena: Tensor, units: Ints, source: Tensor, target: Tensor, pages: Ints) -> None:
    """From pages at source [M] to pages at target [M], `pages` [C] of `units` [C] each."""
    sizes = pages.tolist()
    for size, old, new in zip(
        units.tolist(), source.split(sizes), target.split(sizes), strict=True
    ):
        most = max(1, COPIED // (size * UNIT))
        for a, b in zip(old.split(most), new.split(most), strict=True):
            _write(arena, size, b, read(arena, size, a))


def read(arena: Tensor, size: int, offsets: Tensor) -> Tensor:
    """Pages of `size` units at offsets [m]: uint8 [m, size * UNIT]."""
    found = arena.view(-1, UNIT).index_select(0, _cells(offsets, size))
    return found.view(len(offsets), size * UNIT)


def write(
    arena: Tensor, units: Ints, target: Tensor, pages: Ints, content: Sequence[Tensor]
) -> None:
    """Put pages, uint8 [m, bytes] of every class, at target [M]."""
    for size, new, own in zip(units.tolist(), target.split(pages.tolist()), content, strict=True):
        _write(arena, size, new, own.to(arena.device))


def _write(arena: Tensor, size: int, offsets: Tensor, content: Tensor) -> None:
    arena.view(-1, UNIT).index_copy_(0, _cells(offsets, size), content.view(-1, UNIT))


def _cells(offsets: Tensor, size: int) -> Tensor:
    """Every unit of pages, int64 [m * size]."""
    return (offsets.long()[:, None] + torch.arange(size, device=offsets.device)).flatten()


@lru_cache
def row_of_bytes(layout: PageLayout) -> Tensor:
    """Which row every byte of a page belongs to, int64 [page_bytes]; metrics and what lies between
    blocks to none that there is."""
    found = torch.full((layout.page_bytes,), layout.page)
    for block in (*layout.blocks.codes, layout.blocks.scales, layout.blocks.positions):
        rows = torch.arange(layout.page).repeat_interleave(block.size // layout.page)
        found[block.offset : block.offset + block.size] = rows
    return found
