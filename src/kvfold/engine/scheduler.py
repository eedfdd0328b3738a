"""The order of the engine: tokens of the next forward pass, and who keeps pages.

A request waits, runs (it owns a slot of the pool: it prefills in chunks, then decodes a token a
step) and finishes. Pages are the only currency. When they run out, requests are compressed, then
the youngest is pre-empted: its pages are freed, its outputs kept, and all it knows is prefilled
again later. Without eviction it then gets the very tokens it would have got; with eviction they may
differ, because a prompt with its outputs is not compressed to the rows that were evicted before.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvfold.cache.eviction.compact import capped
from kvfold.cache.pool import Pool
from kvfold.engine.request import Batch, FinishReason, Request, Runner, Status

logger = logging.getLogger(__name__)
Plan = dict[Request, int]  # tokens each request computes in the coming step, in order


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When requests over their budget are compressed (KV-Compress §4.2.3). Raises ValueError.

    after_prefill: each one once its prompt is in the cache. before_preempt: all, before pages are
    taken from one. every: all, every so many steps. uncompressed: all, once they have computed so
    many tokens, added up, since their last compressions.
    max_compressed_rows: most rows (over all groups) that one compression sorts; the rest waits for
    the next. One request is always taken, so that none waits for ever.
    """

    after_prefill: bool = True
    before_preempt: bool = True
    every: int | None = None
    uncompressed: int | None = None
    max_compressed_rows: int | None = None

    def __post_init__(self) -> None:
        for field in ("every", "uncompressed", "max_compressed_rows"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be at least 1, or None for never; got {value}")


class Scheduler:
    """First come, first served: decodes of all running requests, then prefill chunks.

    chunk: most tokens of one request in a step. max_batch_tokens: most tokens in a step, at least
    one a slot, so that every running request decodes. headroom: tokens by which all that run must
    be able to grow before another is admitted, lest admission leads to pre-emption.
    Raises ValueError.
    """

    def __init__(
        self,
        runner: Runner,
        pool: Pool,
        *,
        chunk: int = 512,
        max_batch_tokens: int = 2048,
        headroom: int = 32,
        schedule: Schedule | None = None,
    ) -> None:
        if chunk < 1 or headroom < 0:
            raise ValueError(f"chunk must be at least 1 and headroom 0; got {chunk} and {headroom}")
        if max_batch_tokens < pool.num_slots:
            raise ValueError(
                f"max_batch_tokens must be at least the pool's num_slots={pool.num_slots}, so that "
                f"every sequence can decode; got {max_batch_tokens}: raise it or lower num_slots"
            )
        self.runner, self.pool, self.when = runner, pool, schedule or Schedule()
        self.chunk, self.max_batch_tokens, self.headroom = chunk, max_batch_tokens, headroom
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished: list[Request] = []  # until the engine has delivered them
        self.num_steps = 0
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue it. Raises ValueError if the empty pool could not hold its prompt and a decode."""
        needed = request.num_prompt + (request.sampling.max_new_tokens > 1)
        if not self.pool.fits(needed):
            raise ValueError(
                f"prompt_ids: {request.num_prompt} tokens need room for {needed} in the cache, "
                f"whose capacity is {self.pool.capacity()} a sequence: shorten the prompt, "
                "enlarge the pool, or compress the model further"
            )
        self.waiting.append(request)

    def schedule(self) -> Batch:
        """Compress what is due, make room, and give pages to the coming step's tokens."""
        self.num_steps += 1
        self._compress(self._due())
        self._make_room()
        plan = self._first()
        self._continue_prefills(plan)
        self._admit(plan)
        self.pool.extend([request.open_slot for request in plan], list(plan.values()))
        return Batch(chunks=tuple(request.next_chunk(tokens) for request, tokens in plan.items()))

    def adopt(self, request: Request, computed: int) -> None:
        """Run a waiting request as if its first `computed` tokens had been computed: their rows get
        pages, which others fill."""
        self.waiting.remove(request)
        request.run(self.pool.open())
        self.pool.extend([request.open_slot], [computed])
        request.prefill_until(computed)
        request.advance(computed)
        self.running.append(request)

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a waiting or running request and return its pages."""
        if request.status is Status.RUNNING:
            self._release(request)
        else:
            self.waiting.remove(request)
        request.finish(reason, error)
        self.finished.append(request)

    @contextmanager
    def guard(self, requests: Iterable[Request]) -> Iterator[None]:
        """A failure inside ends these requests. Our own bugs and interrupts go on from here."""
        try:
            yield
        except BaseException as error:
            for request in requests:
                if request.status is not Status.FINISHED:  # a hook may have cancelled it
                    self.finish(request, "error", f"{type(error).__name__}: {error}")
            if isinstance(error, AssertionError) or not isinstance(error, Exception):
                raise
            logger.exception("a batch failed; its requests end with an error")

    # Room ---------------------------------------------------------------------------------------

    def _first(self) -> Plan:
        """Those that must go on: all decodes; where there is none, the oldest prefill."""
        decodes = {request: 1 for request in self.running if request.prefilled}
        return decodes or {s: self._chunk(s, {}) for s in self.running[:1]}

    def _make_room(self) -> None:
        """Compress, end or pre-empt until what must go on has pages."""
        while self.running:
            outgrown = self._outgrown()
            if not outgrown and self._can_extend(self._first()):
                break
            if self.when.before_preempt and self._compress(self._compressible(self.running)):
                continue
            if outgrown:
                self.finish(outgrown[0], "length")
            else:
                self._preempt()

    def _outgrown(self) -> list[Request]:
        """Decoding requests as long as one may be: no pre-emption would get them another row."""
        decoding = [request for request in self.running if request.prefilled]
        rows = self.pool.host_lengths[[request.open_slot for request in decoding]]
        full = rows.max(1) >= self.pool.max_tokens
        return [decoding[i] for i in full.nonzero()[0]]

    def _preempt(self) -> None:
        """Take the pages of the youngest that can be recomputed; if none can, end the youngest."""
        victim = max(self.running, key=lambda s: (self.pool.fits(len(s.token_ids)), s.id))
        if not self.pool.fits(len(victim.token_ids)):  # eviction let it grow longer than the pool
            self.finish(victim, "length")
            return
        self._release(victim)
        victim.restart()
        self.waiting.appendleft(victim)
        self.num_preemptions += 1

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.close(request.open_slot)

    def _can_extend(self, plan: Plan) -> bool:
        return self.pool.can_extend([request.open_slot for request in plan], list(plan.values()))

    # Prefill ------------------------------------------------------------------------------------

    def _chunk(self, request: Request, plan: Plan) -> int:
        """Tokens of its next chunk beside `plan`."""
        most = self.pool.layout.most_at(request.num_computed)
        left = self.max_batch_tokens - sum(plan.values())
        return min(self.chunk, request.num_pending, left, most)

    def _continue_prefills(self, plan: Plan) -> None:
        for request in self.running:
            if request.prefilled or request in plan:
                continue
            tokens = self._chunk(request, plan)
            if tokens < 1 or not self._can_extend({**plan, request: tokens}):
                return
            plan[request] = tokens

    def _admit(self, plan: Plan) -> None:
        """Let requests in while slots, tokens and pages for all they and the others need last."""
        while self.waiting and len(self.running) < self.pool.num_slots:
            request = self.waiting[0]
            tokens = self._chunk(request, plan)
            if tokens < 1 or not self._open(request):
                return
            self.running.append(self.waiting.popleft())
            plan[request] = tokens

    def _open(self, request: Request) -> bool:
        """A slot, if all pending tokens of all that run and the headroom fit beside it."""
        request.run(self.pool.open())
        ahead = {s: s.rows_ahead(self.headroom) for s in (*self.running, request)}
        need = ahead if self.running else {request: request.num_pending}
        if self._can_extend(need):
            return True
        assert self.running, f"an empty pool has no room for {need[request]} tokens"
        self.pool.close(request.open_slot)
        request.restart()
        return False

    # Compression --------------------------------------------------------------------------------

    def _compressible(self, requests: list[Request]) -> list[Request]:
        """Those over their budget that this step has not compressed yet."""
        return [
            request
            for request in requests
            if request.prefilled
            and request.last_compressed != self.num_steps
            and self.runner.needs_compression(request)
        ]

    def _due(self) -> list[Request]:
        """Those that the schedule compresses now. After a prefill only that request, so that its
        tokens do not depend on when others arrive."""
        when = self.when
        if when.every and self.num_steps % when.every == 0:
            return self._compressible(self.running)
        if when.uncompressed:
            found = self._compressible(self.running)
            if sum(request.num_uncompressed for request in found) >= when.uncompressed:
                return found
        return self._new() if when.after_prefill else []

    def _new(self) -> list[Request]:
        """Prefilled and over their budget since. One that was within it may grow over it."""
        new = [s for s in self.running if s.prefilled and s.last_compressed is None]
        found = self._compressible(new)
        for request in set(new).difference(found):
            request.last_compressed = self.num_steps
        return found

    def _compress(self, requests: list[Request]) -> bool:
        """Never compressed first, then least recently, up to the cap (KV-Compress §4.2.3)."""
        if not requests:
            return False
        chosen = self._capped(sorted(requests, key=lambda s: s.last_compressed or 0))
        with self.guard(chosen):
            self.runner.compress(chosen)
        for request in chosen:
            request.last_compressed = self.num_steps
            request.num_compressed = request.num_computed
        return True

    def _capped(self, order: list[Request]) -> list[Request]:
        limit = self.when.max_compressed_rows
        if limit is None:
            return order
        rows = self.pool.host_lengths[[request.open_slot for request in order]].sum(1)
        return capped(list(zip(order, rows.tolist(), strict=True)), limit) or order[:1]
