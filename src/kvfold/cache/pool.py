"""Who owns which bytes of the cache: pages, tables, lengths and free lists of one arena.

Shapes: S sequences of one call, G groups of all layers, C byte classes (distinct page sizes), M
pages of one call. A *row* is one token's numbers of one group; a page holds `layout.page` rows.
A *run* is a list of pages of one class: K = G runs, the groups', or with a residual K = 2 G: the
groups' pages, then their tails (one each, from the first row on).

The arena is cut into equal *slabs*. A class without free pages takes slabs and cuts them into its
pages; slabs whose pages are all free are taken back, so classes trade memory as eviction goes on:

    [slab of class A: page page page end][slab of class B: page page end][free slab]..[tail]

Tables, lengths and free lists live on the device; how many pages a call moves is computed on the
host from a mirror of the lengths, so that scheduling never waits (KV-Compress §4.2.1). A change is
made ready, then made: a call that fails, be it for lack of memory, has changed nothing.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvfold.cache.slabs import Slabs, ceil_div
from kvfold.errors import SettingError
from kvfold.ops.common.launch import upload
from kvfold.ops.common.pages import LayerPages
from kvfold.spec.layout import UNIT, CacheLayout, Ints


class PoolFull(RuntimeError):
    """Pages or slots are missing; nothing was changed."""


@dataclass(frozen=True, kw_only=True)
class ClassStats:
    """Pages of one size: used and free ones fill `slabs` slabs."""

    page_bytes: int
    used_pages: int
    free_pages: int
    slabs: int


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    """total: num_bytes; used: pages that sequences own; free: free pages and free slabs; the rest,
    total - used - free, is lost at the ends of slabs and of the arena. high_water: most ever used.
    table_bytes: tables, lengths and free lists, beside the arena. fragmentation: share of the arena
    in free pages of slabs that a class holds. row_occupancy: rows stored / rows of the pages that
    hold them (1 if none). sequence_bytes: slot -> bytes of its pages.
    """

    total_bytes: int
    used_bytes: int
    free_bytes: int
    high_water_bytes: int
    table_bytes: int
    fragmentation: float
    row_occupancy: float
    classes: tuple[ClassStats, ...]
    sequence_bytes: dict[int, int]


@dataclass(frozen=True, kw_only=True)
class _Span:
    """Of every run of `slots` [S]: `count` pages from page number `first` on, each [S, K]."""

    slots: Ints
    first: Ints
    count: Ints
    pages: Ints  # of every class [C]


class Pool:
    """Pages for `num_slots` sequences of at most `max_tokens` tokens in an arena of `num_bytes`.

    num_bytes: rounded down to 64. arena: uint8 [num_bytes, and a spare page], never initialised.
    tables: int32 [num_slots, G, max_pages], offsets of pages in units of 64 B, with a residual a
        column more: the tails. Entries beyond a group's pages are stale: offsets inside the arena,
        of bytes that may be another's.
    windows: of every layer, how many last rows its attention sees, if not all: the rest is freed.
    narrow: rows of unimportant tokens, of the same slots in the same arena; None: there are none.
    lengths: int32 [num_slots, G], rows. host_lengths: its int64 mirror on the host; only read it.
    spare: a slot more on the device, of one row that is nobody's, and behind num_bytes a page for
        it that all groups share: for what fills a batch up to a larger one. Or None.
    Raises ValueError if the arena cannot hold one page of every group, or int32 not its offsets.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_bytes: int,
        *,
        num_slots: int,
        max_tokens: int,
        windows: Sequence[int | None] | None = None,
        spare: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        _check(num_bytes, num_slots, max_tokens)
        self.layout, self.num_slots, self.max_tokens = layout, num_slots, max_tokens
        self.max_pages, self.device = -(-max_tokens // layout.page), torch.device(device)
        self.spare = num_slots if spare else None
        shape = (num_slots + spare, len(layout.groups), self.max_pages + bool(layout.residual))
        layouts = [group.layout for group in layout.groups]
        layouts += [tail for x in layouts if (tail := x.tail) is not None]
        starts = np.arange(shape[1]) * shape[2]
        self._starts: Ints = np.append(starts, starts + self.max_pages)[: len(layouts)]
        others = () if layout.narrow is None else layout.narrow.groups
        sizes = [x.page_units for x in (*layouts, *(group.layout for group in others))]
        units, classes, runs = np.unique(sizes, return_inverse=True, return_counts=True)
        self._class_of = classes[: len(layouts)]
        self._by_class = np.argsort(self._class_of, kind="stable")  # runs, class after class
        self._slabs = Slabs(num_bytes, units, runs, self.device)
        self._capacity: dict[int | None, int] = {}  # by chunk
        most = [max_tokens if x is None else x + layout.page - 2 for x in windows or ()]
        each = [most[group.layer] if most else max_tokens for group in layout.groups]
        # Rows of every group after a step: what the next query sees of a window, and of those
        # behind it less than a page.
        self._kept: Ints = np.array(each)
        self.num_bytes = num_bytes // UNIT * UNIT
        size = self.num_bytes + spare * int(units.max()) * UNIT
        self.arena = torch.empty(size, dtype=torch.uint8, device=self.device)
        self.tables = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.lengths = torch.zeros(shape[:2], dtype=torch.int32, device=self.device)
        self.tables[num_slots:], self.lengths[num_slots:] = num_bytes // UNIT, 1
        self.host_lengths: Ints = np.zeros((num_slots, shape[1]), dtype=np.int64)
        self._is_open = np.zeros(num_slots, dtype=bool)
        self._high_water = 0
        self.narrow: NarrowPool | None = None
        if layout.narrow is not None:
            self.narrow = NarrowPool(self, layout.narrow, classes[len(layouts) :])

    def pages(self, where: slice) -> LayerPages:
        """The groups `where` as ops take them: views, in which what the pool changes is seen."""
        groups = self.layout.groups[where]
        return LayerPages(self.arena, self.tables[:, where], self.lengths[:, where], groups)

    def capacity(self, chunk: int | None = None) -> int:
        """Most tokens of one sequence in an empty pool; read in chunks, where windows free pages on
        the way."""

        def slabs(tokens: int) -> int:
            pages = self.demand(np.zeros((1, len(self.layout.groups)), np.int64), [tokens], chunk)
            return int(ceil_div(pages, self._slabs.per_slab).sum())

        if chunk not in self._capacity:
            found = bisect_right(range(1, self.max_tokens + 1), self._slabs.num_slabs, key=slabs)
            self._capacity[chunk] = found
        return self._capacity[chunk]

    def fits(self, tokens: int, chunk: int | None = None) -> bool:
        """Whether a sequence of `tokens` tokens fits into an empty pool."""
        return tokens <= self.capacity(chunk)

    def demand(self, lengths: Ints, tokens: Sequence[int], chunk: int | None = None) -> Ints:
        """Pages [C] that sequences of `lengths` [S, G] need to go on by tokens[i] tokens: at once,
        or in chunks of which each frees what is behind a window."""
        after = lengths + np.array(tokens, dtype=np.int64)[:, None]
        if chunk is not None:
            after = np.minimum(after, np.maximum(self._kept + chunk, lengths))
        return self._span(np.arange(len(lengths)), lengths, after).pages

    def can_supply(self, pages: Ints) -> bool:
        """Whether so many pages [C] are free. Waits as `can_extend` does."""
        return self._can_pop(pages)

    def _can_pop(self, pages: Ints) -> bool:
        return self._slabs.can_pop(pages)

    def open(self) -> int:
        """A slot for a new sequence without rows. Raises PoolFull if all slots are open."""
        closed = np.flatnonzero(~self._is_open)
        if not len(closed):
            raise PoolFull(f"all {self.num_slots} slots are open")
        self._is_open[closed[0]] = True
        return int(closed[0])

    def can_own(self, slot: int) -> bool:
        """Whether `own` would succeed."""
        return True

    def own(self, slot: int) -> None:
        """Make all pages of a sequence its own, before they are changed: here they are."""

    @property
    def open_slots(self) -> list[int]:
        return [int(slot) for slot in np.flatnonzero(self._is_open)]

    def close(self, slot: int) -> None:
        """Free the pages of a sequence and its slot."""
        self._empty(slot)
        self._is_open[slot] = False

    def _empty(self, slot: int) -> None:
        """Free the pages of a sequence, or what it has of them."""
        self.shrink(slot, np.zeros_like(self.host_lengths[slot]))
        if self.narrow is not None:
            self.narrow.shrink(slot, np.zeros_like(self.narrow.host_lengths[slot]))

    def can_extend(self, slots: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether `extend` would succeed. Waits for the device only where pages seem to be missing
        and some were freed since it last did, to see which slabs that emptied."""
        return self._shortage(*self._growth(slots, tokens)) is None

    def extend(self, slots: Sequence[int], tokens: Sequence[int] | Ints) -> None:
        """Room for tokens[i] more rows in every group of slots[i], or tokens[i, g] in group g:
        pages, tables, lengths.

        The rows are uninitialised. All or nothing: raises PoolFull, with nothing changed, if pages
        are missing or a sequence would outgrow `max_tokens`. Waits as `can_extend` does.
        """
        span, lengths = self._growth(slots, tokens)
        if reason := self._shortage(span, lengths):
            raise PoolFull(reason)
        slabs = self._slabs
        if span.pages.any():
            pages, slabs = slabs.pop(span.pages)
            self.tables.view(-1)[self._cells(span)] = pages  # stale until the lengths say so
        self._commit(span.slots, lengths, slabs)
        self._high_water = max(self._high_water, self.used_bytes)

    def shrink(self, slots: int | Sequence[int], lengths: Sequence[int] | Ints | Tensor) -> None:
        """Keep the first lengths[i, g] rows of group g of slots[i]; free the whole pages beyond.

        lengths [S, G], or [G] of one slot, never more than now, in host memory (a device tensor is
        waited for). With a residual none, or more than the pages have: tails forget what is packed.
        """
        index = self._opened(np.atleast_1d(slots))
        before = self.host_lengths[index]
        after: Ints = np.atleast_2d(torch.as_tensor(lengths, dtype=torch.int64, device="cpu"))
        assert after.shape == before.shape, f"{after.shape} lengths for {before.shape} groups"
        assert (after >= 0).all() and (after <= before).all(), f"from {before} to {after} rows"
        lost = (after > 0) & (self.layout.packed(after) < self.layout.packed(before))
        packed = self.layout.residual and bool(lost.any())
        assert not packed, f"from {before} to {after} rows: tails have moved on"
        span = self._freed(index, after, before)
        slabs = self._slabs
        if span.pages.any():
            slabs = slabs.push(self.tables.view(-1)[self._cells(span)], span.pages)
        self._commit(index, after, slabs)

    def _freed(self, slots: Ints, after: Ints, before: Ints) -> _Span:
        """Pages that come free where sequences go from `before` to `after` rows [S, G]."""
        return self._span(slots, after, before)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that sequences own."""
        return int(self._num_taken @ self._slabs.units) * UNIT

    @property
    def _num_taken(self) -> Ints:
        """Pages [C] that are not free."""
        slabs = self._slabs
        taken: Ints = slabs.held * slabs.per_slab - slabs.num_free
        return taken

    @property
    def free_bytes(self) -> int:
        """Bytes of free pages (for their class only) and of free slabs (for any class)."""
        slabs = self._slabs
        return int(slabs.num_free @ slabs.units + len(slabs.free_slabs) * slabs.slab_units) * UNIT

    def reset_high_water(self) -> None:
        """Measure the high water from now on."""
        self._high_water = self.used_bytes

    def stats(self) -> PoolStats:
        """Where the bytes are. Waits for the device if pages were freed since it last did."""
        slabs = self._slabs
        slabs.take_back()
        page_bytes, free = slabs.units * UNIT, slabs.num_free
        owned = self._num_pages(self.host_lengths)
        stored, held = int(self.host_lengths.sum()), owned @ page_bytes[self._class_of]
        rows = int(owned.sum()) * self.layout.page
        if self.narrow is not None:
            less = self.narrow._num_pages(self.narrow.host_lengths)
            held = held + less @ page_bytes[self.narrow._class_of]
            stored += int(self.narrow.host_lengths.sum())
            rows += int(less.sum()) * self.layout.page
        columns = np.stack((page_bytes, slabs.held * slabs.per_slab - free, free, slabs.held))
        names = ("page_bytes", "used_pages", "free_pages", "slabs")
        tables = [self.tables, self.lengths, *slabs.free_pages]
        if self.narrow is not None:
            tables += [self.narrow.tables, self.narrow.lengths]
        return PoolStats(
            total_bytes=self.num_bytes,
            used_bytes=self.used_bytes,
            free_bytes=self.free_bytes,
            high_water_bytes=self._high_water,
            table_bytes=sum(table.untyped_storage().nbytes() for table in tables),
            fragmentation=int(free @ page_bytes) / self.num_bytes,
            row_occupancy=stored / rows if rows else 1.0,
            classes=tuple(
                ClassStats(**dict(zip(names, column, strict=True))) for column in columns.T.tolist()
            ),
            sequence_bytes={int(slot): int(held[slot]) for slot in np.flatnonzero(self._is_open)},
        )

    def check_integrity(self) -> None:
        """Assert that each page has one owner and all counts add up. Copies tables: for tests."""
        self._check_lengths()
        taken = self._taken()
        if self.narrow is not None:
            self.narrow._check_lengths()
            taken = [torch.cat(x) for x in zip(taken, self.narrow._taken(), strict=True)]
        self._slabs.check_integrity(taken)
        assert self.used_bytes <= self._high_water, f"{self.used_bytes} used > {self._high_water}"

    def _check_lengths(self) -> None:
        lengths = self.lengths[: self.num_slots].cpu().numpy()
        assert (lengths == self.host_lengths).all(), "lengths differ from mirror"
        low, high = self.host_lengths.min(), self.host_lengths.max()
        assert low >= 0 and high <= self.max_tokens, f"lengths {low}..{high}"
        assert not self.host_lengths[~self._is_open].any(), "a closed slot has rows"

    def _taken(self) -> list[Tensor]:
        """Offsets of the pages that are not free, by class."""
        none = np.zeros_like(self.host_lengths)
        return self._offsets(self._freed(np.arange(self.num_slots), none, self.host_lengths))

    def _offsets(self, span: _Span) -> list[Tensor]:
        """Of pages, as tables have them, by class."""
        if not span.pages.any():
            return list(self.tables.new_empty(0).split([0] * len(span.pages)))
        return list(self.tables.view(-1)[self._cells(span)].split(span.pages.tolist()))

    def _num_pages(self, lengths: Ints) -> Ints:
        """Pages of every run [S, K] for `lengths` [S, G] rows."""
        pages = ceil_div(self.layout.packed(lengths), self.layout.page)
        return np.hstack((pages, lengths > 0)) if self.layout.residual else pages

    def _span(self, slots: Ints, low: Ints, high: Ints) -> _Span:
        """Pages that lie between `low` and `high` rows, each [S, G]."""
        return self._between(slots, self._num_pages(low), self._num_pages(high))

    def _between(self, slots: Ints, first: Ints, stop: Ints) -> _Span:
        """Pages number `first` to `stop`, each [S, K], of every run."""
        count = np.maximum(stop - first, 0)
        return _Span(slots=slots, first=first, count=count, pages=self._by_size(count.sum(0)))

    def _by_size(self, pages: Ints) -> Ints:
        """Pages of every run [K], of every class [C]."""
        size = len(self._slabs.units)
        return np.bincount(self._class_of, weights=pages, minlength=size).astype(np.int64)

    def _opened(self, slots: Sequence[int] | Ints) -> Ints:
        index: Ints = np.array(slots, dtype=np.int64)
        assert (index >= 0).all() and self._is_open[index].all(), f"not all open: slots {slots}"
        assert len(np.unique(index)) == len(index), f"not different: slots {slots}"
        return index

    def _growth(self, slots: Sequence[int], tokens: Sequence[int] | Ints) -> tuple[_Span, Ints]:
        """Pages to add for `tokens` more rows, and the lengths [S, G] with them."""
        index, more = self._opened(slots), np.array(tokens, dtype=np.int64)
        assert len(index) == len(more) and (more >= 0).all(), f"slots {slots}, tokens {tokens}"
        after = self.host_lengths[index] + (more if more.ndim > 1 else more[:, None])
        return self._span(index, self.host_lengths[index], after), after

    def _shortage(self, span: _Span, lengths: Ints) -> str | None:
        """Why sequences cannot have `lengths` [S, G] rows, which add `span`."""
        longest = lengths.max(initial=0)
        if longest > self.max_tokens:
            return f"a sequence of {longest} rows is longer than max_tokens={self.max_tokens}"
        if self._can_pop(span.pages):
            return None
        slabs = self._slabs
        columns = (slabs.to_take(span.pages), span.pages, slabs.units * UNIT, slabs.num_free)
        needed = zip(*columns, strict=True)
        return f"{len(slabs.free_slabs)} free slabs of {slabs.slab_units * UNIT} B; needed: " + (
            "; ".join("{} for {} pages of {} B ({} free)".format(*x) for x in needed)
        )

    def _cells(self, span: _Span) -> Tensor:
        """Where the pages of `span` stand in the flat tables: int64 [M], class after class."""
        order, total = self._by_class, int(span.pages.sum())
        column, row = span.count[:, order].T.nonzero()
        run = order[column]
        count = span.count[row, run]
        begin = span.slots[row] * self.tables[0].numel() + self._starts[run] + span.first[row, run]
        begin -= np.cumsum(count) - count  # then 0 .. M-1 counts on from every run's first page
        both = upload(np.stack((begin, count)), self.device)
        runs = torch.repeat_interleave(both[0], both[1], output_size=total)
        return runs + torch.arange(total, device=self.device)

    def _commit(self, slots: Ints, lengths: Ints, slabs: Slabs) -> None:
        """Make a change that is ready; what may fail comes before what counts."""
        index = upload(slots, self.device)
        self.lengths[index] = upload(lengths.astype(np.int32), self.device)
        self.host_lengths[slots], self._slabs = lengths, slabs


class NarrowPool(Pool):
    """Narrow rows of the sequences of another pool, `owner`, whose slots, arena and slabs it
    shares. Its groups grow each by itself, by `extend`, and are freed as the owner closes a slot.
    """

    def __init__(self, owner: Pool, layout: CacheLayout, class_of: Ints) -> None:
        self.owner, self.layout, self.narrow = owner, layout, None
        for name in ("num_slots", "max_tokens", "max_pages", "device", "num_bytes", "arena"):
            setattr(self, name, getattr(owner, name))
        self.spare, self._is_open = owner.spare, owner._is_open
        shape = (len(owner.tables), len(layout.groups), self.max_pages)
        self._starts, self._class_of = np.arange(shape[1]) * shape[2], class_of
        self._by_class = np.argsort(class_of, kind="stable")
        self.tables = torch.zeros(shape, dtype=torch.int32, device=self.device)
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
        """As of the owner, whose and these pages they are."""
        return self.owner.used_bytes

    def _can_pop(self, pages: Ints) -> bool:
        return self.owner._can_pop(pages)


def _check(num_bytes: int, num_slots: int, max_tokens: int) -> None:
    for name, value in (("num_slots", num_slots), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if num_bytes > 2**31 * UNIT:
        raise SettingError(
            f"`num_bytes` must be at most {2**31 * UNIT}, since tables hold int32 offsets in units"
            f" of {UNIT} B; got {num_bytes}"
        )
