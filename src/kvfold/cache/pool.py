"""Allocate the pages of the KV cache: block tables, lengths and free pages of one arena.

Shapes: S sequences of one call, G groups of all layers (a group is a set of KV heads whose tokens
are evicted together), C byte classes (distinct page sizes), M pages of one call. A *token
entry* is what one token stores in one group; a page holds `layout.page` entries. A *page list*
holds the pages of one sequence for one group. K page lists: G, or 2 G if the newest tokens are
stored unquantised (KIVI's residual): a second list per group then holds the one page of those
tokens.

The arena is cut into equal *slabs*. A class without free pages takes slabs and cuts them into its
pages; slabs whose pages are all free are returned, so memory moves between classes as tokens are
evicted:

    [slab of class A: page page page end][slab of class B: page page end][free slab]..[unused]

Tables, lengths and free lists live on the device. How many pages a call moves is computed from a
copy of the lengths in host memory, so that scheduling never waits for the device (KV-Compress
§4.2.1). Every change is prepared before it is committed: a call that fails, for instance for lack
of memory, has changed nothing.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvfold.cache.slabs import Slabs, ceil_div
from kvfold.cache.window import WindowPages
from kvfold.layout.pages import UNIT, CacheLayout, Ints
from kvfold.ops.common.launch import upload
from kvfold.ops.common.pages import LayerPages
from kvfold.utils.errors import SettingError


class PoolFull(RuntimeError):
    """Too few free pages or slots; nothing was changed."""


@dataclass(frozen=True, kw_only=True)
class ClassStats:
    """Counts for one page size: used and free pages fill `slabs` slabs."""

    page_bytes: int
    used_pages: int
    free_pages: int
    slabs: int


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    """Where the bytes of a pool are.

    total_bytes: size of the arena
    used_bytes: of pages that sequences hold
    free_bytes: of free pages and free slabs; the rest, total - used - free, is lost at the ends of
        slabs and of the arena
    high_water_bytes: the most that was ever used
    table_bytes: tables, lengths and free lists, in addition to the arena
    fragmentation: share of the arena in free pages of slabs that a class holds
    entry_occupancy: token entries stored / entries that their pages can hold (1 if there are none)
    sequence_bytes: slot -> bytes of its pages, and of its window
    window_bytes: windows of all slots, in addition to the arena
    """

    total_bytes: int
    used_bytes: int
    free_bytes: int
    high_water_bytes: int
    table_bytes: int
    fragmentation: float
    entry_occupancy: float
    classes: tuple[ClassStats, ...]
    sequence_bytes: dict[int, int]
    window_bytes: int


@dataclass(frozen=True, kw_only=True)
class _PageRange:
    """A range of pages of each page list of `slots` [S]: `count` pages from page number `first` on,
    both [S, K]."""

    slots: Ints
    first: Ints
    count: Ints
    pages: Ints  # number of pages per class [C]


class Pool:
    """Pages for `num_slots` sequences of at most `max_tokens` tokens in an arena of `num_bytes`.

    num_bytes: rounded down to a multiple of 64.
    arena: uint8 [num_bytes, and a scratch page if `padding_slot`], never initialised.
    block_tables: int32 [num_slots, G, max_pages], page offsets in units of 64 B; with a
        residual there is one more column, for the residual block. Entries after a group's last page
        are stale: valid offsets, possibly of another sequence's pages.
    sliding_windows: window of each layer in tokens (None: full attention); pages outside it are
        freed.
    coarse: the pool of coarser entries (of lower rank, or of fewer bits), with the same slots in
        the same arena; None if the layout has none.
    window: the last tokens of every slot as the model computed them, in memory beside the arena;
        None if the layout has no window.
    lengths: int32 [num_slots, G], token entries.
    host_lengths: a copy of lengths in host memory, int64; read only.
    padding_slot: an extra slot for the dummy sequences that pad a CUDA-graph batch. It has one
        entry, in a scratch page after the first num_bytes, which all groups share. None: there is
        no such slot.

    Raises ValueError if the arena cannot hold one page per group, or has more bytes than int32
    offsets can address.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_bytes: int,
        *,
        num_slots: int,
        max_tokens: int,
        sliding_windows: Sequence[int | None] | None = None,
        padding_slot: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        _check(num_bytes, num_slots, max_tokens)
        self.layout, self.num_slots, self.max_tokens = layout, num_slots, max_tokens
        self.max_pages, self.device = -(-max_tokens // layout.page), torch.device(device)
        self.padding_slot = num_slots if padding_slot else None
        shape = (
            num_slots + padding_slot,
            len(layout.groups),
            self.max_pages + bool(layout.residual),
        )
        layouts = [group.layout for group in layout.groups]
        layouts += [tail for x in layouts if (tail := x.residual_block) is not None]
        starts = np.arange(shape[1]) * shape[2]
        self._starts: Ints = np.append(starts, starts + self.max_pages)[: len(layouts)]
        coarse_groups = () if layout.coarse is None else layout.coarse.groups
        sizes = [x.page_units for x in (*layouts, *(group.layout for group in coarse_groups))]
        units, classes, users = np.unique(sizes, return_inverse=True, return_counts=True)
        self._class_of = classes[: len(layouts)]
        self._by_class = np.argsort(self._class_of, kind="stable")  # page lists, sorted by class
        self._slabs = Slabs(num_bytes, units, users, self.device)
        self._capacity: dict[int | None, int] = {}  # by length of a prefill chunk
        layer_limits = [
            max_tokens if x is None else x + layout.page - 2 for x in sliding_windows or ()
        ]
        limits = [
            layer_limits[group.layer] if layer_limits else max_tokens for group in layout.groups
        ]
        # Most entries of each group after a step: the window of the next query, plus less than
        # one page of entries that have left the window.
        self._max_entries: Ints = np.array(limits)
        self.num_bytes = num_bytes // UNIT * UNIT
        size = self.num_bytes + padding_slot * int(units.max()) * UNIT
        self.arena = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.block_tables = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.lengths = torch.zeros(shape[:2], dtype=torch.int32, device=self.device)
        self.block_tables[num_slots:], self.lengths[num_slots:] = num_bytes // UNIT, 1
        self.host_lengths: Ints = np.zeros((num_slots, shape[1]), dtype=np.int64)
        self._is_open = np.zeros(num_slots, dtype=bool)
        self._high_water = 0
        self.coarse: CoarsePool | None = None
        if layout.coarse is not None:
            self.coarse = CoarsePool(self, layout.coarse, classes[len(layouts) :])
        self.window: WindowPages | None = None
        if layout.exact is not None:
            self.window = WindowPages(layout.exact, layout.window, len(self.lengths), self.device)

    def pages(self, where: slice) -> LayerPages:
        """The pages of the groups `where`, in the form that ops take: views, which follow later
        changes."""
        groups = self.layout.groups[where]
        return LayerPages(self.arena, self.block_tables[:, where], self.lengths[:, where], groups)

    def capacity(self, chunk: int | None = None) -> int:
        """Most tokens that one sequence can have in an empty pool. With `chunk`, the prompt is
        prefilled in chunks of that many tokens, and pages that leave a sliding window are freed
        between chunks."""

        def slabs(tokens: int) -> int:
            pages = self.pages_needed(
                np.zeros((1, len(self.layout.groups)), np.int64), [tokens], chunk
            )
            return int(ceil_div(pages, self._slabs.pages_per_slab).sum())

        if chunk not in self._capacity:
            most_tokens = bisect_right(
                range(1, self.max_tokens + 1), self._slabs.num_slabs, key=slabs
            )
            self._capacity[chunk] = most_tokens
        return self._capacity[chunk]

    def fits(self, tokens: int, chunk: int | None = None) -> bool:
        """Whether a sequence of `tokens` tokens fits into an empty pool."""
        return tokens <= self.capacity(chunk)

    def pages_needed(self, lengths: Ints, tokens: Sequence[int], chunk: int | None = None) -> Ints:
        """Pages [C] that sequences of `lengths` [S, G] entries need for tokens[i] more tokens: all
        at once, or in prefill chunks of `chunk` tokens, after each of which pages outside a sliding
        window are freed."""
        after = lengths + np.array(tokens, dtype=np.int64)[:, None]
        if chunk is not None:
            after = np.minimum(after, np.maximum(self._max_entries + chunk, lengths))
        return self._span(np.arange(len(lengths)), lengths, after).pages

    def make_room(self, pages: Ints) -> bool:
        """Have `pages` [C] pages free: a pool that shares pages drops cached ones for that. Returns
        whether it succeeded. May wait for the device, as `make_room_to_extend`."""
        return self._ensure_free(pages)

    def _ensure_free(self, pages: Ints) -> bool:
        """Whether `pages` [C] pages are free, if need be after empty slabs are reclaimed."""
        return self._slabs.can_pop(pages)

    def allocate_slot(self) -> int:
        """Allocate the slot of a new, empty sequence. Raises PoolFull if all slots are open."""
        closed = np.flatnonzero(~self._is_open)
        if not len(closed):
            raise PoolFull(f"all {self.num_slots} slots are open")
        self._is_open[closed[0]] = True
        if self.window is not None:
            self.window.first[closed[0]] = 0
        return int(closed[0])

    def make_room_to_copy(self, slot: int) -> bool:
        """Have the pages free that `make_private` needs. Returns whether it succeeded."""
        return True

    def make_private(self, slot: int) -> None:
        """Make all pages of a sequence private before they are changed (copy-on-write). Does
        nothing here, as this pool shares no pages."""

    def demotable(self, slot: int) -> tuple[int, int]:
        """(number of a sequence's first page that can be demoted, number of whole pages in every
        group from there on). Shared pages stay as they are."""
        first = self._num_kept(slot)
        return first, max(int(self.host_lengths[slot].min()) // self.layout.page - first, 0)

    def _num_kept(self, slot: int) -> int:
        """Number of leading pages that other sequences read too."""
        return 0

    def demote(self, slot: int, first: int, count: int) -> None:
        """Move the entries of `count` pages of the coarse pool's size, from page number `first` of
        each group on, to the coarse pool. The first `count` pages of that range become the coarse
        ones, and the others are free: no page is allocated.

        The caller has read the entries before, and writes them to the coarse pages afterwards. In
        this pool the later entries of the sequence move up. Nothing is changed if it raises.
        """
        coarse, index = self.coarse, self._opened([slot])
        assert coarse is not None and not self.layout.residual, "there is no coarse pool"
        num_fine = coarse.layout.page // self.layout.page * count
        assert count > 0 and num_fine <= self.demotable(slot)[1], f"{num_fine} pages from {first}"
        start = np.full((1, self.host_lengths.shape[1]), first, dtype=np.int64)
        moved = self._between(index, start, start + count)
        freed = self._between(index, start + count, start + num_fine)
        num_coarse = coarse._num_pages(coarse.host_lengths[index])
        target = coarse._between(index, num_coarse, num_coarse + count)
        assert (moved.pages == target.pages).all(), "coarse pages have the size of fine ones"
        tables = self.block_tables.view(-1)
        offsets = tables[self._cells(moved)]
        slabs = self._slabs.push(tables[self._cells(freed)], freed.pages)
        later = self.block_tables[slot, :, first + num_fine :].clone()
        coarse.block_tables.view(-1)[coarse._cells(target)] = offsets
        self.block_tables[slot, :, first : first + later.shape[1]] = later
        tokens = count * coarse.layout.page
        coarse._commit(index, coarse.host_lengths[index] + tokens, slabs)
        self._commit(index, self.host_lengths[index] - tokens, slabs)

    @property
    def open_slots(self) -> list[int]:
        return [int(slot) for slot in np.flatnonzero(self._is_open)]

    def free_slot(self, slot: int) -> None:
        """Free the pages of a sequence and its slot."""
        self._empty(slot)
        self._is_open[slot] = False

    def _empty(self, slot: int) -> None:
        """Free all pages of a sequence."""
        self.truncate(slot, np.zeros_like(self.host_lengths[slot]))
        if self.coarse is not None:
            self.coarse.truncate(slot, np.zeros_like(self.coarse.host_lengths[slot]))

    def make_room_to_extend(self, slots: Sequence[int], tokens: Sequence[int]) -> bool:
        """Have the pages free that `extend` needs. Returns whether `extend` would succeed.

        Waits for the device only if pages seem to be missing and some were freed since the last
        wait, to learn which slabs are empty by now.
        """
        return self._shortage(*self._growth(slots, tokens)) is None

    def extend(self, slots: Sequence[int], tokens: Sequence[int] | Ints) -> None:
        """Allocate pages for tokens[i] more entries in every group of slots[i], or tokens[i, g] in
        group g, and update tables and lengths.

        The entries are uninitialised. All or nothing: raises PoolFull, with nothing changed, if
        pages are missing or a sequence would outgrow `max_tokens`. May wait for the device, as
        `make_room_to_extend`.
        """
        span, lengths = self._growth(slots, tokens)
        if reason := self._shortage(span, lengths):
            raise PoolFull(reason)
        slabs = self._slabs
        if span.pages.any():
            pages, slabs = slabs.pop(span.pages)
            self.block_tables.view(-1)[self._cells(span)] = (
                pages  # not visible until `_commit` sets lengths
            )
        self._commit(span.slots, lengths, slabs)
        self._high_water = max(self._high_water, self.used_bytes)

    def truncate(self, slots: int | Sequence[int], lengths: Sequence[int] | Ints | Tensor) -> None:
        """Truncate group g of slots[i] to its first lengths[i, g] entries; free the whole pages
        after them.

        lengths [S, G], or [G] for one slot: at most the present ones, in host memory (a device
        tensor is waited for). With a residual, a length is 0 or leaves all quantised entries in
        place: they cannot return to the residual block.
        """
        index = self._opened(np.atleast_1d(slots))
        before = self.host_lengths[index]
        after: Ints = np.atleast_2d(torch.as_tensor(lengths, dtype=torch.int64, device="cpu"))
        assert after.shape == before.shape, f"{after.shape} lengths for {before.shape} groups"
        assert (after >= 0).all() and (after <= before).all(), f"from {before} to {after} entries"
        lost = (after > 0) & (self.layout.num_quantized(after) < self.layout.num_quantized(before))
        packed = self.layout.residual and bool(lost.any())
        assert not packed, (
            f"from {before} to {after} entries: some of the residual block were quantised since"
        )
        span = self._freed(index, after, before)
        slabs = self._slabs
        if span.pages.any():
            slabs = slabs.push(self.block_tables.view(-1)[self._cells(span)], span.pages)
        self._commit(index, after, slabs)

    def _freed(self, slots: Ints, after: Ints, before: Ints) -> _PageRange:
        """The pages that become free when sequences shrink from `before` to `after` [S, G]
        entries."""
        return self._span(slots, after, before)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that sequences hold."""
        return int(self._num_taken @ self._slabs.units) * UNIT

    @property
    def window_bytes(self) -> int:
        """Bytes of the windows of all slots, beside the arena."""
        return 0 if self.window is None else self.window.num_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of pages and windows, as the setting `kv_bytes` counts them."""
        return self.num_bytes + self.window_bytes

    def kv_bytes_for(self, tokens: int) -> int:
        """The `kv_bytes` that hold one sequence of `tokens` tokens beside the windows of all
        slots."""
        return self.layout.page_bytes_for(1, tokens) + self.window_bytes

    @property
    def _num_taken(self) -> Ints:
        """Pages [C] that are not free."""
        slabs = self._slabs
        taken: Ints = slabs.slabs_per_class * slabs.pages_per_slab - slabs.num_free
        return taken

    @property
    def free_bytes(self) -> int:
        """Bytes of free pages (usable by their class only) and of free slabs (usable by any
        class)."""
        slabs = self._slabs
        return int(slabs.num_free @ slabs.units + len(slabs.free_slabs) * slabs.slab_units) * UNIT

    def reset_high_water(self) -> None:
        """Forget earlier peaks: measure the most bytes used from now on."""
        self._high_water = self.used_bytes

    def stats(self) -> PoolStats:
        """Where the bytes are. Waits for the device if pages were freed since the last wait."""
        slabs = self._slabs
        slabs.reclaim_empty()
        page_bytes, free = slabs.units * UNIT, slabs.num_free
        num_pages = self._num_pages(self.host_lengths)
        stored, slot_bytes = int(self.host_lengths.sum()), num_pages @ page_bytes[self._class_of]
        room = int(num_pages.sum()) * self.layout.page
        if self.coarse is not None:
            coarse_pages = self.coarse._num_pages(self.coarse.host_lengths)
            slot_bytes = slot_bytes + coarse_pages @ page_bytes[self.coarse._class_of]
            stored += int(self.coarse.host_lengths.sum())
            room += int(coarse_pages.sum()) * self.coarse.layout.page
        columns = np.stack(
            (
                page_bytes,
                slabs.slabs_per_class * slabs.pages_per_slab - free,
                free,
                slabs.slabs_per_class,
            )
        )
        names = ("page_bytes", "used_pages", "free_pages", "slabs")
        tables = [self.block_tables, self.lengths, *slabs.free_pages]
        if self.coarse is not None:
            tables += [self.coarse.block_tables, self.coarse.lengths]
        return PoolStats(
            total_bytes=self.num_bytes,
            used_bytes=self.used_bytes,
            free_bytes=self.free_bytes,
            high_water_bytes=self._high_water,
            table_bytes=sum(table.untyped_storage().nbytes() for table in tables),
            fragmentation=int(free @ page_bytes) / self.num_bytes,
            entry_occupancy=stored / room if room else 1.0,
            classes=tuple(
                ClassStats(**dict(zip(names, column, strict=True))) for column in columns.T.tolist()
            ),
            sequence_bytes={
                int(slot): int(slot_bytes[slot]) + self.layout.window_bytes
                for slot in np.flatnonzero(self._is_open)
            },
            window_bytes=self.window_bytes,
        )

    def check_integrity(self) -> None:
        """Assert that each page has one owner and that all counts add up. Copies tables to the
        host: for tests."""
        self._check_lengths()
        taken = self._taken()
        if self.coarse is not None:
            self.coarse._check_lengths()
            taken = [torch.cat(parts) for parts in zip(taken, self.coarse._taken(), strict=True)]
        self._slabs.check_integrity(taken)
        assert self.used_bytes <= self._high_water, f"{self.used_bytes} used > {self._high_water}"

    def _check_lengths(self) -> None:
        lengths = self.lengths[: self.num_slots].cpu().numpy()
        assert (lengths == self.host_lengths).all(), "lengths differ from mirror"
        low, high = self.host_lengths.min(), self.host_lengths.max()
        assert low >= 0 and high <= self.max_tokens, f"lengths {low}..{high}"
        assert not self.host_lengths[~self._is_open].any(), "a closed slot has entries"

    def _taken(self) -> list[Tensor]:
        """Offsets of the pages that are not free, one tensor per class."""
        zero = np.zeros_like(self.host_lengths)
        return self._offsets(self._freed(np.arange(self.num_slots), zero, self.host_lengths))

    def _offsets(self, span: _PageRange) -> list[Tensor]:
        """Offsets of the pages of a range, as the block tables have them, one tensor per class."""
        if not span.pages.any():
            return list(self.block_tables.new_empty(0).split([0] * len(span.pages)))
        return list(self.block_tables.view(-1)[self._cells(span)].split(span.pages.tolist()))

    def _num_pages(self, lengths: Ints) -> Ints:
        """Pages of each page list [S, K] for `lengths` [S, G] entries."""
        pages = ceil_div(self.layout.num_quantized(lengths), self.layout.page)
        return np.hstack((pages, lengths > 0)) if self.layout.residual else pages

    def _span(self, slots: Ints, low: Ints, high: Ints) -> _PageRange:
        """The pages that hold entries `low` to `high`, both [S, G]."""
        return self._between(slots, self._num_pages(low), self._num_pages(high))

    def _between(self, slots: Ints, first: Ints, stop: Ints) -> _PageRange:
        """Pages number `first` to `stop`, both [S, K], of each page list."""
        count = np.maximum(stop - first, 0)
        return _PageRange(slots=slots, first=first, count=count, pages=self._by_size(count.sum(0)))

    def _by_size(self, pages: Ints) -> Ints:
        """Number of pages per class [C], from the number per page list [K]."""
        size = len(self._slabs.units)
        return np.bincount(self._class_of, weights=pages, minlength=size).astype(np.int64)

    def _opened(self, slots: Sequence[int] | Ints) -> Ints:
        index: Ints = np.array(slots, dtype=np.int64)
        assert (index >= 0).all() and self._is_open[index].all(), f"not all open: slots {slots}"
        assert len(np.unique(index)) == len(index), f"not different: slots {slots}"
        return index

    def _growth(
        self, slots: Sequence[int], tokens: Sequence[int] | Ints
    ) -> tuple[_PageRange, Ints]:
        """The pages to add for `tokens` more entries, and the lengths [S, G] after that."""
        index, more = self._opened(slots), np.array(tokens, dtype=np.int64)
        assert len(index) == len(more) and (more >= 0).all(), f"slots {slots}, tokens {tokens}"
        after = self.host_lengths[index] + (more if more.ndim > 1 else more[:, None])
        return self._span(index, self.host_lengths[index], after), after

    def _shortage(self, span: _PageRange, lengths: Ints) -> str | None:
        """Why sequences cannot grow to `lengths` [S, G] entries, which takes the pages `span`; None
        if they can."""
        longest = lengths.max(initial=0)
        if longest > self.max_tokens:
            return f"a sequence of {longest} entries is longer than max_tokens={self.max_tokens}"
        if self._ensure_free(span.pages):
            return None
        slabs = self._slabs
        columns = (slabs.to_take(span.pages), span.pages, slabs.units * UNIT, slabs.num_free)
        needed = zip(*columns, strict=True)
        return f"{len(slabs.free_slabs)} free slabs of {slabs.slab_units * UNIT} B; needed: " + (
            "; ".join("{} for {} pages of {} B ({} free)".format(*x) for x in needed)
        )

    def _cells(self, span: _PageRange) -> Tensor:
        """Indices of the pages of `span` in the flat block tables: int64 [M], sorted by class."""
        order, total = self._by_class, int(span.pages.sum())
        column, row = span.count[:, order].T.nonzero()
        lists = order[column]
        count = span.count[row, lists]
        begin = (
            span.slots[row] * self.block_tables[0].numel()
            + self._starts[lists]
            + span.first[row, lists]
        )
        begin -= np.cumsum(count) - count  # adding 0 .. M-1 then counts from each list's first page
        begin_and_count = upload(np.stack((begin, count)), self.device)
        starts = torch.repeat_interleave(begin_and_count[0], begin_and_count[1], output_size=total)
        return starts + torch.arange(total, device=self.device)

    def _commit(self, slots: Ints, lengths: Ints, slabs: Slabs) -> None:
        """Adopt a prepared change. What may fail (uploads) comes before what is counted."""
        index = upload(slots, self.device)
        self.lengths[index] = upload(lengths.astype(np.int32), self.device)
        self.host_lengths[slots], self._slabs = lengths, slabs


class CoarsePool(Pool):
    """Entries of the sequences of another pool, `owner`, that store less: of lower rank, or in
    fewer bits. It shares the owner's slots, arena and slabs, so both have one budget of bytes.

    Low-rank entries grow group by group, by `extend`; entries in fewer bits by the owner's
    `demote`. They are freed when the owner closes a slot."""

    def __init__(self, owner: Pool, layout: CacheLayout, class_of: Ints) -> None:
        self.owner, self.layout, self.coarse = owner, layout, None
        for name in ("num_slots", "max_tokens", "device", "num_bytes", "arena"):
            setattr(self, name, getattr(owner, name))
        self.max_pages = -(-owner.max_tokens // layout.page)
        self.padding_slot, self._is_open = owner.padding_slot, owner._is_open
        shape = (len(owner.block_tables), len(layout.groups), self.max_pages)
        self._starts, self._class_of = np.arange(shape[1]) * shape[2], class_of
        self._by_class = np.argsort(class_of, kind="stable")
        self.block_tables = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.lengths = torch.zeros(shape[:2], dtype=torch.int32, device=self.device)
        self.host_lengths = np.zeros((self.num_slots, shape[1]), dtype=np.int64)

    @property
    def _slabs(self) -> Slabs:
        return self.owner._slabs

    @_slabs.setter
    def _slabs(self, slabs: Slabs) -> None:
        self.owner._slabs = slabs

    @property
    def _high_water(self) -> int:
        return self.owner._high_water

    @_high_water.setter
    def _high_water(self, used: int) -> None:
        self.owner._high_water = used

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that sequences hold in both pools, as the owner counts them."""
        return self.owner.used_bytes

    def _ensure_free(self, pages: Ints) -> bool:
        return self.owner._ensure_free(pages)


def _check(num_bytes: int, num_slots: int, max_tokens: int) -> None:
    for name, value in (("num_slots", num_slots), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if num_bytes > 2**31 * UNIT:
        raise SettingError(
            f"`num_bytes` must be at most {2**31 * UNIT}, since tables hold int32 offsets in units"
            f" of {UNIT} B; got {num_bytes}"
        )
