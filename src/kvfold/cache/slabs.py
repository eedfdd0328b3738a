"""Free pages of each byte class, and the slabs from which pages are cut.

Shapes: C byte classes (distinct page sizes), M pages of one call. Offsets count units of UNIT
bytes.
"""

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from kvfold.layout.pages import UNIT, Ints
from kvfold.ops.common.launch import upload
from kvfold.utils.errors import SettingError

LOST = 0.01  # largest share of the arena that a slab size may waste
USUAL, MOST = 16, 128  # smallest (in a large arena) and largest size of a slab, in largest pages


class Slabs:
    """Free pages of each byte class, and the slabs from which pages are cut. Offsets are in units.

    units [C]: units of a page; pages_per_slab [C]; slabs_per_class [C].
    free_pages: int32 offsets on the device, num_free[c] of class c, taken from the end; free_slabs:
    numbers of free slabs, taken from the front.
    """

    def __init__(self, num_bytes: int, units: Ints, groups: Ints, device: torch.device) -> None:
        self.units, self.device = units, device
        self.slab_units = slab_units(num_bytes, units, groups)
        self.pages_per_slab: Ints = self.slab_units // units
        self.num_slabs = num_bytes // UNIT // self.slab_units
        self.slabs_per_class: Ints = np.zeros_like(units)
        self.num_free: Ints = np.zeros_like(units)
        self.free_slabs: Ints = np.arange(self.num_slabs)
        self.free_pages = [torch.empty(0, dtype=torch.int32, device=device) for _ in units]
        self._emptied = False  # pages were freed since empty slabs were last looked for

    def to_take(self, pages: Ints) -> Ints:
        """Slabs [C] that each class must take before it has `pages` [C] free pages."""
        return ceil_div(np.maximum(pages - self.num_free, 0), self.pages_per_slab)

    def can_pop(self, pages: Ints) -> bool:
        """Whether `pages` [C] pages are free, if need be after empty slabs are taken back."""
        if self.to_take(pages).sum() > len(self.free_slabs):
            self.reclaim_empty()
        return bool(self.to_take(pages).sum() <= len(self.free_slabs))

    def pop(self, pages: Ints) -> tuple[Tensor, "Slabs"]:
        """Offsets [M] of `pages` [C] free pages, sorted by class, and the state of the slabs after
        they are taken. Changes nothing."""
        after, popped = self.copy(), []
        *taken, after.free_slabs = np.split(self.free_slabs, np.cumsum(self.to_take(pages)))
        for c in np.flatnonzero(pages):
            after._cut(int(c), taken[c])
            popped.append(after.free_pages[c][-pages[c] :])
            after.free_pages[c] = after.free_pages[c][: -pages[c]]
        after.num_free -= pages
        return torch.cat(popped), after

    def copy(self) -> "Slabs":
        """A copy to change; the pool adopts it once nothing can fail any more."""
        after = copy(self)
        after.slabs_per_class, after.num_free = self.slabs_per_class.copy(), self.num_free.copy()
        after.free_pages = self.free_pages.copy()
        return after

    def _cut(self, c: int, slabs: Ints) -> None:
        """Cut slabs into free pages of class c. They are used last, so that older slabs stay
        full."""
        if len(slabs):
            starts = (
                slabs[:, None] * self.slab_units + np.arange(self.pages_per_slab[c]) * self.units[c]
            )
            pages = upload(starts.ravel().astype(np.int32), self.device)
            self.free_pages[c] = torch.cat((pages, self.free_pages[c]))
            self.slabs_per_class[c] += len(slabs)
            self.num_free[c] += starts.size

    def push(self, offsets: Tensor, pages: Ints) -> "Slabs":
        """The state of the slabs after the pages at `offsets` [M], sorted by class, `pages` [C] per
        class, are freed. Changes nothing."""
        after, parts = self.copy(), offsets.split(pages.tolist())
        for c in np.flatnonzero(pages):
            after.free_pages[c] = torch.cat((after.free_pages[c], parts[c]))
        after.num_free += pages
        after._emptied = True
        return after

    def reclaim_empty(self) -> None:
        """Return slabs whose pages are all free to the free slabs. Nothing else here waits for the
        device.

        The remaining free pages are sorted, so that the fullest slabs are used first and the
        emptiest can drain. Without sorting, a changing load strands a third of the arena.
        """
        for c, free in enumerate(self.free_pages if self._emptied else ()):
            slab = free.long() // self.slab_units
            num_free = torch.bincount(slab, minlength=self.num_slabs)
            is_empty = num_free == int(self.pages_per_slab[c])
            empty_slabs = is_empty.nonzero().flatten().cpu().numpy()
            by_fill = (num_free[slab] * self.num_slabs + slab).argsort(descending=True)
            self.free_pages[c] = free[by_fill[len(empty_slabs) * int(self.pages_per_slab[c]) :]]
            self.slabs_per_class[c] -= len(empty_slabs)
            self.num_free[c] -= len(empty_slabs) * self.pages_per_slab[c]
            self.free_slabs = np.concatenate((empty_slabs, self.free_slabs))
        self._emptied = False

    def check_integrity(self, owned: Sequence[Tensor]) -> None:
        """Assert that the used pages (`owned`, offsets per class) and the free pages fill the slabs
        without overlap."""
        starts, ends, slabs = [], [], [self.free_slabs]
        for c, (taken, free) in enumerate(zip(owned, self.free_pages, strict=True)):
            used, unused = len(taken), len(free)
            total = self.slabs_per_class[c] * self.pages_per_slab[c]
            assert unused == self.num_free[c], f"{unused} free pages, counted {self.num_free[c]}"
            assert used + unused == total, (
                f"pages of {self.units[c] * UNIT} B: used {used} + free {unused} = {used + unused},"
                f" but {self.slabs_per_class[c]} slabs * {self.pages_per_slab[c]} = {total}"
            )
            start: Ints = torch.cat((taken, free)).cpu().numpy().astype(np.int64)
            slab, within = np.divmod(start, self.slab_units)
            number, rest = np.divmod(within, self.units[c])
            assert not rest.any() and (number < self.pages_per_slab[c]).all(), (
                f"outside of slabs {slab}"
            )
            starts.append(start)
            ends.append(start + self.units[c])
            slabs.append(np.unique(slab))
        complete = np.array_equal(np.sort(np.concatenate(slabs)), np.arange(self.num_slabs))
        assert complete, f"slabs that are free, then of every class: {slabs}"
        start, end = np.concatenate(starts), np.concatenate(ends)
        order = start.argsort()
        overlap = start[order[1:]] < end[order[:-1]]
        assert not overlap.any(), f"pages overlap at units {start[order[1:]][overlap]}"


