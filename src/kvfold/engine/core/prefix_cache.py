"""Prefix caching: a request shares or copies the pages of a prefix that is cached already.

A request takes the longest cached chain of blocks, except for its last token, whose logits are
needed. Usually it shares the pages. It gets copies if its entries carry eviction metrics, which
belong to one sequence, or may be evicted. The blocks that it computes are cached in turn.
"""

from functools import lru_cache, partial
from itertools import groupby, takewhile
from weakref import WeakKeyDictionary

import numpy as np

from kvfold.cache.eviction.policy import Policy
from kvfold.cache.eviction.scorers.rescoring import as_rescoring
from kvfold.cache.pool import Pool
from kvfold.cache.prefix import BlockHasher, PrefixIndex
from kvfold.cache.sharing import CachedPages, SharingPool
from kvfold.engine.requests.packed import PackedContext
from kvfold.engine.requests.request import Request
from kvfold.layout.pages import Ints

Chain = list[CachedPages]
# What a policy's scorer may need (`Scorer.needs`) if prefixes are cached.
SUPPORTED_NEEDS = frozenset({"attention", "keys", "learned", "queries", "rescoring", "values"})


def unsupported_reason(
    pool: SharingPool, policy: Policy | None, *, windows: bool, repairs: bool = False
) -> str | None:
    """Why prefix caching would change the generated tokens, or None if it would not. windows: the
    model has sliding windows; repairs: remaining entries are fitted after an eviction."""
    if windows:
        return (
            "layers with a sliding window drop old entries, and move others, as a sequence goes on"
        )
    if pool.layout.residual:
        return "the last entries of a sequence wait unquantised in a page of its own"
    if pool.layout.spec.hybrid is not None:
        return "entries of unimportant tokens become low-rank and move, as a sequence goes on"
    if repairs:
        return "`repair` needs the queries of all tokens, also of those that would be skipped"
    if policy is None:
        return None
    if other := policy.scorer.needs - SUPPORTED_NEEDS:
        return f"{policy.name!r} reads {', '.join(sorted(other))} of tokens that would be skipped"
    if policy.window is None and policy.scorer.needs & {"attention", "queries"}:
        return f"{policy.name!r} scores by all queries, also of tokens that would be skipped"
    return None


class NoPrefixCache:
    """The interface of a prefix cache, and its behaviour if prefix caching is off.

    chunk: most tokens of one request in a step.
    num_queries, num_hits: tokens of requests that were admitted for the first time, and how many of
        these were cached.
    """

    num_queries = num_hits = 0

    def __init__(self, pool: Pool, chunk: int) -> None:
        self._pool, self._chunk = pool, chunk
        self._pages_needed = lru_cache(4096)(partial(_pages, pool, chunk))

    def lookup(self, request: Request) -> Chain | None:
        """The cached blocks that a waiting request can start with. None: a running request is
        computing the next one, so the waiting request should wait for it."""
        return []

    def pages_needed(self, chain: Chain, entries: int) -> Ints:
        """Pages per class [C] that a new sequence of `entries` token entries allocates if it starts
        with a chain."""
        return self._pages_needed(entries)

    def is_loaded(self, context: PackedContext) -> bool:
        """Whether the pool holds a packed context's pages."""
        return False

    def fits_empty_pool(self, request: Request, tokens: int) -> bool:
        """Whether `tokens` tokens of a request fit in an empty pool."""
        return self._pool.fits(tokens, self._chunk)

    def make_room(self, pages: Ints, chain: Chain) -> bool:
        """Drop cached pages, but none of the chain, until `pages` [C] pages are free. Returns
        whether that succeeded."""
        return self._pool.make_room(pages)

    def drop_unread(self) -> None:
        """Drop all cached pages that no running request reads."""

    def start(self, request: Request, chain: Chain) -> Ints | int:
        """Let a request that has a new slot start with a chain. Returns the pages [C] that were
        allocated."""
        return 0

    def publish(self, request: Request) -> None:
        """Cache the blocks that a request filled in a step."""

    def publish_scores(self, request: Request) -> None:
        """Cache the eviction scores of a request's re-scored segments."""

    def release(self, request: Request) -> None:
        """Forget a request that gives up its slot: it will not compute further blocks."""

    def reset(self) -> None:
        """Free all slots and drop all cached pages."""
        for slot in self._pool.open_slots:
            self._pool.free_slot(slot)


