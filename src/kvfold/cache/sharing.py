"""A pool whose sequences can share pages (prefix caching): shared pages have reference counts.

Shapes: G groups of all layers, C byte classes (distinct page sizes), M pages of one call, sorted by
class. A page of the arena is one of

    free | cached with reference count 0 (evictable) | cached with readers | private to a sequence

A sequence begins with shared pages, in every group, and writes only to the private ones after them.
Shared pages are never written: `make_private` first copies them (copy-on-write). Cached pages
without readers are dropped when pages are needed, least recently used first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvfold.cache import arena
from kvfold.cache.pool import Pool, PoolFull, _PageRange
from kvfold.cache.slabs import ceil_div
from kvfold.layout.pages import METRIC, UNIT, Ints
from kvfold.ops.common.launch import download_each, upload


@dataclass(eq=False, kw_only=True)
class CachedPages:
    """Cached pages that nobody changes: of the pages of a sequence's first `tokens` tokens, those
    from page number `first` [G] of each group on. `lengths` [G] (both int64) is how many token
    entries each group has by then.

    offsets: int32 [M].
    pages: number of pages per class [C].
    ref_count: the number of sequences that read them.
    score_key: hash of the last block of the prompt segment whose re-scoring pass computed the
        eviction scores of these pages. The scores are valid for every request that shares the
        prefix up to that block. Empty: there are none.
    """

    tokens: int
    compressed: bool = False  # groups may differ in length; later pages are not shared
    first: Ints
    lengths: Ints
    offsets: Tensor
    pages: Ints
    ref_count: int = 0
    score_key: bytes = b""


Chain = Sequence[CachedPages]  # consecutive pages of a prefix, from token entry 0 on


class SharingPool(Pool):
    """A pool whose sequences may share pages. Layouts with a residual may not.

    A *block* is page n of every group, all full. While nothing is evicted, these pages hold the
    same `page` tokens. used_bytes counts the pages that sequences hold, shared ones once;
    evictable_bytes those of cached pages without readers, which can be freed at any time.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._chains: list[list[CachedPages]] = [[] for _ in range(self.num_slots)]
        # Cached pages with reference count 0, least recently used first.
        self._evictable: OrderedDict[CachedPages, None] = OrderedDict()
        self._num_evictable: Ints = np.zeros_like(self._slabs.units)
        self._unused = self._slabs.copy()
        self._block_pages = self._by_size(np.ones_like(self._class_of))
        groups = self.layout.groups
        self._order = upload(self._by_class[: len(groups)], self.device)
        starts = [x.layout.blocks.metrics.offset // METRIC for x in groups]
        self._metrics: Ints = np.array(starts)

    # Sequences that read shared pages -------------------------------------------------------------

    def num_blocks(self, slot: int) -> int:
        """How many shared blocks a sequence reads."""
        return len(self._chains[slot])

    def has(self, x: CachedPages) -> bool:
        """Whether these pages are still cached, with or without readers."""
        return x.ref_count > 0 or x in self._evictable

    def make_room(self, pages: Ints, keep: Chain = ()) -> bool:
        """Drop cached pages without readers, except `keep`, until `pages` [C] pages are free.
        Returns whether that succeeded."""
        self.touch(keep)
        return self._ensure_free(pages, keep)

    def _add_reader(self, chain: Chain) -> None:
        """Add one to the reference counts."""
        for x in chain:
            if not x.ref_count:
                del self._evictable[x]
                self._num_evictable -= x.pages
            x.ref_count += 1

    def _remove_reader(self, chain: Chain) -> None:
        """Take one from the reference counts. Pages without readers stay cached. If memory is
        needed later, the end of a chain is dropped before its beginning."""
        for x in reversed(chain):
            x.ref_count -= 1
            if not x.ref_count:
                self._make_evictable(x)

    def touch(self, chain: Chain) -> None:
        """Mark these pages as most recently used, so that they are dropped last."""
        for x in reversed(chain):
            if x in self._evictable:
                self._evictable.move_to_end(x)

    def _make_evictable(self, x: CachedPages) -> None:
        """Keep pages without readers until their memory is needed."""
        self._evictable[x] = None
        self._num_evictable += x.pages

    def cost(self, chain: Chain, tokens: int, *, copy: bool = False) -> Ints:
        """Pages [C] that a sequence must allocate to begin with `chain` and add `tokens` tokens.
        With `copy`, it also copies the pages of the chain."""
        lengths = self._lengths(chain)
        num_read = np.zeros_like(lengths) if copy else lengths // self.layout.page
        return self._between(np.arange(1), num_read, self._num_pages(lengths + tokens)).pages

    def fits_pages(self, pages: Ints) -> bool:
        """Whether `pages` [C] pages fit in an empty pool."""
        return int(ceil_div(pages, self._slabs.pages_per_slab).sum()) <= self._slabs.num_slabs

    def start_from(self, slot: int, chain: Chain, *, copy: bool = False) -> None:
        """Start an empty sequence with the token entries of a chain: it shares the full pages and
        copies a partial last one. With `copy`, it copies all of them. Raises PoolFull, with nothing
        changed."""
        index = self._opened([slot])
        assert not self.host_lengths[slot].any() and not self._chains[slot], (
            f"slot {slot} has entries"
        )
        lengths = self._lengths(chain)
        num_read = np.zeros_like(lengths) if copy else lengths // self.layout.page
        stop = self._num_pages(lengths)
        self.touch(chain)
        copies, slabs = self._popped(self._between(index, num_read, stop), chain)
        tables = self.block_tables.view(-1)
        tables[self._cells(self._between(index, np.zeros_like(stop), stop))] = _offsets(chain)
        self._replace(self._between(index, num_read, stop), copies)
        if not copy:
            self._add_reader(chain)
            self._chains[slot] = list(chain)
        self._commit(index, lengths, slabs)
        if self.window is not None:
            self.window.first[slot] = int(lengths.max())
        self._high_water = max(self._high_water, self.used_bytes)

    def make_room_to_copy(self, slot: int) -> bool:
        return not self._chains[slot] or self._ensure_free(self._read(slot).pages)

    def make_private(self, slot: int) -> None:
        """Copy the shared pages of a sequence, so that all of its pages are private. Raises
        PoolFull."""
        if not (chain := self._chains[slot]):
            return
        span = self._read(slot)
        copies, slabs = self._popped(span)
        self._replace(span, copies)
        self._chains[slot], self._slabs = [], slabs
        self._remove_reader(chain)
        self._high_water = max(self._high_water, self.used_bytes)

    def free_slot(self, slot: int) -> None:
        self._empty(slot)
        chain, self._chains[slot] = self._chains[slot], []
        self._remove_reader(chain)
        self._is_open[slot] = False

    def _num_kept(self, slot: int) -> int:
        """Also all pages of a packed context, whose groups may differ in length."""
        chain = self._chains[slot]
        if chain and chain[0].compressed:
            return int((chain[0].lengths // self.layout.page).max())
        shared = [number for number, x in enumerate(chain, 1) if x.ref_count > 1]
        return max(shared, default=0)

    def demote(self, slot: int, first: int, count: int) -> None:
        """Cached pages that no other sequence reads leave the cache first: from page `first` on,
        all of the sequence's pages become private."""
        chain = self._chains[slot]
        super().demote(slot, first, count)
        if not (chain and chain[0].compressed):
            for x in chain[first:]:
                x.ref_count = 0
            self._chains[slot] = chain[:first]

    # Shared pages ---------------------------------------------------------------------------------

    def share(self, slot: int, count: int) -> list[CachedPages]:
        """Share the next `count` private blocks of a sequence, which is their first reader."""
        first = self.num_blocks(slot)
        self._check_blocks(slot, first, count)
        blocks = self._blocks(first, self._table(slot)[:, first : first + count])
        for x in blocks:
            x.ref_count = 1
        self._chains[slot] += blocks
        return blocks

    def deduplicate(self, slot: int, block: CachedPages) -> None:
        """Replace the next private block of a sequence by a shared block with the same content, and
        free the private one."""
        number = self.num_blocks(slot)
        self._check_blocks(slot, number, 1)
        private = self._table(slot)[:, number]
        self._add_reader([block])
        self.block_tables[slot, self._order, number] = block.offsets
        slabs = self._slabs.push(private, self._block_pages)
        self._slabs, self._chains[slot] = slabs, [*self._chains[slot], block]

    def cache_copies(self, slot: int, first: int, count: int) -> list[CachedPages]:
        """Cache copies of `count` blocks of a sequence, which keeps its private ones. The copies
        have no readers yet, and metrics of 0. If memory is short, only the first few blocks are
        copied."""
        self._check_blocks(slot, first, count)
        while not self._ensure_free(count * self._block_pages):
            count //= 2
        if not count:
            return []
        start, stop = (np.full((1, len(self.layout.groups)), x) for x in (first, first + count))
        span = self._between(np.array([slot]), start, stop)
        offsets, slabs = self._slabs.pop(span.pages)
        self._copy(torch.cat(self._offsets(span)), offsets, span.pages)
        self._clear_metrics(offsets, span)
        blocks = self._blocks(first, offsets.view(-1, count))
        self._slabs = slabs
        for x in reversed(blocks):
            self._make_evictable(x)
        return blocks

    def clear_scores(self, slot: int, first: int, count: int) -> None:
        """Reset the metrics of `count` blocks that were copied for a sequence."""
        start, stop = (np.full((1, len(self.layout.groups)), x) for x in (first, first + count))
        span = self._between(np.array([slot]), start, stop)
        self._clear_metrics(torch.cat(self._offsets(span)), span)

    def copy_scores(self, slot: int, blocks: Sequence[tuple[int, CachedPages, bytes]]) -> None:
        """Copy eviction scores into cached copies of blocks.

        blocks: (block number in the sequence, cached copy, its new `score_key`). The
            sequence in `slot` holds the same token entries, with the metrics of its re-scoring
            passes.
        """
        if not blocks:
            return
        numbers, chain, score_keys = zip(*blocks, strict=True)
        self._check_blocks(slot, 0, max(numbers) + 1)
        source = self._table(slot).index_select(1, upload(np.array(numbers), self.device))
        self._copy(source.flatten(), _offsets(chain), len(chain) * self._block_pages)
        for block, score_key in zip(chain, score_keys, strict=True):
            block.score_key = score_key

    def placeholder(self, tokens: int, lengths: Ints) -> CachedPages:
        """A description of an offloaded prefix: numbers of entries, lengths [G], of a sequence's
        first `tokens` tokens.
        `load` allocates its pages."""
        stop = self._num_pages(lengths[None])
        pages = self._between(np.arange(1), np.zeros_like(stop), stop).pages
        return CachedPages(
            tokens=tokens,
            compressed=True,
            first=np.zeros_like(lengths),
            lengths=lengths,
            offsets=self.block_tables.new_empty(0),
            pages=pages,
        )

    def can_load(self, lengths: Ints, content: Sequence[Tensor]) -> bool:
        """Whether `load` accepts this content for lengths [G]: the right number of pages per class,
        of the right size."""
        if lengths.shape != (len(self.layout.groups),):
            return False
        pages = self.placeholder(0, lengths).pages
        shapes = [(n, size * UNIT) for n, size in zip(pages, self._slabs.units, strict=True)]
        return [tuple(x.shape) for x in content] == shapes

    def load(self, x: CachedPages, content: Sequence[Tensor]) -> None:
        """Allocate pages for a `placeholder` and write their content, uint8 [m, page bytes]
        per class, in the order of `dump`. They have no readers yet. Raises PoolFull."""
        assert not self.has(x), "these pages are loaded already"
        if not self._ensure_free(x.pages):
            raise PoolFull(f"no room to load {x.pages.sum()} pages")
        offsets, slabs = self._slabs.pop(x.pages)
        arena.write(self.arena, slabs.units, offsets, x.pages, content)
        x.offsets, self._slabs = offsets, slabs  # last, when nothing can fail any more
        self._make_evictable(x)

    def dump(self, slot: int) -> tuple[Ints, list[Tensor]]:
        """Copy a sequence to host memory: its lengths [G], and its pages, uint8 [m, page bytes] per
        class. Metrics, and bytes that belong to no entry (which may be stale data of another
        sequence), are 0."""
        assert not self.layout.residual, "unquantised entries of a residual block are in no page"
        lengths = self.host_lengths[slot].copy()
        stop = self._num_pages(lengths[None])
        span = self._between(np.array([slot]), np.zeros_like(stop), stop)
        sizes = zip(span.pages.tolist(), self._slabs.units.tolist(), strict=True)
        content = [torch.empty(n, size * UNIT, dtype=torch.uint8) for n, size in sizes]
        order = self._by_class
        counts, classes = stop[0, order], self._class_of[order]
        lists = zip(
            order.tolist(),
            torch.cat(self._offsets(span)).split(counts.tolist()),
            (x for c, y in enumerate(content) for x in y.split(counts[classes == c].tolist())),
            strict=True,
        )
        download_each(
            (target, self._page_list(group, offsets, int(lengths[group])))
            for group, offsets, target in lists
        )
        return lengths, content

    def _page_list(self, group: int, offsets: Tensor, num_entries: int) -> Tensor:
        """Copy of a group's pages at offsets [m], as `dump` describes it: uint8 [m, page bytes]."""
        layout = self.layout.groups[group].layout
        content = arena.read(self.arena, layout.page_units, offsets)
        arena.clear_unused(content, layout, num_entries)
        return content

    def drop_all(self) -> None:
        """Free all cached pages without readers."""
        self._drop(self._num_evictable.copy())

    def _blocks(self, first: int, offsets: Tensor) -> list[CachedPages]:
        """Blocks from number `first` on, with the pages at offsets [G, n], groups sorted by
        class."""
        size, page = len(self.layout.groups), self.layout.page
        return [
            CachedPages(
                tokens=(number + 1) * page,
                first=np.broadcast_to(np.int64(number), size),
                lengths=np.broadcast_to(np.int64((number + 1) * page), size),
                offsets=block_offsets,
                pages=self._block_pages,
            )
            for number, block_offsets in enumerate(offsets.T.contiguous().unbind(), first)
        ]

    def _check_blocks(self, slot: int, first: int, count: int) -> None:
        self._opened([slot])
        assert not self.layout.residual, "unquantised entries of a residual block cannot be shared"
        num_full = int(self.host_lengths[slot].min()) // self.layout.page
        assert first + count <= num_full, f"blocks {first}..{first + count} of {num_full}"
        chain = self._chains[slot]
        assert not (chain and chain[0].compressed), (
            "blocks after a compressed chain cannot be shared"
        )

    def _table(self, slot: int) -> Tensor:
        """Block table of one sequence, a copy: int32 [G, ..], groups sorted by class."""
        return self.block_tables[slot].index_select(0, self._order)

    def _lengths(self, chain: Chain) -> Ints:
        """Lengths [1, G] of a sequence that begins with this chain."""
        zero: Ints = np.zeros(len(self.layout.groups), dtype=np.int64)
        return (chain[-1].lengths if chain else zero)[None].copy()

    def _read(self, slot: int) -> _PageRange:
        """The shared pages of a sequence."""
        num_read = self._num_read(np.array([slot]))
        return self._between(np.array([slot]), np.zeros_like(num_read), num_read)

    def _num_read(self, slots: Ints) -> Ints:
        """Number of shared pages per page list [S, K]."""
        if self.layout.residual:
            return np.zeros((len(slots), len(self._starts)), dtype=np.int64)
        page = self.layout.page
        return np.concatenate([self._lengths(self._chains[slot]) // page for slot in slots])

    def _popped(self, span: _PageRange, keep: Chain = ()) -> tuple[Tensor, Any]:
        """Pages for `span`, and the state of the slabs after they are taken. Raises PoolFull."""
        if not self._ensure_free(span.pages, keep):
            raise PoolFull(f"no room to copy {span.pages.sum()} shared pages")
        if not span.pages.any():
            return self.block_tables.new_empty(0), self._slabs
        return self._slabs.pop(span.pages)

    def _replace(self, span: _PageRange, copies: Tensor) -> None:
        """Copy the pages of a range to the pages at `copies` [M], and enter these in the block
        table."""
        if span.pages.any():
            cells, tables = self._cells(span), self.block_tables.view(-1)
            self._copy(tables[cells], copies, span.pages)
            tables[cells] = copies

    def _copy(self, source: Tensor, target: Tensor, pages: Ints) -> None:
        """Copy the bytes of pages between offsets [M], sorted by class."""
        arena.copy(self.arena, self._slabs.units, source, target, pages)

    def _clear_metrics(self, offsets: Tensor, span: _PageRange) -> None:
        if not self.layout.tracked:
            return
        order = self._by_class
        starts = np.repeat(self._metrics[order], span.count[0, order])
        entries = torch.arange(self.layout.page, device=self.device)
        cells = offsets.long() * (UNIT // METRIC) + upload(starts, self.device)
        self.arena.view(torch.int32)[cells[:, None] + entries] = 0

    # Free memory ----------------------------------------------------------------------------------

    def _ensure_free(self, pages: Ints, keep: Chain = ()) -> bool:
        """Drop cached pages without readers, other than `keep`, until `pages` [C] are free.
        Whether that succeeded."""
        while not super()._ensure_free(pages):
            units, slabs = self._slabs.units, self._slabs
            free = slabs.num_free @ units + len(slabs.free_slabs) * slabs.slab_units
            if pages @ units > free + self._num_evictable @ units:
                return False
            if not self._drop(pages - slabs.num_free, frozenset(keep)):
                return False
        return True

    def _drop(self, pages: Ints, keep: frozenset[CachedPages] = frozenset()) -> bool:
        """Free cached pages without readers, least recently used first, until `pages` [C] are freed
        or only `keep` (the most recently used ones) are left. Whether any were freed."""
        needed, dropped = pages.copy(), []
        for x in self._evictable:
            if x in keep or not (needed > 0).any():
                break
            needed -= x.pages
            dropped.append(x)
        if not dropped:
            return False
        total: Ints = np.sum([x.pages for x in dropped], axis=0)
        by_class = zip(*(x.offsets.split(x.pages.tolist()) for x in dropped), strict=True)
        slabs = self._slabs.push(torch.cat([x for parts in by_class for x in parts]), total)
        for x in dropped:
            del self._evictable[x]
        self._num_evictable -= total
        self._slabs = slabs
        return True

    def reset(self) -> None:
        """Close all sequences and drop all pages, even if a change was interrupted."""
        self._slabs = self._unused.copy()
        self._evictable.clear()
        self._num_evictable = np.zeros_like(self._num_evictable)
        self._chains = [[] for _ in self._chains]
        self._is_open[:] = False
        self.host_lengths[:] = 0
        self.lengths[: self.num_slots] = 0
        if self.coarse is not None:
            self.coarse.host_lengths[:] = 0
            self.coarse.lengths[: self.num_slots] = 0

    @property
    def used_bytes(self) -> int:
        return super().used_bytes - self.evictable_bytes

    @property
    def evictable_bytes(self) -> int:
        """Bytes of cached pages without readers."""
        return int(self._num_evictable @ self._slabs.units) * UNIT

    def _freed(self, slots: Ints, after: Ints, before: Ints) -> _PageRange:
        """Private pages that become free. Shared ones are not cut: `after` keeps all of them, or is
        0 as a sequence closes."""
        num_shared = self._num_read(slots)
        cut = (self._num_pages(after) < num_shared).any(1)
        assert not after[cut].any(), "shared pages cannot be cut: `make_private` first"
        return self._between(
            slots, np.maximum(self._num_pages(after), num_shared), self._num_pages(before)
        )

    def _taken(self) -> list[Tensor]:
        shared = list(
            dict.fromkeys([*self._evictable, *(x for chain in self._chains for x in chain)])
        )
        parts = [x.offsets.split(x.pages.tolist()) for x in shared]
        private = super()._taken()
        return [torch.cat([private[c], *(x[c] for x in parts)]) for c in range(len(private))]

    def check_integrity(self) -> None:
        """Also assert that reference counts are right and that block tables begin with the shared
        pages."""
        super().check_integrity()
        counts: dict[CachedPages, int] = dict.fromkeys(self._evictable, 0)
        for slot, chain in enumerate(self._chains):
            assert self._is_open[slot] or not chain, f"slot {slot} is closed and reads pages"
            for x in chain:
                counts[x] = counts.get(x, 0) + 1
            if chain:
                shared = torch.cat(self._offsets(self._read(slot)))
                assert torch.equal(shared, self._full(chain)), f"slot {slot} reads other pages"
        for x, count in counts.items():
            assert x.ref_count == count, f"ref_count {x.ref_count}, {count} readers found"
            assert (count == 0) == (x in self._evictable), "evictable and read"
        num_evictable = sum((x.pages for x in self._evictable), np.zeros_like(self._num_evictable))
        assert (num_evictable == self._num_evictable).all(), (
            f"{self._num_evictable} evictable pages counted, not {num_evictable}"
        )

    def _full(self, chain: Chain) -> Tensor:
        """Offsets of the full pages of a chain."""
        lengths, page = chain[-1].lengths[self._by_class], self.layout.page
        number = np.concatenate([np.arange(x) for x in ceil_div(lengths, page)])
        is_full = number < np.repeat(lengths // page, ceil_div(lengths, page))
        return _offsets(chain)[torch.from_numpy(is_full).to(self.device)]


def _offsets(chain: Chain) -> Tensor:
    """Offsets of a chain's pages in the order of a block table: group by group, sorted by class."""
    if len(chain) == 1:
        return chain[0].offsets
    return torch.stack([x.offsets for x in chain], 1).flatten()
