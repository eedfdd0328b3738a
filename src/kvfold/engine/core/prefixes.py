"""What requests begin with and another has computed: taken from pages instead of the model.

A request takes the longest known chain of blocks, but not its last token, whose logits are wanted.
Where rows carry metrics, which are a sequence's own, or are evicted, it gets copies of pages; else
it reads them where they are. What it computes itself others may take in turn.
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
KNOWN = frozenset(
    {"attention", "keys", "learned", "queries", "rescoring", "values"}
)  # needs of scorers


def refusal(
    pool: SharingPool, policy: Policy | None, *, windows: bool, repairs: bool = False
) -> str | None:
    """Why prefixes cannot be shared without changing tokens, if so. windows: layers have some;
    repairs: rows that stay are fitted."""
    if windows:
        return "layers with a sliding window drop old rows, and move others, as a sequence goes on"
    if pool.layout.residual:
        return "the last rows of a sequence wait unquantised in a page of its own"
    if pool.low_rank is not None:
        return "rows of unimportant tokens become narrow and move, as a sequence goes on"
    if repairs:
        return "rows are repaired for queries of all tokens, those that would be skipped too"
    if policy is None:
        return None
    if other := policy.scorer.needs - KNOWN:
        return f"{policy.name!r} reads {', '.join(sorted(other))} of tokens that would be skipped"
    if policy.window is None and policy.scorer.needs & {"attention", "queries"}:
        return f"{policy.name!r} scores rows by all queries, those that would be skipped too"
    return None


class Prefixes:
    """Of requests that share nothing. chunk: most tokens of one in a step.

    num_queries, num_hits: tokens of requests that were let in for the first time, and those of them
    that were known.
    """

    num_queries = num_hits = 0

    def __init__(self, pool: Pool, chunk: int) -> None:
        self._pool, self._chunk = pool, chunk
        self._cost = lru_cache(4096)(partial(_pages, pool, chunk))

    def find(self, request: Request) -> Chain | None:
        """What a waiting request would begin with; None: another computes what comes next in it,
        so that it had better wait."""
        return []

    def cost(self, chain: Chain, rows: int) -> Ints:
        """Pages [C] that a new sequence takes which begins with a chain and has so many rows."""
        return self._cost(rows)

    def holds(self, context: PackedContext) -> bool:
        """Whether the pool has a packed context's pages."""
        return False

    def fits(self, request: Request, tokens: int) -> bool:
        """Whether an empty pool holds so many tokens of a request."""
        return self._pool.fits(tokens, self._chunk)

    def has_free_pages(self, pages: Ints, chain: Chain) -> bool:
        """Whether so many pages [C] are free, or can be and leave the chain alone."""
        return self._pool.has_free_pages(pages)

    def begin(self, request: Request, chain: Chain) -> Ints | int:
        """A request has its slot, and begins with a chain: the pages [C] that this took."""
        return 0

    def computed(self, request: Request) -> None:
        """Others may have what came full in a step."""

    def scored(self, request: Request) -> None:
        """Others may have what was read again for a policy."""

    def leave(self, request: Request) -> None:
        """A request gives its slot back: what it has not computed does not come."""

    def reset(self) -> None:
        """Close all slots, and forget everything."""
        for slot in self._pool.open_slots:
            self._pool.free_slot(slot)


def _pages(pool: Pool, chunk: int, rows: int) -> Ints:
    """Of every class, for a new sequence of so many rows."""
    none = np.zeros((1, len(pool.layout.groups)), dtype=np.int64)
    return pool.pages_needed(none, [rows], chunk)


