"""Evict cache entries: compress sequences to their budgets, and drop what left a sliding window.

Shapes: B sequences, G groups of all layers, T entries of the longest sequence, P entries per page.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kvfold.attention.paged import PagedAttention
from kvfold.cache.eviction.base import EntriesView
from kvfold.cache.eviction.budget import Budget
from kvfold.cache.eviction.compact import compaction
from kvfold.cache.eviction.policy import Policy
from kvfold.cache.eviction.select import scores, select
from kvfold.engine.requests.request import CacheParams, Request
from kvfold.engine.runner.repair import Remaining, Repair
from kvfold.layout.pages import Ints
from kvfold.ops.common.launch import upload
from kvfold.ops.store import move, read_tracked

T = TypeVar("T")
# Most entries of all groups compressed at once; temporaries take 40 B for each.
MAX_ENTRIES = 10_000_000


@dataclass(frozen=True)
class Held:
    """A sequence to compress.

    computed: number of tokens it has computed. protected: number of last tokens that are never
        evicted (None: as the policy says). context: number of tokens of the packed context that it
        begins with.
    """

    slot: int
    computed: int
    budget: Budget
    protected: int | None
    context: int = 0

    def recent(self, policy: Policy, page: int, num_groups: int) -> int:
        """Number of last tokens that are never evicted."""
        if self.protected is not None:
            policy = replace(policy, recent=self.protected, recent_share=0.0)
        return policy.protected_recent(self.budget.limit // num_groups * page)


class Eviction:
    """Evicts cache entries by a policy.

    policy: None: nothing is evicted but what left a sliding window.
    cache: budget of requests that set none.
    sliding: groups of each layer with a sliding window, and its size.
    repair: fits the remaining entries.
    """

    def __init__(
        self,
        attention: PagedAttention,
        policy: Policy | None,
        cache: CacheParams,
        sliding: Many[tuple[slice, int]],
        seed: int,
        repair: Repair | None = None,
    ) -> None:
        self.attention, view = attention, attention.view
        self.pool, self.spans = view.pool, view.spans
        self.policy, self.cache, self.sliding, self.repair = policy, cache, sliding, repair
        self.device = self.pool.device
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        groups = self.pool.layout.groups
        self.heads = [tuple(x.heads for x in groups[at]) for at in self.pool.layout.layer_groups]
        self.page_units = torch.tensor([x.layout.page_units for x in groups], device=self.device)
        self.layer_of_group = torch.tensor([x.layer for x in groups], device=self.device)

    def budget(self, request: Request) -> Budget | None:
        """The most that a request may keep; None: everything."""
        own_budget = request.cache
        limits = own_budget if own_budget.max_cache_tokens or own_budget.keep_tokens else self.cache
        page, groups = self.pool.layout.page, len(self.pool.layout.groups)
        if self.policy is None:
            return None
        if limits.max_cache_tokens:
            return Budget.max_cache_tokens(limits.max_cache_tokens, page, groups)
        if limits.keep_tokens:
            one = Budget.keep_tokens(limits.keep_tokens, [request.num_computed], page)
            return Budget(pages=one.limit * groups)
        return None

    def evicts(self, request: Request) -> bool:
        """Whether entries of a request may be evicted, so that attention to them must be observed.
        True without a policy, as something else decides then."""
        if self.policy is None:
            return True
        own_budget = request.cache
        limits = own_budget if own_budget.max_cache_tokens or own_budget.keep_tokens else self.cache
        keep = limits.keep_tokens
        return bool(limits.max_cache_tokens) or (keep is not None and keep < 1)

    def is_over(self, request: Request) -> bool:
        """Whether a request holds more pages than its budget."""
        budget = self.budget(request)
        if budget is None:
            return False
        lengths = self.pool.host_lengths[request.open_slot]
        return int((-(-lengths // self.pool.layout.page)).sum()) > budget.limit

    def compress(self, requests: list[Request]) -> None:
        """Evict entries of requests down to their budgets, and free the pages."""
        work = [
            Held(x.open_slot, x.num_computed, budget, x.cache.protected, x.context_length)
            for x in requests
            if (budget := self.budget(x)) is not None
        ]
        for chunk in chunks(work, self.pool.host_lengths[[x.slot for x in work]]):
            self.pool.truncate([x.slot for x in chunk], self._evict(chunk))

    def _evict(self, chunk: list[Held]) -> Tensor:
        """Evict entries and close the holes. Returns the number of remaining entries, int32 [B,
        G]."""
        pool, policy = self.pool, self.policy
        assert policy is not None
        page, groups = pool.layout.page, len(self.page_units)
        slots = upload(np.array([x.slot for x in chunk]), self.device)
        recent = np.array([x.recent(policy, page, groups) for x in chunk])
        evicted, _ = select(
            scores(policy, self._view(chunk, policy), upload(recent, self.device)),
            pool.lengths[slots],
            page,
            self.page_units,
            self.layer_of_group,
            policy,
            [x.budget for x in chunk],
        )
        fitted = []
        if self.repair is not None:
            for x, evicted_of in zip(chunk, evicted, strict=True):
                size = int(pool.host_lengths[x.slot].max())
                fitted.append(self.repair.fit(x.slot, x.computed, evicted_of[:, :size]))
        return self.close_holes(slots, evicted, fitted)

    def _view(self, chunk: list[Held], policy: Policy) -> EntriesView:
        """The entries of sequences, for the policy to score."""
        slots = [x.slot for x in chunk]
        metrics, positions, valid = self.tracked(*slots)
        lengths, computed = self.pool.host_lengths[slots], [x.computed for x in chunk]
        index = upload(np.array(slots), self.device)
        contexts = [x.context for x in chunk]
        return EntriesView(
            positions=positions,
            valid=valid,
            raw_metrics=metrics,
            sizes=lengths.max(1).tolist(),
            # Entries leave their order where others go, never before.
            in_order=bool((lengths == np.array(computed)[:, None]).all()),
            layers=self.heads,
            needs=policy.scorer.needs,
            source=self.attention.entries(index, valid.shape[2], computed, contexts),
            generator=self.generator,
            scale=self.pool.layout.spec.geometry.scaling,
            sinks=policy.sinks,
        )

    def tracked(self, *slots: int) -> tuple[Tensor, Tensor, Tensor]:
        """Metrics, positions and validity of the entries of sequences in all groups, [B, G, T]."""
        if self.attention.observer is not None:
            self.attention.observer.flush()
        index = upload(np.array(slots), self.device)
        size = int(self.pool.host_lengths[list(slots)].max())
        first, *others = (self._tracked_in(index, x, size) for x in self.spans)
        if not others:
            return first
        metrics, positions, valid = (torch.cat(x, 1) for x in zip(first, *others, strict=True))
        return metrics, positions, valid

    def _tracked_in(self, slots: Tensor, where: slice, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same in the groups `where` of slots [B]: [B, g, T]."""
        pages = self.pool.pages(where)
        return read_tracked(pages, slots, pages.lengths[slots], size)

    def slide(self, slot: int, position: int) -> None:
        """Free the pages that no query from `position` on attends to. P entries are dropped at a
        time, so that a layer is compacted at most once in P tokens."""
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
        pool.truncate(slot, self.close_holes(index, evicted))

    def close_holes(self, slots: Tensor, evicted: Tensor, fitted: Many[Remaining] = ()) -> Tensor:
        """Move the remaining entries of slots [B] together. Returns their numbers [B, G].

        evicted: bool [B, G, T]. fitted: entries to overwrite first. Nothing changes before all
            moves are planned, so a failure until then changes nothing.
        """
        pool, lengths = self.pool, self.pool.lengths[slots]
        plans = [compaction(evicted[:, where], lengths[:, where]) for where in self.spans]
        for x in fitted:
            x.write(self.attention.view)
        for where, ((sequence, *entries), _) in zip(self.spans, plans, strict=True):
            move(pool.pages(where), slots[sequence], *entries)
        return torch.cat([num_kept for _, num_kept in plans], 1)


def chunks(work: list[T], lengths: Ints) -> Iterator[list[T]]:
    """Split sequences with lengths [B, G] entries into batches of at most MAX_ENTRIES entries,
    padding included, or of one sequence."""
    chunk: list[T] = []
    widest = 0
    for item, num_entries in zip(work, lengths, strict=True):
        size = int(num_entries.max()) * len(num_entries)
        widest = max(widest, size)
        if chunk and widest * (len(chunk) + 1) > MAX_ENTRIES:
            yield chunk
            chunk, widest = [], size
        chunk.append(item)
    if chunk:
        yield chunk
