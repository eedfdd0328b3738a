"""Free pages of every byte class, and the slabs they are cut from.

Shapes: C byte classes (distinct page sizes), M pages of one call. Offsets count UNIT bytes.
"""

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from kvfold.errors import SettingError
from kvfold.ops.common.launch import upload
from kvfold.spec.layout import UNIT, Ints

LOST = 0.01  # share of the arena that the choice of a slab size may lose
USUAL, MOST = 16, 128  # a slab holds that many of the largest pages; fewer in a small arena


class Slabs:
    """Free pages of every byte class, and the slabs they are cut from. Offsets are in units.

    units [C] a page, per_slab [C] pages, held [C] slabs. free_pages: int32 offsets on the device,
    num_free[c] of class c, popped from the end; free_slabs: slab numbers, popped from the front.
    """

    def __init__(self, num_bytes: int, units: Ints, groups: Ints, device: torch.device) -> None:
        self.units, self.device = units, device
        self.slab_units = slab_units(num_bytes, units, groups)
        self.per_slab: Ints = self.slab_units // units
        self.num_slabs = num_bytes // UNIT // self.slab_units
        self.held: Ints = np.zeros_like(units)
        self.num_free: Ints = np.zeros_like(units)
        self.free_slabs: Ints = np.arange(self.num_slabs)
        self.free_pages = [torch.empty(0, dtype=torch.int32, device=device) for _ in units]
        self._emptied = False  # pages were pushed since slabs were last taken back

    def to_take(self, pages: Ints) -> Ints:
        """Slabs [C] that every class must take before it can pop `pages` [C]."""
        return ceil_div(np.maximum(pages - self.num_free, 0), self.per_slab)

    def can_pop(self, pages: Ints) -> bool:
        """Whether `pages` [C] can be popped, if need be after taking slabs back."""
        if self.to_take(pages).sum() > len(self.free_slabs):
            self.take_back()
        return bool(self.to_take(pages).sum() <= len(self.free_slabs))

    def pop(self, pages: Ints) -> tuple[Tensor, "Slabs"]:
        """Offsets [M] of `pages` [C] pages, class after class; and the slabs without them."""
        after, popped = self.copy(), []
        *taken, after.free_slabs = np.split(self.free_slabs, np.cumsum(self.to_take(pages)))
        for c in np.flatnonzero(pages):
            after._cut(int(c), taken[c])
            popped.append(after.free_pages[c][-pages[c] :])
            after.free_pages[c] = after.free_pages[c][: -pages[c]]
        after.num_free -= pages
        return torch.cat(popped), after

    def copy(self) -> "Slabs":
        """A change is made in a copy, which its owner takes once nothing can fail any more."""
        after = copy(self)
        after.held, after.num_free = self.held.copy(), self.num_free.copy()
        after.free_pages = self.free_pages.copy()
        return after

    def _cut(self, c: int, slabs: Ints) -> None:
        """Cut slabs into free pages of class c, last in line so that older slabs stay full."""
        if len(slabs):
            starts = slabs[:, None] * self.slab_units + np.arange(self.per_slab[c]) * self.units[c]
            new = upload(starts.ravel().astype(np.int32), self.device)
            self.free_pages[c] = torch.cat((new, self.free_pages[c]))
            self.held[c] += len(slabs)
            self.num_free[c] += starts.size

    def push(self, offsets: Tensor, pages: Ints) -> "Slabs":
        """The slabs with the pages at `offsets` [M] free: `pages` [C] of every class, class after
        class."""
        after, parts = self.copy(), offsets.split(pages.tolist())
        for c in np.flatnonzero(pages):
            after.free_pages[c] = torch.cat((after.free_pages[c], parts[c]))
        after.num_free += pages
        after._emptied = True
        return after

    def take_back(self) -> None:
        """Take slabs back whose pages are all free: the one place that waits for the device.

        The other free pages are sorted so that the fullest slabs are popped from first and the
        emptiest can drain: in the order they came, a changing mix strands a third of the arena.
        """
        for c, free in enumerate(self.free_pages if self._emptied else ()):
            slab = free.long() // self.slab_units
            num_free = torch.bincount(slab, minlength=self.num_slabs)
            whole = num_free == int(self.per_slab[c])
            found = whole.nonzero().flatten().cpu().numpy()
            by_fill = (num_free[slab] * self.num_slabs + slab).argsort(descending=True)
            self.free_pages[c] = free[by_fill[len(found) * int(self.per_slab[c]) :]]
            self.held[c] -= len(found)
            self.num_free[c] -= len(found) * self.per_slab[c]
            self.free_slabs = np.concatenate((found, self.free_slabs))
        self._emptied = False

    def check_integrity(self, owned: Sequence[Tensor]) -> None:
        """Assert that `owned` (offsets [..] by class) and free pages fill the slabs, each once."""
        starts, ends, slabs = [], [], [self.free_slabs]
        for c, (own, free) in enumerate(zip(owned, self.free_pages, strict=True)):
            used, spare, total = len(own), len(free), self.held[c] * self.per_slab[c]
            assert spare == self.num_free[c], f"{spare} free pages, counted {self.num_free[c]}"
            assert used + spare == total, (
                f"pages of {self.units[c] * UNIT} B: used {used} + free {spare} = {used + spare},"
                f" but {self.held[c]} slabs * {self.per_slab[c]} = {total}"
            )
            start: Ints = torch.cat((own, free)).cpu().numpy().astype(np.int64)
            slab, within = np.divmod(start, self.slab_units)
            number, odd = np.divmod(within, self.units[c])
            assert not odd.any() and (number < self.per_slab[c]).all(), f"outside of slabs {slab}"
            starts.append(start)
            ends.append(start + self.units[c])
            slabs.append(np.unique(slab))
        once = np.array_equal(np.sort(np.concatenate(slabs)), np.arange(self.num_slabs))
        assert once, f"slabs that are free, then of every class: {slabs}"
        start, end = np.concatenate(starts), np.concatenate(ends)
        order = start.argsort()
        shared = start[order[1:]] < end[order[:-1]]
        assert not shared.any(), f"pages overlap at units {start[order[1:]][shared]}"


def ceil_div(x: Ints, y: Ints | int) -> Ints:
    return -(-x // y)


def slab_units(num_bytes: int, units: Ints, groups: Ints) -> int:
    """Units of a slab, for classes of `units` [C] a page that `groups` [C] groups use.

    A multiple of the largest page. It loses the ends of its slabs, the end of the arena, and a
    part-filled slab for every class but one. The smallest usual size that loses at most LOST, since
    small slabs come free sooner; in arenas too small for that, the size that loses least.
    """
    arena_units, multiples = num_bytes // UNIT, np.arange(1, MOST + 1)
    sizes = units.max() * multiples
    needed = ceil_div(groups, sizes[:, None] // units).sum(1)  # slabs for a page of every group
    least = int((needed * sizes).min())
    if arena_units < least:
        raise SettingError(
            f"`num_bytes` must be at least {least * UNIT} to hold a page of each of {groups.sum()}"
            f" groups ({int(groups @ units) * UNIT} B, in slabs of one page size each); got"
            f" {num_bytes}: give the pool more memory, or take smaller pages"
        )
    lost = (sizes[:, None] % units).max(1) / sizes
    lost += (arena_units % sizes + (len(units) - 1) * sizes) / arena_units
    lost[arena_units // sizes < needed] = np.inf
    good = (lost <= LOST) & (multiples >= USUAL)
    return int(sizes[good.argmax() if good.any() else lost.argmin()])
