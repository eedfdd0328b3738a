"""Demote the oldest pages of a request to fewer bits where memory is short, so that no request is
pre-empted and computed again. (`engine.runner.demotion` is another thing: it makes entries of
unimportant tokens low-rank.)

A coarse page takes the place of `ratio` pages of the pool and has as many bytes as one of them.
Shapes: T entries that are demoted, R numbers of an entry, G groups of a layer.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvfold.attention.metadata import PoolView
from kvfold.cache.pool import CoarsePool
from kvfold.engine.requests.request import Request
from kvfold.ops.common.launch import upload
from kvfold.ops.store import append, gather

KEPT = 2  # newest whole pages of a request, which stay as they are
MOST = 4  # coarse pages of each group that are filled at once


@dataclass(frozen=True)
class PageDemoter:
    """Demotes pages of a pool that has a coarse pool of fewer bits."""

    view: PoolView

    @property
    def coarse(self) -> CoarsePool:
        coarse = self.view.pool.coarse
        assert coarse is not None, "the pool has no coarse entries"
        return coarse

    @property
    def least_tokens(self) -> int:
        """Tokens of the shortest sequence that can be demoted."""
        return self.coarse.layout.page + KEPT * self.view.layout.page

    def num_pages(self, request: Request) -> int:
        """Number of coarse pages of each group that a request's entries can be demoted to: 0 before
        its prompt is computed. The prefix that others share, and the newest pages, stay."""
        if not request.prefilled:
            return 0
        _, pages = self.view.pool.demotable(request.open_slot)
        ratio = self.coarse.layout.page // self.view.layout.page
        return max(pages - KEPT, 0) // ratio

    def demote(self, request: Request) -> None:
        """Demote the request's oldest pages, MOST coarse pages at once, and free the rest of their
        bytes. Entries are quantised again from the numbers that were stored."""
        slot, pool = request.open_slot, self.view.pool
        first, _ = pool.demotable(slot)
        pages = min(self.num_pages(request), MOST)
        entries = self._read(slot, first, pages * self.coarse.layout.page)
        num_before = int(self.coarse.host_lengths[slot, 0])
        pool.demote(slot, first, pages)
        for where, rows in zip(pool.layout.layer_groups, entries, strict=True):
            stored = self.coarse.pages(where)
            index = num_before + torch.arange(len(rows), device=pool.device)
            slots = torch.full_like(index, slot)
            append(stored, rows, slots, index[:, None].expand(-1, len(stored.groups)))

    def _read(self, slot: int, first: int, tokens: int) -> list[Tensor]:
        """The entries of each layer, from page number `first` of its groups on: [T, R]."""
        pool, entries = self.view.pool, []
        slots = upload(np.array([slot]), pool.device)
        for where in pool.layout.layer_groups:
            stored = pool.pages(where)
            stored = stored._replace(tables=stored.tables[..., first:])
            lengths = torch.full((1, len(stored.groups)), tokens, device=pool.device)
            entries.append(gather(stored, slots, lengths.int(), self.view.dtype, tokens).rows[0])
        return entries
