"""Turn full-rank cache entries of unimportant tokens into low-rank ones (ZDC §5.2): choose them by
their metrics, move them to pages of their own, and free the full-rank pages.

Shapes: B sequences, G groups of all layers, T full-rank entries of the longest sequence, P entries
per page, M entries of a layer that are demoted, R / S numbers in a full-rank / low-rank entry.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvfold.cache.eviction.select import lowest
from kvfold.cache.pool import PoolFull
from kvfold.engine.requests.request import Request
from kvfold.engine.runner.eviction import Eviction, chunks
from kvfold.layout import LayerSpec
from kvfold.layout.pages import Ints
from kvfold.ops.common.launch import upload
from kvfold.ops.store import append, gather

NUMBERS = 2**24  # most numbers of full-rank entries read at once, in the model's dtype


@dataclass(frozen=True)
class Demoter:
    """Demotes entries of sequences that hold more full-rank entries than the share of important
    tokens in their layers. The entries with the lowest metrics are demoted, the same tokens in all
    groups of a layer."""

    eviction: Eviction

    def _max_full_rank(self, slots: list[int]) -> Ints:
        """Number of full-rank entries [B, G] that sequences may keep."""
        pool = self.eviction.pool
        assert pool.coarse is not None
        full_rank, low_rank = pool.host_lengths[slots], pool.coarse.host_lengths[slots]
        return np.minimum(pool.layout.num_full_rank(full_rank + low_rank), full_rank)

    def is_over(self, request: Request) -> bool:
        """Whether a sequence has a whole page of entries too many. Demoting single entries would
        allocate and free a page with every new token."""
        slots, page = [request.open_slot], self.eviction.pool.layout.page
        if request.num_uncompressed < page:
            return False
        return bool(
            (self.eviction.pool.host_lengths[slots] - self._max_full_rank(slots) >= page).any()
        )

    def demote_entries(self, requests: list[Request]) -> None:
        """Demote entries of these sequences, all layers at once.

        If there are too few free pages for the low-rank entries, demote each sequence alone; if
        there are too few even then, one set of layers that are ranked together after the other.
        Raises PoolFull, with nothing changed, if that is impossible for every set.
        """
        slots = [request.open_slot for request in requests]
        batches = chunks(slots, self.eviction.pool.host_lengths[slots])
        demoted = [self._try_demote(batch) for batch in batches]
        if not any(demoted):
            raise PoolFull("no free pages for low-rank entries of any layer")

    def _try_demote(self, slots: list[int]) -> bool:
        """Whether entries were demoted, or none had to be."""
        pool = self.eviction.pool
        count = pool.host_lengths[slots] - self._max_full_rank(slots)
        demoted = self._unimportant(slots, count)
        if self._move(slots, demoted, count):
            return True
        if len(slots) > 1:
            results = [self._try_demote([slot]) for slot in slots]
            return any(results)
        assert pool.layout.spec.hybrid is not None
        leader_sets = remaining = pool.layout.spec.hybrid.leader_sets
        num_before = 0
        while remaining and len(remaining) != num_before:
            num_before = len(remaining)
            remaining = tuple(x for x in remaining if not self._move(slots, demoted, count, x))
        return len(remaining) < len(leader_sets)

    def _move(
        self, slots: list[int], demoted: Tensor, count: Ints, layers: tuple[int, ...] | None = None
    ) -> bool:
        """Demote the entries `demoted` [B, G, T], of which there are count [B, G] per group, of
        some layers (None: all). Returns False, with nothing changed, if there are too few free
        pages."""
        pool, index = self.eviction.pool, upload(np.array(slots), self.eviction.pool.device)
        assert pool.coarse is not None
        if layers is not None:
            selected = np.array([group.layer in layers for group in pool.layout.groups])
            demoted, count = demoted & upload(selected, pool.device)[:, None], count * selected
        before = pool.coarse.host_lengths[slots]
        try:
            pool.coarse.extend(slots, count)
        except PoolFull:
            return False
        try:
            for layer, where in enumerate(pool.layout.layer_groups):
                if count[:, where].any():
                    self._copy(layer, index, demoted, before)
            self.eviction.close_holes(index, demoted)
        except Exception:
            pool.coarse.truncate(slots, before)
            raise
        pool.truncate(slots, pool.host_lengths[slots] - count)
        return True

    def _unimportant(self, slots: list[int], count: Ints) -> Tensor:
        """bool [B, G, T]: in each group the count [B, G] entries with the lowest metrics in the
        layer's leader, whose entries are in the same order."""
        layout = self.eviction.pool.layout
        hybrid, groups_of_layer = layout.spec.hybrid, layout.layer_groups
        assert hybrid is not None
        metrics, _, valid = self.eviction.tracked(*slots)
        leader_metrics = [
            metrics[:, groups_of_layer[hybrid.leaders[x.layer]]].sum(1) for x in layout.groups
        ]
        importance = torch.stack(leader_metrics, 1).masked_fill(~valid, torch.inf)
        return lowest(importance, importance.sort().values, upload(count, importance.device))

    def _copy(self, layer: int, slots: Tensor, demoted: Tensor, before: Ints) -> None:
        """Append the leading numbers of the entries `demoted` [B, G, T] to the low-rank entries of
        slots [B], after the first `before` [B, G] ones, NUMBERS numbers at a time."""
        pool, dtype = self.eviction.pool, self.eviction.attention.view.dtype
        assert pool.coarse is not None
        where, page = pool.layout.layer_groups[layer], pool.layout.page
        full_rank, low_rank = pool.pages(where), pool.coarse.pages(where)
        specs = [x.spec.layers[layer] for x in (pool.layout, pool.coarse.layout)]
        columns, lengths = upload(low_rank_columns(*specs), pool.device), full_rank.lengths[slots]
        demoted_BT = demoted[:, where.start]
        target = upload(before[:, where.start], pool.device)[:, None] + demoted_BT.cumsum(1) - 1
        tile_tokens = max(NUMBERS // (len(slots) * specs[0].row_width * page), 1) * page
        for first in range(0, demoted_BT.shape[1], tile_tokens):
            tile = demoted_BT[:, first : first + tile_tokens]
            sequence, entry = tile.nonzero(as_tuple=True)
            later_pages = full_rank._replace(tables=full_rank.tables[..., first // page :])
            rest_lengths = (lengths - first).clamp(0, tile.shape[1])
            entries = gather(later_pages, slots, rest_lengths, dtype, tile.shape[1]).rows[
                sequence, entry
            ]
            index = target[sequence, first + entry][:, None].expand(-1, len(low_rank.groups))
            append(low_rank, entries[:, columns], slots[sequence], index)


def low_rank_columns(full_rank: LayerSpec, low_rank: LayerSpec) -> Ints:
    """The columns of a layer's full-rank entry [R] that hold the numbers [S] of its low-rank
    entry."""
    pairs = zip(full_rank.latents, low_rank.latents, strict=True)
    starts = [(full_rank.columns(x).start, less.rank) for x, less in pairs]
    return np.concatenate([np.arange(start, start + rank) for start, rank in starts])
