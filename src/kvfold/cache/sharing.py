"""Pages that several sequences read: counted by reference, never written, kept while there is room.

Shapes: G groups of all layers, C byte classes, M pages of one call, class after class. A page of
the arena is one of

    free | kept for who may come | read by sequences (both are shared) | a sequence's own

A sequence reads shared pages in front of its own ones, in every group. It writes behind them, so
that what would change a shared page is done to a copy: `own` makes all of a sequence's pages its
own. Pages that nobody reads are kept, and dropped when pages are needed, least recently used first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvfold.cache import arena
from kvfold.cache.pool import Pool, PoolFull, _Span
from kvfold.cache.slabs import ceil_div
from kvfold.ops.common.launch import upload
from kvfold.spec.layout import METRIC, UNIT, Ints


@dataclass(eq=False, kw_only=True)
class SharedPages:
    """Pages that nobody changes: of every group those from number `first` on that hold its rows up
    to `rows`, each int64 [G], which are those of a sequence's first `tokens` tokens.

    offsets: int32 [M]; pages: how many of each class [C]; readers: sequences that read them;
    scored: the name of the last block of the piece by whose reading it has metrics, which serve all
        who begin alike up to there.
    """

    tokens: int
    compressed: bool = False  # groups' rows may differ, and nothing is shared behind them
    first: Ints
    rows: Ints
    offsets: Tensor
    pages: Ints
    readers: int = 0
    scored: bytes = b""


Chain = Sequence[SharedPages]  # each goes on where the one before it ends, the first at row 0


class SharingPool(Pool):
    """A pool whose sequences may share pages; layouts with a residual may not.

    A *block* is page number n of every group, full: what `page` tokens take before any is evicted.
    used_bytes are those that sequences read or own, each page once; kept_bytes those of shared
    pages that nobody reads, which are as good as free.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._chains: list[list[SharedPages]] = [[] for _ in range(self.num_slots)]
        self._unread: OrderedDict[SharedPages, None] = OrderedDict()  # the first is dropped first
        self._unread_pages: Ints = np.zeros_like(self._slabs.units)
        self._unused = self._slabs.copy()
        self._block_pages = self._by_size(np.ones_like(self._class_of))
        groups = self.layout.groups
        self._order = upload(self._by_class[: len(groups)], self.device)
        starts = [x.layout.blocks.metrics.offset // METRIC for x in groups]
        self._metrics: Ints = np.array(starts)

    # Sequences that read --------------------------------------------------------------------------

    def num_blocks(self, slot: int) -> int:
        """Blocks that a sequence reads."""
        return len(self._chains[slot])

    def has(self, x: SharedPages) -> bool:
        """Whether pages are shared still, read by a sequence or kept."""
        return x.readers > 0 or x in self._unread

    def can_supply(self, pages: Ints, spare: Chain = ()) -> bool:
        """Whether so many pages [C] are free, or can be: nobody reads some, and not `spare`."""
        self.touch(spare)
        return self._can_pop(pages, spare)

    def _read_by_one(self, chain: Chain) -> None:
        """One reader more."""
        for x in chain:
            if not x.readers:
                del self._unread[x]
                self._unread_pages -= x.pages
            x.readers += 1

    def _release(self, chain: Chain) -> None:
        """One reader less. What nobody reads is kept; the ends of chains are dropped first."""
        for x in reversed(chain):
            x.readers -= 1
            if not x.readers:
                self._keep(x)

    def touch(self, chain: Chain) -> None:
        """Have these dropped last, of all that nobody reads."""
        for x in reversed(chain):
            if x in self._unread:
                self._unread.move_to_end(x)

    def _keep(self, x: SharedPages) -> None:
        self._unread[x] = None
        self._unread_pages += x.pages

    def cost(self, chain: Chain, tokens: int, *, copy: bool = False) -> Ints:
        """Pages [C] that a sequence takes which goes on behind a chain by so many tokens."""
        rows = self._rows(chain)
        read = np.zeros_like(rows) if copy else rows // self.layout.page
        return self._between(np.arange(1), read, self._num_pages(rows + tokens)).pages

    def fits_pages(self, pages: Ints) -> bool:
        """Whether an empty pool has so many pages [C]."""
        return int(ceil_div(pages, self._slabs.per_slab).sum()) <= self._slabs.num_slabs

    def attach(self, slot: int, chain: Chain, *, copy: bool = False) -> None:
        """Begin an empty sequence with the rows of a chain: it reads the full pages, or copies of
        all, and gets a copy of others. Raises PoolFull, and then nothing was changed."""
        index = self._opened([slot])
        assert not self.host_lengths[slot].any() and not self._chains[slot], f"slot {slot} has rows"
        rows = self._rows(chain)
        read = np.zeros_like(rows) if copy else rows // self.layout.page
        stop = self._num_pages(rows)
        self.touch(chain)
        own, slabs = self._popped(self._between(index, read, stop), chain)
        tables = self.tables.view(-1)
        tables[self._cells(self._between(index, np.zeros_like(stop), stop))] = _offsets(chain)
        self._replace(self._between(index, read, stop), own)
        if not copy:
            self._read_by_one(chain)
            self._chains[slot] = list(chain)
        self._commit(index, rows, slabs)
        self._high_water = max(self._high_water, self.used_bytes)

    def can_own(self, slot: int) -> bool:
        return not self._chains[slot] or self._can_pop(self._read(slot).pages)

    def own(self, slot: int) -> None:
        """Copy what a sequence reads, so that all of its pages are its own. Raises PoolFull."""
        if not (chain := self._chains[slot]):
            return
        span = self._read(slot)
        own, slabs = self._popped(span)
        self._replace(span, own)
        self._chains[slot], self._slabs = [], slabs
        self._release(chain)
        self._high_water = max(self._high_water, self.used_bytes)

    def close(self, slot: int) -> None:
        self._empty(slot)
        chain, self._chains[slot] = self._chains[slot], []
        self._release(chain)
        self._is_open[slot] = False

    # Pages that are shared ------------------------------------------------------------------------

    def share(self, slot: int, count: int) -> list[SharedPages]:
        """The next `count` blocks of a sequence that reads blocks: now it reads these too."""
        first = self.num_blocks(slot)
        self._check_blocks(slot, first, count)
        found = self._blocks(first, self._table(slot)[:, first : first + count])
        for x in found:
            x.readers = 1
        self._chains[slot] += found
        return found

    def swap(self, slot: int, block: SharedPages) -> None:
        """Read a block that holds what the next one of this sequence does, and free that."""
        number = self.num_blocks(slot)
        self._check_blocks(slot, number, 1)
        own = self._table(slot)[:, number]
        self._read_by_one([block])
        self.tables[slot, self._order, number] = block.offsets
        slabs = self._slabs.push(own, self._block_pages)
        self._slabs, self._chains[slot] = slabs, [*self._chains[slot], block]

    def keep(self, slot: int, first: int, count: int) -> list[SharedPages]:
        """Copies of blocks of a sequence, which goes on with its own ones: nobody reads them yet,
        and metrics are 0 in them. Fewer, the first ones, where pages are missing."""
        self._check_blocks(slot, first, count)
        while not self._can_pop(count * self._block_pages):
            count //= 2
        if not count:
            return []
        start, stop = (np.full((1, len(self.layout.groups)), x) for x in (first, first + count))
        span = self._between(np.array([slot]), start, stop)
        offsets, slabs = self._slabs.pop(span.pages)
        self._copy(torch.cat(self._offsets(span)), offsets, span.pages)
        self._clear_metrics(offsets, span)
        found = self._blocks(first, offsets.view(-1, count))
        self._slabs = slabs
        for x in reversed(found):
            self._keep(x)
        return found

    def forget(self, slot: int, first: int, count: int) -> None:
        """Rows of `count` blocks, copied for a sequence, have no metrics any more."""
        start, stop = (np.full((1, len(self.layout.groups)), x) for x in (first, first + count))
        span = self._between(np.array([slot]), start, stop)
        self._clear_metrics(torch.cat(self._offsets(span)), span)

    def score(self, slot: int, blocks: Sequence[tuple[int, SharedPages, bytes]]) -> None:
        """Give blocks, which were copied, the metrics of the blocks of these numbers of a sequence
        that holds the same rows, as the readings of pieces left them."""
        if not blocks:
            return
        numbers, chain, pieces = zip(*blocks, strict=True)
        self._check_blocks(slot, 0, max(numbers) + 1)
        own = self._table(slot).index_select(1, upload(np.array(numbers), self.device))
        self._copy(own.flatten(), _offsets(chain), len(chain) * self._block_pages)
        for block, piece in zip(chain, pieces, strict=True):
            block.scored = piece

    def unloaded(self, tokens: int, rows: Ints) -> SharedPages:
        """Rows [G] of so many first tokens of a sequence, which have no pages until `load`."""
        stop = self._num_pages(rows[None])
        pages = self._between(np.arange(1), np.zeros_like(stop), stop).pages
        return SharedPages(
            tokens=tokens,
            compressed=True,
            first=np.zeros_like(rows),
            rows=rows,
            offsets=self.tables.new_empty(0),
            pages=pages,
        )

    def takes(self, rows: Ints, content: Sequence[Tensor]) -> bool:
        """Whether `load` can give rows [G] such pages: as many of every class, and as large."""
        if rows.shape != (len(self.layout.groups),):
            return False
        pages = self.unloaded(0, rows).pages
        shapes = [(n, size * UNIT) for n, size in zip(pages, self._slabs.units, strict=True)]
        return [tuple(x.shape) for x in content] == shapes

    def load(self, x: SharedPages, content: Sequence[Tensor]) -> None:
        """Give rows without pages some, uint8 [m, page bytes] of every class, in the order that
        `dump` has them. Nobody reads them yet. Raises PoolFull."""
        assert not self.has(x), "these have pages"
        if not self._can_pop(x.pages):
            raise PoolFull(f"no room to load {x.pages.sum()} pages")
        offsets, slabs = self._slabs.pop(x.pages)
        arena.write(self.arena, slabs.units, offsets, x.pages, content)
        x.offsets, self._slabs = offsets, slabs  # once nothing can fail any more
        self._keep(x)

    def dump(self, slot: int) -> tuple[Ints, list[Tensor]]:
        """Rows [G] of a sequence, and its pages in host memory: uint8 [m, page bytes] of every
        class, with 0 for metrics and where no row is, which may be another's."""
        assert not self.layout.residual, "rows that wait in tails are in no page"
        rows = self.host_lengths[slot].copy()
        stop = self._num_pages(rows[None])
        span = self._between(np.array([slot]), np.zeros_like(stop), stop)
        content = [
            arena.read(self.arena, size, offsets).cpu()
            for size, offsets in zip(self._slabs.units.tolist(), self._offsets(span), strict=True)
        ]
        begin = np.zeros_like(span.pages)
        for run in self._by_class:
            c, count = self._class_of[run], int(stop[0, run])
            own = content[c][begin[c] : begin[c] + count]
            left = torch.arange(count)[:, None] * -self.layout.page + int(rows[run])
            own[arena.row_of_bytes(self.layout.groups[run].layout) >= left] = 0
            begin[c] += count
        return rows, content

    def drop_all(self) -> None:
        """Free what nobody reads."""
        self._drop(self._unread_pages.copy())

    def _blocks(self, first: int, offsets: Tensor) -> list[SharedPages]:
        """offsets [G, n], groups class after class."""
        size, page = len(self.layout.groups), self.layout.page
        return [
            SharedPages(
                tokens=(number + 1) * page,
                first=np.broadcast_to(np.int64(number), size),
                rows=np.broadcast_to(np.int64((number + 1) * page), size),
                offsets=own,
                pages=self._block_pages,
            )
            for number, own in enumerate(offsets.T.contiguous().unbind(), first)
        ]

    def _check_blocks(self, slot: int, first: int, count: int) -> None:
        self._opened([slot])
        assert not self.layout.residual, "rows that wait in tails cannot be shared"
        most = int(self.host_lengths[slot].min()) // self.layout.page
        assert first + count <= most, f"blocks {first}..{first + count} of {most}"
        chain = self._chains[slot]
        assert not (chain and chain[0].compressed), (
            "what is behind a compressed chain cannot be shared"
        )

    def _table(self, slot: int) -> Tensor:
        """Of one sequence: int32 [G, ..], groups class after class; a copy."""
        return self.tables[slot].index_select(0, self._order)

    def _rows(self, chain: Chain) -> Ints:
        """Rows [1, G] of a sequence that begins with a chain."""
        none: Ints = np.zeros(len(self.layout.groups), dtype=np.int64)
        return (chain[-1].rows if chain else none)[None].copy()

    def _read(self, slot: int) -> _Span:
        """Pages that a sequence reads and does not own."""
        read = self._num_read(np.array([slot]))
        return self._between(np.array([slot]), np.zeros_like(read), read)

    def _num_read(self, slots: Ints) -> Ints:
        """Pages of every run [S, K]."""
        if self.layout.residual:
            return np.zeros((len(slots), len(self._starts)), dtype=np.int64)
        page = self.layout.page
        return np.concatenate([self._rows(self._chains[slot]) // page for slot in slots])

    def _popped(self, span: _Span, spare: Chain = ()) -> tuple[Tensor, Any]:
        """Pages for `span`, and the slabs without them. Raises PoolFull."""
        if not self._can_pop(span.pages, spare):
            raise PoolFull(f"no room to copy {span.pages.sum()} shared pages")
        if not span.pages.any():
            return self.tables.new_empty(0), self._slabs
        return self._slabs.pop(span.pages)

    def _replace(self, span: _Span, own: Tensor) -> None:
        """Copy pages of a sequence to `own` [M], and put these in their places."""
        if span.pages.any():
            cells, tables = self._cells(span), self.tables.view(-1)
            self._copy(tables[cells], own, span.pages)
            tables[cells] = own

    def _copy(self, source: Tensor, target: Tensor, pages: Ints) -> None:
        """The bytes of pages [M], class after class, from offsets to offsets."""
        arena.copy(self.arena, self._slabs.units, source, target, pages)

    def _clear_metrics(self, offsets: Tensor, span: _Span) -> None:
        if not self.layout.tracked:
            return
        order = self._by_class
        starts = np.repeat(self._metrics[order], span.count[0, order])
        rows = torch.arange(self.layout.page, device=self.device)
        cells = offsets.long() * (UNIT // METRIC) + upload(starts, self.device)
        self.arena.view(torch.int32)[cells[:, None] + rows] = 0

    # Room -----------------------------------------------------------------------------------------

    def _can_pop(self, pages: Ints, spare: Chain = ()) -> bool:
        """Drops what nobody reads, but not `spare`, where that helps."""
        while not super()._can_pop(pages):
            units, slabs = self._slabs.units, self._slabs
            free = slabs.num_free @ units + len(slabs.free_slabs) * slabs.slab_units
            if pages @ units > free + self._unread_pages @ units:
                return False
            if not self._drop(pages - slabs.num_free, frozenset(spare)):
                return False
        return True

    def _drop(self, pages: Ints, spare: frozenset[SharedPages] = frozenset()) -> bool:
        """Free so many pages [C] of those that nobody reads, or all there are but the last ones,
        `spare`. Whether there were any."""
        lacking, found = pages.copy(), []
        for x in self._unread:
            if x in spare or not (lacking > 0).any():
                break
            lacking -= x.pages
            found.append(x)
        if not found:
            return False
        total: Ints = np.sum([x.pages for x in found], axis=0)
        by_class = zip(*(x.offsets.split(x.pages.tolist()) for x in found), strict=True)
        slabs = self._slabs.push(torch.cat([x for parts in by_class for x in parts]), total)
        for x in found:
            del self._unread[x]
        self._unread_pages -= total
        self._slabs = slabs
        return True

    def reset(self) -> None:
        """Close all sequences and drop all pages, whatever is half done."""
        self._slabs = self._unused.copy()
        self._unread.clear()
        self._unread_pages = np.zeros_like(self._unread_pages)
        self._chains = [[] for _ in self._chains]
        self._is_open[:] = False
        self.host_lengths[:] = 0
        self.lengths[: self.num_slots] = 0
        if self.narrow is not None:
            self.narrow.host_lengths[:] = 0
            self.narrow.lengths[: self.num_slots] = 0

    @property
    def used_bytes(self) -> int:
        return super().used_bytes - self.kept_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of shared pages that nobody reads."""
        return int(self._unread_pages @ self._slabs.units) * UNIT

    def _freed(self, slots: Ints, after: Ints, before: Ints) -> _Span:
        """What is shared stays: all of it or, as a sequence closes, none of it is left."""
        read = self._num_read(slots)
        cut = (self._num_pages(after) < read).any(1)
        assert not after[cut].any(), "shared pages cannot be cut: `own` them first"
        return self._between(
            slots, np.maximum(self._num_pages(after), read), self._num_pages(before)
        )

    def _taken(self) -> list[Tensor]:
        shared = list(dict.fromkeys([*self._unread, *(x for chain in self._chains for x in chain)]))
        parts = [x.offsets.split(x.pages.tolist()) for x in shared]
        own = super()._taken()
        return [torch.cat([own[c], *(x[c] for x in parts)]) for c in range(len(own))]

    def check_integrity(self) -> None:
        """As of every pool; and that those that read shared pages are as many as are counted."""
        super().check_integrity()
        found: dict[SharedPages, int] = dict.fromkeys(self._unread, 0)
        for slot, chain in enumerate(self._chains):
            assert self._is_open[slot] or not chain, f"slot {slot} is closed and reads pages"
            for x in chain:
                found[x] = found.get(x, 0) + 1
            if chain:
                read = torch.cat(self._offsets(self._read(slot)))
                assert torch.equal(read, self._full(chain)), f"slot {slot} reads other pages"
        for x, readers in found.items():
            assert x.readers == readers, f"{x.readers} readers counted, {readers} found"
            assert (readers == 0) == (x in self._unread), "kept and read"
        kept = sum((x.pages for x in self._unread), np.zeros_like(self._unread_pages))
        assert (kept == self._unread_pages).all(), (
            f"{self._unread_pages} kept pages counted, not {kept}"
        )

    def _full(self, chain: Chain) -> Tensor:
        """Offsets of the full pages of a chain."""
        rows, page = chain[-1].rows[self._by_class], self.layout.page
        number = np.concatenate([np.arange(x) for x in ceil_div(rows, page)])
        full = number < np.repeat(rows // page, ceil_div(rows, page))
        return _offsets(chain)[torch.from_numpy(full).to(self.device)]


def _offsets(chain: Chain) -> Tensor:
    """Of a chain's pages, in the order of a table's: group after group, class after class."""
    if len(chain) == 1:
        return chain[0].offsets
    return torch.stack([x.offsets for x in chain], 1).flatten()
