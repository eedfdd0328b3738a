"""Choose which running requests are compressed in a step, and when (KV-Compress §4.2.3)."""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakMethod

from kvfold.cache.eviction.compact import sequences_within
from kvfold.cache.pool import Pool, PoolFull
from kvfold.engine.core.prefix_cache import NoPrefixCache
from kvfold.engine.requests.request import Request, Runner, Status
from kvfold.layout.pages import Ints


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When requests above their cache budget are compressed, and how often waiting ones are
    admitted. Raises ValueError.

    after_prefill: compress a request once its prompt is in the cache.
    before_preempt: compress all requests before one is pre-empted.
    every: compress all requests every so many steps.
    uncompressed: compress all requests once they have computed so many tokens in total since their
        last compression.
    max_compressed_entries: most cache entries (over all groups) that one compression sorts; other
        requests wait for the next one. At least one request is compressed, so that none starves.
    admit_every: while requests decode, admit waiting ones at most once in so many steps, together,
        because a step with prompt tokens delays every decode. A prompt at least as long as a chunk
        does not wait.
    """

    after_prefill: bool = True
    before_preempt: bool = True
    every: int | None = None
    uncompressed: int | None = None
    max_compressed_entries: int | None = None
    admit_every: int = 1

    def __post_init__(self) -> None:
        for field in ("every", "uncompressed", "max_compressed_entries", "admit_every"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be at least 1, or None for never; got {value}")


class CompressionScheduler:
    """Compresses the running requests that are due.

    running: the scheduler's list, which the scheduler changes. fail: ends a request with an error.
    rescoring: requests that must be re-scored before they can be compressed (see
        `Runner.needs_rescoring`); they do not decode until then.
    num_done: compressed requests so far; num_evicted: evicted tokens, averaged over groups.

    Methods take `step`, the number of the engine's step: a request is compressed at most once in
    each.
    """

    def __init__(
        self,
        runner: Runner,
        pool: Pool,
        prefix_cache: NoPrefixCache,
        when: Schedule,
        running: list[Request],
        fail: Callable[[Request, Exception], None],
    ) -> None:
        self.runner, self.pool, self.prefix_cache = runner, pool, prefix_cache
        self.when, self.running = when, running
        self._fail = WeakMethod(fail)  # a reference cycle would keep the cache alive
        self.rescoring: list[Request] = []
        self.num_done, self.num_evicted = 0, 0.0

    def compress_due(self, step: int) -> None:
        """Compress the requests that are due in this step."""
        self._compress(self._rescore_first(self._due(step), step), step)

    def free_memory(self, step: int) -> bool:
        """Compress all requests above their budgets, up to the cap. Whether there were any."""
        return self._compress(self._compressible(self.running, step), step)

    def may_compress_next(self, requests: list[Request], step: int) -> bool:
        """Whether some of these requests may be compressed in the step after this one."""
        when = self.when
        all_due = (
            self.runner.demotes
            or when.uncompressed
            or (when.every and (step + 1) % when.every == 0)
        )
        due = [x for x in requests if all_due or x.wants_compression]
        if any(map(self.runner.needs_compression, due)):
            return True
        return when.after_prefill and bool(self._newly_prefilled(step))

    def remove(self, request: Request) -> None:
        """Forget a request that no longer runs."""
        self.rescoring = [x for x in self.rescoring if x is not request]

    def fail(self, request: Request, error: Exception) -> None:
        """End a request with an error."""
        if (fail := self._fail()) is not None:
            fail(request, error)

    def _rescore_first(self, due: list[Request], step: int) -> list[Request]:
        """The due requests that can be compressed now. The others must be re-scored first: one
        prompt segment of one request per step, so that other requests are not delayed by more."""
        requests = list(dict.fromkeys([*self.rescoring, *due]))
        if unscored := [x for x in requests if self.runner.needs_rescoring(x)]:
            try:
                self._rescore(unscored[0])
            except AssertionError:
                raise
            except Exception as error:
                self.fail(unscored[0], error)
        alive = [x for x in requests if x.status is Status.RUNNING]
        self.rescoring = [x for x in alive if self.runner.needs_rescoring(x)]
        return self._compressible([x for x in alive if x not in self.rescoring], step)

    def _rescore(self, request: Request) -> None:
        """Re-score one prompt segment, and share its scores."""
        self.runner.rescore_segment(request)
        self.prefix_cache.publish_scores(request)

    def _compressible(self, requests: list[Request], step: int) -> list[Request]:
        """The requests above their budgets that this step has not compressed yet."""
        return [
            request
            for request in requests
            if request.prefilled
            and request.last_compressed != step
            and self.runner.needs_compression(request)
        ]

    def _due(self, step: int) -> list[Request]:
        """The requests to compress in this step. After a prefill only that request, or one with its
        own schedule (`CacheParams.every`), so that a request's tokens do not depend on when others
        arrive."""
        when = self.when
        if self.runner.demotes:
            return self._compressible(self.running, step)
        if when.every and step % when.every == 0:
            return self._compressible(self.running, step)
        if when.uncompressed:
            compressible = self._compressible(self.running, step)
            if sum(request.num_uncompressed for request in compressible) >= when.uncompressed:
                return compressible
        new = self._newly_prefilled(step) if when.after_prefill else []
        scheduled = self._compressible([x for x in self.running if x.wants_compression], step)
        return list(dict.fromkeys([*new, *scheduled]))

    def _newly_prefilled(self, step: int) -> list[Request]:
        """The prefilled requests that are above their budgets and were never compressed. Those
        within their budgets count as compressed, and may grow above them."""
        new = [s for s in self.running if s.prefilled and s.last_compressed is None]
        compressible = self._compressible(new, step)
        for request in set(new).difference(compressible):
            request.last_compressed = step
        return compressible

    def _compress(self, requests: list[Request], step: int) -> bool:
        """Compress requests up to the cap: first those never compressed, then those compressed
        least recently (KV-Compress §4.2.3). Whether there were any."""
        if not requests:
            return False
        chosen = self._within_cap(sorted(requests, key=lambda s: s.last_compressed or 0))
        self._evict(chosen)
        self.rescoring = [x for x in self.rescoring if x not in chosen]  # `_evict` re-scored them
        for request in chosen:
            request.last_compressed = step
            request.num_compressed = request.num_computed
        return True

    def _evict(self, requests: list[Request]) -> None:
        """Compress requests to their budgets. If that fails, compress them one by one, and end
        those for which it fails again."""
        try:
            before = self._num_entries(requests)
            for request in requests:
                while self.runner.needs_rescoring(request):
                    self._rescore(request)
            self.runner.compress(requests)
            self._count(requests, before)
            return
        except AssertionError:
            raise
        except Exception as error:
            if len(requests) == 1 and isinstance(error, PoolFull):
                return  # no free pages for copies of shared ones: it stays above its budget
            if len(requests) == 1:
                self.fail(requests[0], error)
                return
        for request in requests:
            self._evict([request])

    def _num_entries(self, requests: list[Request]) -> Ints:
        """Number of cache entries of each group [S, G], those of the coarse pool included."""
        slots, coarse = [request.open_slot for request in requests], self.pool.coarse
        entries: Ints = self.pool.host_lengths[slots]
        return entries if coarse is None else entries + coarse.host_lengths[slots]

    def _count(self, requests: list[Request], before: Ints) -> None:
        """Add the evicted tokens to the counters."""
        evicted = (before - self._num_entries(requests)).mean(1).tolist()
        self.num_done += len(requests)
        self.num_evicted += sum(evicted)
        for request, tokens in zip(requests, evicted, strict=True):
            request.num_evicted += tokens

    def _within_cap(self, order: list[Request]) -> list[Request]:
        """The first requests that have at most `max_compressed_entries` entries together."""
        limit = self.when.max_compressed_entries
        if limit is None:
            return order
        entries = self._num_entries(order).sum(1)
        items = list(zip(order, entries.tolist(), strict=True))
        return sequences_within(items, limit) or order[:1]