def _pages(pool: Pool, chunk: int, entries: int) -> Ints:
    """Pages per class [C] of a new sequence with `entries` token entries."""
    none = np.zeros((1, len(pool.layout.groups)), dtype=np.int64)
    return pool.pages_needed(none, [entries], chunk)


class PrefixCache(NoPrefixCache):
    """The cached prefixes of one pool.

    policy: the eviction policy. blocks: whether requests share the blocks that they compute, in
    addition to packed contexts.
    """

    def __init__(
        self, pool: SharingPool, policy: Policy | None = None, *, blocks: bool = True
    ) -> None:
        self.blocks = blocks
        self._contexts: WeakKeyDictionary[PackedContext, CachedPages] = WeakKeyDictionary()
        # With such a policy, reading a sequence changes the metrics of all its entries.
        self._updates_metrics = policy is not None and "attention" in policy.scorer.needs
        self.pool, self.page, self.index = pool, pool.layout.page, PrefixIndex(pool)
        self.copies = pool.layout.tracked
        # A policy's scores need the queries of a prompt's last tokens, which must be computed.
        # An exact window holds the last tokens as the model computes them.
        window = policy.window if policy else pool.layout.window
        self.num_recomputed = max(1, window or 1)
        # Tokens that are re-scored together, if their scores do not depend on later tokens. Else 0.
        scorer = as_rescoring(policy)
        self._segment = scorer.chunk if scorer is not None and not scorer.sees_suffix else 0
        self._segment *= self._segment % self.page == 0
        # Hash of a block that a running request will compute -> id of that request.
        self._in_progress: dict[bytes, int] = {}

    def lookup(self, request: Request) -> Chain | None:
        if request.context is not None:
            return [self._pages_of(request.context)]
        if not self._shares(request):
            return []
        hashes = self._hashes(request, 0, self._max_blocks(request))
        chain = self.index.longest_match(hashes)
        waits = len(chain) < len(hashes) and hashes[len(chain)] in self._in_progress
        return None if waits else chain

    def _shares(self, request: Request) -> bool:
        return self.blocks and request.cache.prefix_caching

    def _pages_of(self, context: PackedContext) -> CachedPages:
        """The pages of a packed context, which all its readers share."""
        if context not in self._contexts:
            self._contexts[context] = self.pool.placeholder(len(context.token_ids), context.lengths)
        return self._contexts[context]

    def is_loaded(self, context: PackedContext) -> bool:
        return context in self._contexts and self.pool.has(self._contexts[context])

    def _max_blocks(self, request: Request) -> int:
        """Most cached blocks that a request may start with."""
        return max(0, request.num_prefill - self.num_recomputed) // self.page

    def _hashes(self, request: Request, start: int, stop: int) -> list[bytes]:
        """Hashes of blocks start..stop of a request."""
        if request.block_hasher is None:
            request.block_hasher = BlockHasher(self.page, request.cache.cache_salt or "")
        return request.block_hasher.hashes(request.token_ids, start, stop)

    def pages_needed(self, chain: Chain, entries: int) -> Ints:
        pages = self.pool.cost(chain, entries - _num_tokens(chain), copy=self._copies(chain))
        absent = [x.pages for x in chain if not self.pool.has(x)]
        return pages + absent[0] if absent else pages

    def _copies(self, chain: Chain) -> bool:
        """Whether a sequence gets copies of a chain's pages."""
        return self._updates_metrics if chain and chain[0].compressed else self.copies

    def fits_empty_pool(self, request: Request, tokens: int) -> bool:
        if request.context is None:
            return self.pool.fits(tokens)
        x = self._pages_of(request.context)
        rest = self.pool.cost([x], tokens - x.tokens, copy=self._updates_metrics)
        return tokens <= self.pool.max_tokens and self.pool.fits_pages(x.pages + rest)

    def make_room(self, pages: Ints, chain: Chain) -> bool:
        return self.pool.make_room(pages, chain)

    def drop_unread(self) -> None:
        self.pool.drop_all()

    def start(self, request: Request, chain: Chain) -> Ints | int:
        allocated = self.pages_needed(chain, _num_tokens(chain))
        if request.context is not None:
            self._load(request.context)
        if chain:
            self.pool.start_from(request.open_slot, chain, copy=self._copies(chain))
            request.advance(_num_tokens(chain))
        shares = request.context is not None or self._shares(request)
        if shares and not request.num_restarts:
            request.num_cached = _num_tokens(chain)
            self.num_queries += request.num_prefill
            self.num_hits += request.num_cached
        if request.context is not None:
            request.num_scored = request.num_computed  # a packed context is not re-scored
        elif self._shares(request):
            count = self._num_scored_blocks(request, chain)
            request.num_scored = _num_tokens(chain[:count])
            if any(x.score_key for x in chain[count:]):  # scored before another next token
                self.pool.clear_scores(request.open_slot, count, len(chain) - count)
            self._announce(request, chain)
        return allocated

    def _num_scored_blocks(self, request: Request, chain: Chain) -> int:
        """Number of leading blocks whose cached scores are valid for this request: those of whole
        segments with the same tokens."""
        if not self._segment:
            return 0
        size, hashes = self._segment // self.page, self._hashes(request, 0, len(chain))
        starts = range(0, len(chain) - size + 1, size)
        valid = (
            all(x.score_key == hashes[i + size - 1] for x in chain[i : i + size]) for i in starts
        )
        return size * sum(takewhile(bool, valid))

    def _load(self, context: PackedContext) -> None:
        x = self._pages_of(context)
        if not self.pool.has(x):
            self.pool.load(x, context.pages)

    def _announce(self, request: Request, chain: Chain) -> None:
        """Register the blocks that a request will compute after its chain, so that others wait for
        them."""
        request.num_indexed = len(chain)
        for block_hash in self._hashes(request, len(chain), request.num_prefill // self.page):
            self._in_progress.setdefault(block_hash, request.id)

    def publish(self, request: Request) -> None:
        first, stop = request.num_indexed, request.num_computed // self.page
        if first is None or first == stop:
            return
        if (self.pool.host_lengths[request.open_slot] != request.num_computed).any():
            request.num_indexed = None  # entries were evicted, which others would have kept
            return
        hashes = self._hashes(request, first, stop)
        if self.copies:
            self._cache_copies(request, first, hashes)
        else:
            self._share(request.open_slot, hashes)
        self._forget_in_progress(request, hashes)
        request.num_indexed = stop

    def _share(self, slot: int, hashes: list[bytes]) -> None:
        """Cache the next private blocks of a slot. Replace those that are cached already."""
        for is_cached, some in groupby(hashes, key=lambda x: self.index.get(x) is not None):
            run = list(some)
            if is_cached:
                for block_hash in run:
                    block = self.index.get(block_hash)
                    assert block is not None
                    self.pool.deduplicate(slot, block)
            else:
                self.index.put(run, self.pool.share(slot, len(run)))

    def _cache_copies(self, request: Request, first: int, hashes: list[bytes]) -> None:
        """Cache copies of the blocks that are not cached yet, as far as memory allows."""
        number = first
        for is_cached, some in groupby(hashes, key=lambda x: self.index.get(x) is not None):
            run = list(some)
            if not is_cached:
                copies = self.pool.cache_copies(request.open_slot, number, len(run))
                self.index.put(run, copies)
            number += len(run)
        self.pool.touch(self.index.longest_match(self._hashes(request, 0, number)))

    def publish_scores(self, request: Request) -> None:
        if not self._segment or request.num_indexed is None or not self._shares(request):
            return
        if (self.pool.host_lengths[request.open_slot] != request.num_computed).any():
            return  # entries were evicted, and others moved
        size = self._segment // self.page
        num_blocks = min(request.num_scored // self.page, request.num_indexed) // size * size
        hashes, stale = self._hashes(request, 0, num_blocks), []
        for number, block_hash in enumerate(hashes):
            score_key = hashes[number // size * size + size - 1]
            block = self.index.get(block_hash)
            if block is not None and block.score_key != score_key:
                stale.append((number, block, score_key))
        self.pool.copy_scores(request.open_slot, stale)

    def _forget_in_progress(self, request: Request, hashes: list[bytes]) -> None:
        for block_hash in hashes:
            if self._in_progress.get(block_hash) == request.id:
                del self._in_progress[block_hash]

    def release(self, request: Request) -> None:
        if request.num_indexed is not None:
            stop = request.num_prefill // self.page
            self._forget_in_progress(request, self._hashes(request, request.num_indexed, stop))

    def reset(self) -> None:
        self._in_progress.clear()
        self._contexts.clear()
        self.index.clear()
        self.pool.reset()


def _num_tokens(chain: Chain) -> int:
    return chain[-1].tokens if chain else 0