class PrefixCache(Prefixes):
    """The prefixes of one pool. policy: of what is evicted; blocks: whether requests share what
    they compute, beside packed contexts."""

    def __init__(
        self, pool: SharingPool, policy: Policy | None = None, *, blocks: bool = True
    ) -> None:
        self.blocks = blocks
        self._contexts: WeakKeyDictionary[PackedContext, CachedPages] = WeakKeyDictionary()
        # Then metrics of all rows change while a sequence reads them.
        self._watched = policy is not None and "attention" in policy.scorer.needs
        self.pool, self.page, self.index = pool, pool.layout.page, PrefixIndex(pool)
        self.copies = pool.layout.tracked
        # Scores come from a prompt's last queries, which have to be computed.
        self.computed_anew = max(1, (policy.window if policy else None) or 1)
        # Tokens that are read again together, and whose scores depend on nothing that follows.
        scorer = as_rescoring(policy)
        self._piece = scorer.chunk if scorer is not None and not scorer.sees_suffix else 0
        self._piece *= self._piece % self.page == 0
        self._coming: dict[bytes, int] = {}  # blocks that a running request will compute: its id

    def find(self, request: Request) -> Chain | None:
        if request.context is not None:
            return [self._pages_of(request.context)]
        if not self._shares(request):
            return []
        names = self._names(request, 0, self._most(request))
        chain = self.index.longest_match(names)
        waits = len(chain) < len(names) and names[len(chain)] in self._coming
        return None if waits else chain

    def _shares(self, request: Request) -> bool:
        return self.blocks and request.cache.prefix_caching

    def _pages_of(self, context: PackedContext) -> CachedPages:
        """Of a packed context, once for all who read it."""
        if context not in self._contexts:
            self._contexts[context] = self.pool.placeholder(len(context.token_ids), context.rows)
        return self._contexts[context]

    def holds(self, context: PackedContext) -> bool:
        return context in self._contexts and self.pool.has(self._contexts[context])

    def _most(self, request: Request) -> int:
        """Blocks that a request may take."""
        return max(0, len(request.token_ids) - self.computed_anew) // self.page

    def _names(self, request: Request, start: int, stop: int) -> list[bytes]:
        if request.names is None:
            request.names = BlockHasher(self.page, request.cache.cache_salt or "")
        return request.names.hashes(request.token_ids, start, stop)

    def cost(self, chain: Chain, rows: int) -> Ints:
        pages = self.pool.cost(chain, rows - _tokens(chain), copy=self._copied(chain))
        absent = [x.pages for x in chain if not self.pool.has(x)]
        return pages + absent[0] if absent else pages

    def _copied(self, chain: Chain) -> bool:
        """Whether a sequence gets copies of a chain."""
        return self._watched if chain and chain[0].compressed else self.copies

    def fits(self, request: Request, tokens: int) -> bool:
        if request.context is None:
            return self.pool.fits(tokens)
        x = self._pages_of(request.context)
        rest = self.pool.cost([x], tokens - x.tokens, copy=self._watched)
        return tokens <= self.pool.max_tokens and self.pool.fits_pages(x.pages + rest)

    def has_free_pages(self, pages: Ints, chain: Chain) -> bool:
        return self.pool.has_free_pages(pages, chain)

    def begin(self, request: Request, chain: Chain) -> Ints | int:
        taken = self.cost(chain, _tokens(chain))
        if request.context is not None:
            self._load(request.context)
        if chain:
            self.pool.start_from(request.open_slot, chain, copy=self._copied(chain))
            request.advance(_tokens(chain))
        shares = request.context is not None or self._shares(request)
        if shares and not request.num_restarts:
            request.num_cached = _tokens(chain)
            self.num_queries += request.num_prefill
            self.num_hits += request.num_cached
        if request.context is not None:
            request.num_scored = request.num_computed  # nobody reads a packed context again
        elif self._shares(request):
            count = self._scored(request, chain)
            request.num_scored = _tokens(chain[:count])
            if any(x.score_key for x in chain[count:]):  # as another's next tokens had it
                self.pool.clear_scores(request.open_slot, count, len(chain) - count)
            self._announce(request, chain)
        return taken

    def _scored(self, request: Request, chain: Chain) -> int:
        """Leading blocks in whole pieces that were read as they stand in this request."""
        if not self._piece:
            return 0
        size, names = self._piece // self.page, self._names(request, 0, len(chain))
        pieces = range(0, len(chain) - size + 1, size)
        own = (all(x.score_key == names[i + size - 1] for x in chain[i : i + size]) for i in pieces)
        return size * sum(takewhile(bool, own))

    def _load(self, context: PackedContext) -> None:
        x = self._pages_of(context)
        if not self.pool.has(x):
            self.pool.load(x, context.pages)

    def _announce(self, request: Request, chain: Chain) -> None:
        """What it computes behind a chain others may have."""
        request.num_indexed = len(chain)
        for name in self._names(request, len(chain), request.num_prefill // self.page):
            self._coming.setdefault(name, request.id)

    def computed(self, request: Request) -> None:
        first, stop = request.num_indexed, request.num_computed // self.page
        if first is None or first == stop:
            return
        if (self.pool.host_lengths[request.open_slot] != request.num_computed).any():
            request.num_indexed = None  # rows were evicted: others would have kept them
            return
        names = self._names(request, first, stop)
        if self.copies:
            self._copy(request, first, names)
        else:
            self._share(request.open_slot, names)
        self._forget(request, names)
        request.num_indexed = stop

    def _share(self, slot: int, names: list[bytes]) -> None:
        """Blocks of known names are read instead of the slot's own."""
        for known, some in groupby(names, key=lambda x: self.index.get(x) is not None):
            own = list(some)
            if known:
                for name in own:
                    block = self.index.get(name)
                    assert block is not None
                    self.pool.deduplicate(slot, block)
            else:
                self.index.put(own, self.pool.share(slot, len(own)))

    def _copy(self, request: Request, first: int, names: list[bytes]) -> None:
        """Copies of blocks whose names are not known, as far as there is room."""
        number = first
        for known, some in groupby(names, key=lambda x: self.index.get(x) is not None):
            own = list(some)
            if not known:
                self.index.put(own, self.pool.cache_copies(request.open_slot, number, len(own)))
            number += len(own)
        self.pool.touch(self.index.longest_match(self._names(request, 0, number)))

    def scored(self, request: Request) -> None:
        if not self._piece or request.num_indexed is None or not self._shares(request):
            return
        if (self.pool.host_lengths[request.open_slot] != request.num_computed).any():
            return  # rows were evicted, and others moved
        size = self._piece // self.page
        whole = min(request.num_scored // self.page, request.num_indexed) // size * size
        names, stale = self._names(request, 0, whole), []
        for number, name in enumerate(names):
            piece = names[number // size * size + size - 1]
            block = self.index.get(name)
            if block is not None and block.score_key != piece:
                stale.append((number, block, piece))
        self.pool.copy_scores(request.open_slot, stale)

    def _forget(self, request: Request, names: list[bytes]) -> None:
        for name in names:
            if self._coming.get(name) == request.id:
                del self._coming[name]

    def leave(self, request: Request) -> None:
        if request.num_indexed is not None:
            stop = request.num_prefill // self.page
            self._forget(request, self._names(request, request.num_indexed, stop))

    def reset(self) -> None:
        self._coming.clear()
        self._contexts.clear()
        self.index.clear()
        self.pool.reset()


def _tokens(chain: Chain) -> int:
    return chain[-1].tokens if chain else 0
