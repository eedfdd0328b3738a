"""Rows of unimportant tokens become narrow (ZDC §5.2): chosen by importance, moved to pages of
their own, and the wide pages that come free go back to the pool.

Shapes: B sequences, G groups of all layers, T wide rows of the longest, P rows a page; M rows of a
layer that become narrow, R / S numbers of its wide and narrow row.
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

NUMBERS = 2**24  # of wide rows that are read at once, in the model's type


@dataclass(frozen=True)
class Demotion:
    """Of sequences whose wide rows are more than their layers' shares of important tokens, in whole
    pages: those of the lowest metrics go, in all groups of a layer the same."""

    eviction: Eviction

    def _kept(self, slots: list[int]) -> Ints:
        """Wide rows [B, G] that sequences may keep."""
        pool = self.eviction.pool
        assert pool.low_rank is not None
        wide, narrow = pool.host_lengths[slots], pool.low_rank.host_lengths[slots]
        return np.minimum(pool.layout.num_full_rank(wide + narrow), wide)

    def is_over(self, request: Request) -> bool:
        """Whether a whole page of rows is over: one row would open a page with every new token, and
        free it."""
        slots, page = [request.open_slot], self.eviction.pool.layout.page
        if request.num_uncompressed < page:
            return False
        return bool((self.eviction.pool.host_lengths[slots] - self._kept(slots) >= page).any())

    def demote(self, requests: list[Request]) -> None:
        """Some sequences together, all layers at once; where there is no room for so many narrow
        rows beside the wide ones, each alone, and where there is none for one's, layers that are
        ranked together one after another, as room comes free. Raises PoolFull where there is none
        for any, and then nothing was changed."""
        slots = [request.open_slot for request in requests]
        each = chunks(slots, self.eviction.pool.host_lengths[slots])
        done = [self._demotes(some) for some in each]
        if not any(done):
            raise PoolFull("no room for narrow rows of any layer")

    def _demotes(self, slots: list[int]) -> bool:
        """Whether some rows are narrow now, or none need be."""
        pool = self.eviction.pool
        count = pool.host_lengths[slots] - self._kept(slots)
        goes = self._unimportant(slots, count)
        if self._moves(slots, goes, count):
            return True
        if len(slots) > 1:
            done = [self._demotes([slot]) for slot in slots]
            return any(done)
        assert pool.layout.spec.hybrid is not None
        units = waiting = pool.layout.spec.hybrid.leader_sets
        before = 0
        while waiting and len(waiting) != before:
            before = len(waiting)
            waiting = tuple(x for x in waiting if not self._moves(slots, goes, count, x))
        return len(waiting) < len(units)

    def _moves(
        self, slots: list[int], goes: Tensor, count: Ints, layers: tuple[int, ...] | None = None
    ) -> bool:
        """Move rows goes [B, G, T], count [B, G] of each group, of some layers, or of all; False
        where there is no room, and nothing was changed."""
        pool, index = self.eviction.pool, upload(np.array(slots), self.eviction.pool.device)
        assert pool.low_rank is not None
        if layers is not None:
            own = np.array([group.layer in layers for group in pool.layout.groups])
            goes, count = goes & upload(own, pool.device)[:, None], count * own
        before = pool.low_rank.host_lengths[slots]
        try:
            pool.low_rank.extend(slots, count)
        except PoolFull:
            return False
        try:
            for layer, where in enumerate(pool.layout.layer_groups):
                if count[:, where].any():
                    self._copy(layer, index, goes, before)
            self.eviction.close_holes(index, goes)
        except Exception:
            pool.low_rank.truncate(slots, before)
            raise
        pool.truncate(slots, pool.host_lengths[slots] - count)
        return True

    def _unimportant(self, slots: list[int], count: Ints) -> Tensor:
        """bool [B, G, T]: in every group the count [B, G] rows of the lowest metrics of its layer's
        leader, whose rows are in the same order."""
        layout = self.eviction.pool.layout
        hybrid, places = layout.spec.hybrid, layout.layer_groups
        assert hybrid is not None
        metrics, _, valid = self.eviction.tracked(*slots)
        each = [metrics[:, places[hybrid.leaders[x.layer]]].sum(1) for x in layout.groups]
        worth = torch.stack(each, 1).masked_fill(~valid, torch.inf)
        return lowest(worth, worth.sort().values, upload(count, worth.device))

    def _copy(self, layer: int, slots: Tensor, goes: Tensor, before: Ints) -> None:
        """Append the first numbers of rows goes [B, G, T] to the narrow ones of slots [B], behind
        the first before [B, G]; of so many rows at a time as NUMBERS allows."""
        pool, dtype = self.eviction.pool, self.eviction.attention.view.dtype
        assert pool.low_rank is not None
        where, page = pool.layout.layer_groups[layer], pool.layout.page
        wide, narrow = pool.pages(where), pool.low_rank.pages(where)
        specs = [x.spec.layers[layer] for x in (pool.layout, pool.low_rank.layout)]
        columns, lengths = upload(first_columns(*specs), pool.device), wide.lengths[slots]
        own = goes[:, where.start]
        target = upload(before[:, where.start], pool.device)[:, None] + own.cumsum(1) - 1
        step = max(NUMBERS // (len(slots) * specs[0].row_width * page), 1) * page
        for first in range(0, own.shape[1], step):
            part = own[:, first : first + step]
            sequence, row = part.nonzero(as_tuple=True)
            behind = wide._replace(tables=wide.tables[..., first // page :])
            rest = (lengths - first).clamp(0, part.shape[1])
            rows = gather(behind, slots, rest, dtype, part.shape[1]).rows[sequence, row]
            index = target[sequence, first + row][:, None].expand(-1, len(narrow.groups))
            append(narrow, rows[:, columns], slots[sequence], index)


def first_columns(wide: LayerSpec, narrow: LayerSpec) -> Ints:
    """Where a narrow row's numbers [S] are in the wide row [R] of a layer."""
    pairs = zip(wide.latents, narrow.latents, strict=True)
    starts = [(wide.columns(x).start, less.rank) for x, less in pairs]
    return np.concatenate([np.arange(start, start + rank) for start, rank in starts])
