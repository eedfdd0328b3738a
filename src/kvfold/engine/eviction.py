"""Rows that go, and the pages that come free: sequences brought to their budgets, and what slid
out of its layer's window.

Shapes: B sequences, G groups of all layers, T rows of the longest, P rows a page.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvfold.cache.eviction import select as evict
from kvfold.cache.eviction.policies import Budget, Policy
from kvfold.cache.slabs import upload
from kvfold.engine.paged import Attention
from kvfold.engine.request import CacheParams, Request
from kvfold.ops.store import move, read_tracked

ROWS = 10_000_000  # of all groups that are compressed at once, with some 40 B each of temporaries

Evicted = tuple[Request, Budget]


class Eviction:
    """policy: None evicts nothing but what slides; cache: budget of requests that set none of their
    own; sliding: groups of a layer with a window, and the window."""

    def __init__(
        self,
        attention: Attention,
        policy: Policy | None,
        cache: CacheParams,
        sliding: Many[tuple[slice, int]],
        seed: int,
    ) -> None:
        self.attention, self.setup, self.pool = attention, attention.setup, attention.setup.pool
        self.policy, self.cache, self.sliding = policy, cache, sliding
        self.device = self.pool.device
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        groups = self.pool.layout.groups
        self.page_units = self._tensor([group.layout.page_units for group in groups])
        self.layer_of_group = self._tensor([group.layer for group in groups])

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def budget(self, sequence: Request) -> Budget | None:
        """What a sequence may keep; None: everything."""
        own = sequence.cache
        limits = own if own.max_cache_tokens or own.keep_tokens else self.cache
        page, groups = self.pool.layout.page, len(self.pool.layout.groups)
        if self.policy is None:
            return None
        if limits.max_cache_tokens:
            return Budget.max_cache_tokens(limits.max_cache_tokens, page, groups)
        if limits.keep_tokens:
            one = Budget.keep_tokens(limits.keep_tokens, [sequence.num_computed], page)
            return Budget(pages=one.limit * groups)
        return None

    def is_over(self, sequence: Request) -> bool:
        """Whether a sequence has more pages than it may keep."""
        budget = self.budget(sequence)
        if budget is None:
            return False
        lengths = self.pool.host_lengths[sequence.open_slot]
        return int((-(-lengths // self.pool.layout.page)).sum()) > budget.limit

    def compress(self, sequences: list[Request]) -> None:
        """Evict to each one's budget and give the pages back to the pool."""
        work = [(x, budget) for x in sequences if (budget := self.budget(x)) is not None]
        kept = [self._evict(chunk) for chunk in self._chunks(work)]
        if kept:
            self.pool.shrink([x.open_slot for x, _ in work], torch.cat(kept))

    def _chunks(self, work: list[Evicted]) -> Iterator[list[Evicted]]:
        """What is compressed at once: at most ROWS rows, padding included, or one sequence."""
        chunk: list[Evicted] = []
        widest = 0
        for item in work:
            rows = self.pool.host_lengths[item[0].open_slot]
            widest = max(widest, int(rows.max()) * len(rows))
            if chunk and widest * (len(chunk) + 1) > ROWS:
                yield chunk
                chunk, widest = [], int(rows.max()) * len(rows)
            chunk.append(item)
        if chunk:
            yield chunk

    def _evict(self, chunk: list[Evicted]) -> Tensor:
        """Move what is kept together; rows kept, int32 [B, G]."""
        pool, policy, sequences = self.pool, self.policy, [x for x, _ in chunk]
        assert policy is not None
        slots = upload(np.array([x.open_slot for x in sequences]), self.device)
        evicted, _ = evict.select(
            self._scores(chunk, policy),
            pool.lengths[slots],
            pool.layout.page,
            self.page_units,
            self.layer_of_group,
            policy,
            [budget for _, budget in chunk],
        )
        return self._move(slots, evicted)

    def _scores(self, chunk: list[Evicted], policy: Policy) -> Tensor:
        """What their rows are worth, fp32 [B, G, T]."""
        sequences, page = [x for x, _ in chunk], self.pool.layout.page
        tokens = [budget.limit // len(self.page_units) * page for _, budget in chunk]
        slots = [x.open_slot for x in sequences]
        lengths = self.pool.host_lengths[slots]
        computed = np.array([[x.num_computed] for x in sequences])
        pairs = zip(sequences, tokens, strict=True)
        recent = np.array([_recent(x, policy, most) for x, most in pairs])
        return evict.scores(
            *self.tracked(*slots),
            policy,
            upload(recent, self.device),
            lengths.max(1).tolist(),
            self.generator,
            # Rows leave their order where others go, never before.
            in_order=bool((lengths == computed).all()),
        )

    def tracked(self, *slots: int) -> tuple[Tensor, Tensor, Tensor]:
        """Metrics, positions and validity of sequences' rows in all groups, [B, G, T]."""
        if self.attention.observer is not None:
            self.attention.observer.flush()
        index = upload(np.array(slots), self.device)
        size = int(self.pool.host_lengths[list(slots)].max())
        first, *others = (self._tracked_in(index, x, size) for x in self.setup.spans)
        if not others:
            return first
        metrics, positions, valid = (torch.cat(x, 1) for x in zip(first, *others, strict=True))
        return metrics, positions, valid

    def _tracked_in(self, slots: Tensor, where: slice, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same of the groups `where` of slots [B]: [B, g, T]."""
        pages = self.pool.pages(where)
        return read_tracked(pages, slots, pages.lengths[slots], size)

    def slide(self, slot: int, position: int) -> None:
        """Free the pages of rows that no query from `position` on sees. Rows go P at a time, so
        that a layer is compacted once in P tokens at most."""
        pool, page = self.pool, self.pool.layout.page
        lengths = pool.host_lengths[slot]
        cuts = []
        for where, window in self.sliding:
            length = int(lengths[where.start])
            if behind := max(length - (window - 1), 0) // page * page:
                cuts.append((where, position - length + behind))
        if not cuts:
            return
        size, index = int(lengths.max()), upload(np.array([slot]), self.device)
        evicted = torch.zeros(1, len(lengths), size, dtype=torch.bool, device=self.device)
        for where, first in cuts:
            _, positions, valid = self._tracked_in(index, where, size)
            evicted[:, where] = valid & (positions < first)
        pool.shrink(slot, self._move(index, evicted))

    def _move(self, slots: Tensor, evicted: Tensor) -> Tensor:
        """Close the holes of the sequences slots [B]: evicted bool [B, G, T]; rows kept [B, G]."""
        pool, setup, kept = self.pool, self.setup, []
        lengths = pool.lengths[slots]
        for where in setup.spans:
            moves, left = evict.compaction(evicted[:, where], lengths[:, where])
            sequence, *rows = moves
            move(pool.pages(where), slots[sequence], *rows)
            kept.append(left)
        return torch.cat(kept, 1)


def _recent(sequence: Request, policy: Policy, tokens: int) -> int:
    """Last tokens that are never evicted of a sequence that may keep `tokens` rows a group."""
    own = sequence.cache.protected
    if own is not None:
        policy = replace(policy, recent=own, recent_share=0.0)
    return policy.protected_recent(tokens)