def ceil_div(x: Ints, y: Ints | int) -> Ints:
    return -(-x // y)


def slab_units(num_bytes: int, units: Ints, groups: Ints) -> int:
    """Size of a slab in units, for classes of `units` [C] per page, which `groups` [C] groups use.

    A multiple of the largest page. Wasted are the ends of slabs, the end of the arena, and a partly
    filled slab for all classes but one. The choice is the smallest size from USUAL on that wastes
    at most LOST, since small slabs become empty sooner; in arenas too small for that, the size that
    wastes least.
    """
    arena_units, multiples = num_bytes // UNIT, np.arange(1, MOST + 1)
    sizes = units.max() * multiples
    needed = ceil_div(groups, sizes[:, None] // units).sum(1)  # slabs for one page per group
    least = int((needed * sizes).min())
    if arena_units < least:
        raise SettingError(
            f"`num_bytes` must be at least {least * UNIT} to hold a page of each of {groups.sum()}"
            f" groups ({int(groups @ units) * UNIT} B, in slabs of one page size each); got"
            f" {num_bytes}: give the pool more memory, or take smaller pages"
        )
    waste = (sizes[:, None] % units).max(1) / sizes
    waste += (arena_units % sizes + (len(units) - 1) * sizes) / arena_units
    waste[arena_units // sizes < needed] = np.inf
    acceptable = (waste <= LOST) & (multiples >= USUAL)
    return int(sizes[acceptable.argmax() if acceptable.any() else waste.argmin()])
