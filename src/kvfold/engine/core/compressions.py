"""Who is compressed, when, and who is read again first (KV-Compress §4.2.3)."""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakMethod

from kvfold.cache.eviction.compact import sequences_within
from kvfold.cache.pool import Pool, PoolFull
from kvfold.engine.core.prefixes import Prefixes
from kvfold.engine.requests.request import Request, Runner, Status
from kvfold.layout.pages import Ints


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When requests over their budget are compressed (KV-Compress §4.2.3), and when others are let
    in. Raises ValueError.

    after_prefill: each one once its prompt is in the cache. before_preempt: all, before pages are
    taken from one. every: all, every so many steps. uncompressed: all, once they have computed so
    many tokens, added up, since their last compressions.
    max_compressed_rows: most rows (over all groups) that one compression sorts; the rest waits for
    the next. One request is always taken, so that none waits for ever.
    admit_every: while some decode, others are let in at most once in so many steps, together: a
    step that reads prompts holds up all that decode. A prompt of a whole chunk need not wait.
    """

    after_prefill: bool = True
    before_preempt: bool = True
    every: int | None = None
    uncompressed: int | None = None
    max_compressed_rows: int | None = None
    admit_every: int = 1

    def __post_init__(self) -> None:
        for field in ("every", "uncompressed", "max_compressed_rows", "admit_every"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be at least 1, or None for never; got {value}")


class Compressions:
    """Turns of those that run: `running`, which its owner changes. fail ends one with an error.

    reading: those that are read again, to be compressed. step, of methods: the engine's, in which
    each is compressed once at most. num_done: requests; num_evicted: tokens, averaged over groups.
    """

    def __init__(
        self,
        runner: Runner,
        pool: Pool,
        prefixes: Prefixes,
        when: Schedule,
        running: list[Request],
        fail: Callable[[Request, Exception], None],
    ) -> None:
        self.runner, self.pool, self.prefixes = runner, pool, prefixes
        self.when, self.running = when, running
        self._fail = WeakMethod(fail)  # lest a cycle keep the owner's cache after its last use
        self.reading: list[Request] = []
        self.num_done, self.num_evicted = 0, 0.0

    def take_turns(self, step: int) -> None:
        """Compress those that are due."""
        self._compress(self._read_first(self._due(step), step), step)

    def free_rows(self, step: int) -> bool:
        """Compress all that can be, up to the cap; whether there were any."""
        return self._compress(self._compressible(self.running, step), step)

    def due_next(self, going: list[Request], step: int) -> bool:
        """Whether the schedule may compress some of these in the step behind this one."""
        when = self.when
        timed = (
            self.runner.demotes
            or when.uncompressed
            or (when.every and (step + 1) % when.every == 0)
        )
        due = [x for x in going if timed or x.wants_compression]
        if any(map(self.runner.needs_compression, due)):
            return True
        return when.after_prefill and bool(self._new(step))

    def leave(self, request: Request) -> None:
        self.reading = [x for x in self.reading if x is not request]

    def fail(self, request: Request, error: Exception) -> None:
        if (fail := self._fail()) is not None:
            fail(request, error)

    def _read_first(self, due: list[Request], step: int) -> list[Request]:
        """Those that can be compressed now. Others are read again first, a piece a step, so that
        nobody else waits for more than that; they themselves wait until they are compressed."""
        asked = list(dict.fromkeys([*self.reading, *due]))
        if unread := [x for x in asked if self.runner.unread(x)]:
            try:
                self._read(unread[0])
            except AssertionError:
                raise
            except Exception as error:
                self.fail(unread[0], error)
        alive = [x for x in asked if x.status is Status.RUNNING]
        self.reading = [x for x in alive if self.runner.unread(x)]
        return self._compressible([x for x in alive if x not in self.reading], step)

    def _read(self, request: Request) -> None:
        """A piece again."""
        self.runner.read(request)
        self.prefixes.scored(request)

    def _compressible(self, requests: list[Request], step: int) -> list[Request]:
        """Those over their budget that this step has not compressed yet."""
        return [
            request
            for request in requests
            if request.prefilled
            and request.last_compressed != step
            and self.runner.needs_compression(request)
        ]

    def _due(self, step: int) -> list[Request]:
        """Those that are compressed now. After a prefill only that request, or one that says so
        itself, so that its tokens do not depend on when others arrive."""
        when = self.when
        if self.runner.demotes:
            return self._compressible(self.running, step)
        if when.every and step % when.every == 0:
            return self._compressible(self.running, step)
        if when.uncompressed:
            found = self._compressible(self.running, step)
            if sum(request.num_uncompressed for request in found) >= when.uncompressed:
                return found
        new = self._new(step) if when.after_prefill else []
        own = self._compressible([x for x in self.running if x.wants_compression], step)
        return list(dict.fromkeys([*new, *own]))

    def _new(self, step: int) -> list[Request]:
        """Prefilled and over their budget since. One that was within it may grow over it."""
        new = [s for s in self.running if s.prefilled and s.last_compressed is None]
        found = self._compressible(new, step)
        for request in set(new).difference(found):
            request.last_compressed = step
        return found

    def _compress(self, requests: list[Request], step: int) -> bool:
        """Never compressed first, then least recently, up to the cap (KV-Compress §4.2.3)."""
        if not requests:
            return False
        chosen = self._capped(sorted(requests, key=lambda s: s.last_compressed or 0))
        self._evict(chosen)
        self.reading = [x for x in self.reading if x not in chosen]  # to its end by now
        for request in chosen:
            request.last_compressed = step
            request.num_compressed = request.num_computed
        return True

    def _evict(self, requests: list[Request]) -> None:
        """To each one's budget. Where that fails they are tried one by one, and those end for which
        it fails alone."""
        try:
            before = self._rows(requests)
            for request in requests:
                while self.runner.unread(request):
                    self._read(request)
            self.runner.compress(requests)
            self._count(requests, before)
            return
        except AssertionError:
            raise
        except Exception as error:
            if len(requests) == 1 and isinstance(error, PoolFull):
                return  # nowhere to copy pages that others read: it keeps more for now
            if len(requests) == 1:
                self.fail(requests[0], error)
                return
        for request in requests:
            self._evict([request])

    def _rows(self, requests: list[Request]) -> Ints:
        """In the cache, of every group [S, G], of both widths where there are two."""
        slots, narrow = [request.open_slot for request in requests], self.pool.low_rank
        rows: Ints = self.pool.host_lengths[slots]
        return rows if narrow is None else rows + narrow.host_lengths[slots]

    def _count(self, requests: list[Request], before: Ints) -> None:
        """Add what they lost."""
        lost = (before - self._rows(requests)).mean(1).tolist()
        self.num_done += len(requests)
        self.num_evicted += sum(lost)
        for request, tokens in zip(requests, lost, strict=True):
            request.num_evicted += tokens

    def _capped(self, order: list[Request]) -> list[Request]:
        limit = self.when.max_compressed_rows
        if limit is None:
            return order
        rows = self._rows(order).sum(1)
        return sequences_within(list(zip(order, rows.tolist(), strict=True)), limit) or order[:1]
