"""The order of the engine: tokens of the next forward pass, and who keeps pages.

A request waits, runs (it owns a slot of the pool: it prefills in chunks, then decodes a token a
step) and finishes. Pages are the only currency. When they run out, requests are compressed, then
the youngest is pre-empted: its pages are freed, its outputs kept, and all it knows is prefilled
again later. Without eviction it then gets the very tokens it would have got; with eviction they may
differ, because a prompt with its outputs is not compressed to the rows that were evicted before.
"""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

from kvfold.cache.pool import Pool
from kvfold.engine.core.compressions import Compressions, Schedule
from kvfold.engine.core.pace import Pace
from kvfold.engine.core.prefixes import Prefixes
from kvfold.engine.requests.request import (
    Batch,
    FinishReason,
    Request,
    Runner,
    Status,
)
from kvfold.layout.pages import Ints
from kvfold.utils.errors import SettingError

logger = logging.getLogger(__name__)
Plan = dict[Request, int]  # tokens each request computes in the coming step, in order

LOOK = 64  # waiting requests that a step considers behind one that lacks pages


class Scheduler:
    """First come, first served: decodes of all running requests, then prefill chunks.

    chunk: most tokens of one request in a step, lest those that decode wait for it; where nobody
    does, and the runner takes them, all that a step may have. max_batch_tokens: most tokens in a
    step, at least one a slot, so that every running request decodes. headroom: tokens by which all
    that run must be able to grow before another is admitted, lest admission leads to pre-emption.
    step_seconds: time that a step should take where some decode; fewer tokens of prompts are then
    read in it than the numbers above allow, but for one `unit` of a policy.
    prefixes: what requests may begin with; None: nothing. Raises ValueError.
    """

    def __init__(
        self,
        runner: Runner,
        pool: Pool,
        *,
        chunk: int = 512,
        max_batch_tokens: int = 2048,
        headroom: int = 32,
        step_seconds: float | None = None,
        schedule: Schedule | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        if chunk < 1 or headroom < 0:
            raise ValueError(f"chunk must be at least 1 and headroom 0; got {chunk} and {headroom}")
        if max_batch_tokens < pool.num_slots:
            raise ValueError(
                f"max_batch_tokens must be at least the pool's num_slots={pool.num_slots}, so that "
                f"every sequence can decode; got {max_batch_tokens}: raise it or lower num_slots"
            )
        self.runner, self.pool = runner, pool
        self.unit, self.headroom, self.pace = runner.unit, headroom, Pace(step_seconds)
        self.chunk = max(chunk // self.unit, 1) * self.unit
        self.max_batch_tokens = max(max_batch_tokens, self.unit + pool.num_slots - 1)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished: list[Request] = []  # until the engine has delivered them
        self.prefixes = Prefixes(pool, chunk) if prefixes is None else prefixes
        self.full = False  # whether nobody who waits can be let in until one ends or comes
        self.num_steps = self.last_admitted = 0
        self.num_preemptions = 0
        when = schedule or Schedule()
        self.compressions = Compressions(runner, pool, self.prefixes, when, self.running, self.fail)

    @property
    def when(self) -> Schedule:
        return self.compressions.when

    def check(self, request: Request) -> None:
        """Raises SettingError if the empty pool could not hold its prompt and a decode."""
        pool, prompt = self.pool, request.num_prompt
        if prompt > pool.max_tokens:
            raise SettingError(
                f"the prompt has {prompt} tokens, and a sequence at most `max_tokens` positions, "
                f"which are {pool.max_tokens}: shorten it, or raise them where the model has more"
            )
        needed = prompt + (request.sampling.max_new_tokens > 1)
        if not self.prefixes.fits(request, needed):
            raise SettingError(
                f"`kv_bytes`: a pool of {pool.num_bytes} bytes holds {pool.capacity(self.chunk)} "
                f"tokens of a sequence, and this one begins with {needed}: "
                f"{pool.layout.bytes_for(1, needed)} bytes would do, or a shorter prompt"
            )

    def add(self, request: Request) -> None:
        if request.status is not Status.FINISHED:  # cancelled on its way here
            self.waiting.append(request)
            self.full = False

    def schedule(self) -> Batch:
        """Compress what is due, make room, and give pages to the coming step's tokens."""
        self.num_steps += 1
        self.compressions.take_turns(self.num_steps)
        plan = self._make_room()
        self._continue_prefills(plan)
        self._admit(plan)
        self.pool.extend([request.open_slot for request in plan], list(plan.values()))
        chunks = tuple(request.next_chunk(tokens) for request, tokens in plan.items())
        self.full = all(chunk.is_decode for chunk in chunks) and not self._early()
        return Batch(chunks=chunks)

    def ahead(self, batch: Batch) -> Batch | None:
        """The step behind a batch that is computed, before its tokens are read, and pages for it:
        one more token of all that run, but for those that end by their own limits. None where
        tokens, or who waits, may make it another step."""
        done = [x.request for x in batch.with_logits if x.request.status is Status.RUNNING]
        going = [x for x in done if x.num_outputs + 1 < x.sampling.max_new_tokens]
        may_join = not (self.full and len(going) == len(done)) and not self._early(1)
        if (self.waiting and may_join) or not going or len(done) < len(self.running):
            return None
        edited = any(x.sampling.edits for x in going)
        if edited or self.compressions.due_next(going, self.num_steps):
            return None
        slots = [x.open_slot for x in going]
        if not self.pool.can_extend(slots, [1] * len(slots)):
            return None
        self.pool.extend(slots, [1] * len(slots))
        self.num_steps += 1
        return Batch(chunks=tuple(x.chunk_ahead() for x in going))

    def take_back(self, batch: Batch) -> None:
        """Free the pages of a step that was to be `ahead`, and was not."""
        self.num_steps -= 1
        for chunk in batch.chunks:
            slot = chunk.request.open_slot
            self.pool.truncate(slot, self.pool.host_lengths[slot] - 1)

    def adopt(self, request: Request, computed: int) -> None:
        """Run a waiting request as if its first `computed` tokens had been computed: their rows get
        pages, which others fill."""
        self._start(request)
        self.pool.extend([request.open_slot], [computed])
        request.prefill_until(computed)
        request.advance(computed)

    def advanced(self, batch: Batch) -> None:
        """A batch is in the cache."""
        for chunk in batch.chunks:
            chunk.request.advance(len(chunk.tokens))
            self.prefixes.computed(chunk.request)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        error: str | None = None,
        refusal: SettingError | None = None,
    ) -> None:
        """End a request, if it has not ended, and return its pages."""
        if request.status is Status.FINISHED:
            return
        slot, self.full = request.slot, False
        request.finish(reason, error, refusal)
        self.finished.append(request)
        if slot is not None:
            self._leave(request, slot)
        elif request in self.waiting:  # else it is on its way there
            self.waiting.remove(request)

    def fail(self, request: Request, error: Exception) -> None:
        logger.error("request %d failed", request.id, exc_info=error)
        self.finish(request, "error", f"{type(error).__name__}: {error}")

    @contextmanager
    def guard(self) -> Iterator[None]:
        """What fails inside is our bug, which ends all that run, or an interrupt, after which they
        are prefilled again. Either goes on from here."""
        try:
            yield
        except Exception as error:
            for request in tuple(self.running):
                self.fail(request, error)
            self._start_over()
            raise
        except BaseException:
            self._start_over()
            raise

    def _start_over(self) -> None:
        """All that has not ended waits, and nobody has pages, wherever an interrupt fell: a request
        is in its new list before it leaves the old one."""
        self.prefixes.reset()
        held = {request.id: request for request in (*self.waiting, *self.running)}
        self.running.clear()
        self.compressions.reading.clear()
        self.waiting.clear()
        for _, request in sorted(held.items()):
            if request.status is not Status.FINISHED:
                request.restart()
                self.waiting.append(request)
                if request.num_outputs and not self._fits(request):
                    self.finish(request, "pool")
            elif request not in self.finished:
                self.finished.append(request)

    # Room ---------------------------------------------------------------------------------------

    def _first(self) -> Plan:
        """Those that must go on: all decodes; where there is none, the oldest prefill."""
        decodes = {x: 1 for x in self.running if x.prefilled and x not in self.compressions.reading}
        prefills = [x for x in self.running if not x.prefilled][:1]
        return decodes or {x: self._chunk(x, self.max_batch_tokens) for x in prefills}

    def _make_room(self) -> Plan:
        """Compress, pre-empt or end until what must go on has pages; what that is."""
        while (plan := self._first()) and not self.pool.has_free_pages(self._demand(plan)):
            if not (self.when.before_preempt and self.compressions.free_rows(self.num_steps)):
                self._preempt()
        return plan

    def _preempt(self) -> None:
        """Take the pages of the youngest that can be recomputed; if none can, end the youngest."""
        victim = max(self.running, key=lambda x: (self._fits(x), x.id))
        if self._fits(victim):
            self._requeue(victim)
            self.num_preemptions += 1
        else:  # eviction let it grow longer than the pool
            self.finish(victim, "pool")

    def _fits(self, request: Request) -> bool:
        """Whether all it knows could be prefilled into the empty pool."""
        return self.prefixes.fits(request, len(request.token_ids))

    def _start(self, request: Request) -> None:
        request.run(self.pool.allocate_slot())
        self.running.append(request)
        self.waiting.remove(request)

    def _requeue(self, request: Request) -> None:
        self.waiting.appendleft(request)
        self._leave(request, request.open_slot)
        request.restart()

    def _leave(self, request: Request, slot: int) -> None:
        """A request gives its slot back."""
        self.prefixes.leave(request)
        self.pool.free_slot(slot)
        self.running.remove(request)
        self.compressions.leave(request)

    def _demand(self, plan: Plan) -> Ints:
        """Pages of every class for so many more tokens of each."""
        lengths = self.pool.host_lengths[[request.open_slot for request in plan]]
        return self.pool.pages_needed(lengths, list(plan.values()), self.chunk)

    # Prefill ------------------------------------------------------------------------------------

    @property
    def longest_chunk(self) -> int:
        """Tokens of one request in the coming step, at most."""
        whole = self.runner.long_chunks and not any(x.prefilled for x in self.running)
        return self.max_batch_tokens if whole else self.chunk

    def _chunk(self, request: Request, left: int) -> int:
        """Tokens of its next chunk, where a step has `left` for it: where it does not end,
        in whole units of its own."""
        most = self.pool.layout.max_tokens_in_step(request.num_computed)
        tokens = min(self.longest_chunk, request.num_pending, left, most)
        if tokens == request.num_pending:
            return tokens
        first = request.num_computed - request.own_start
        return max((first + tokens) // self.unit * self.unit - first, 0)

    def _left(self, plan: Plan) -> int:
        """Tokens of prompts that the coming step has room and time for."""
        left = self.max_batch_tokens - sum(plan.values())
        if not any(request.prefilled for request in plan):
            return left
        prompts = sum(tokens for request, tokens in plan.items() if not request.prefilled)
        return int(min(left, max(self.pace.most, self.unit) - prompts))

    def _continue_prefills(self, plan: Plan) -> None:
        prefills = [x for x in self.running if not x.prefilled and x not in plan]
        if not prefills:
            return
        pages, left = self._demand(plan), self._left(plan)
        for request in prefills:
            tokens = self._chunk(request, left)
            pages = pages + self._demand({request: tokens})
            if tokens < 1 or not self.pool.has_free_pages(pages):
                return
            plan[request] = tokens
            left -= tokens

    def _early(self, steps: int = 0) -> bool:
        """Whether those who wait had better go on, so many steps from now."""
        early = self.num_steps + steps - self.last_admitted < self.when.admit_every
        return early and all(x.num_pending < self.chunk for x in islice(self.waiting, 1))

    def _admit(self, plan: Plan) -> None:
        """Let requests in while slots, tokens and pages for all they and the others need last. The
        first that lacks pages is overtaken by some that do not: by so many rows as it needs."""
        if not self.waiting or len(self.running) == self.pool.num_slots:
            return
        if self._early() and any(request.prefilled for request in self.running):
            return
        pages = self._demand({x: x.rows_ahead(self.headroom) for x in self.running})
        if not self.pool.has_free_pages(pages):
            return
        left, late, looked = self._left(plan), None, 0
        for request in tuple(self.waiting):
            if looked == LOOK or left < 1 or len(self.running) == self.pool.num_slots:
                return
            if left < min(self.unit, request.num_pending):
                return
            if late is not None:
                looked += 1
                if not late.lets_by(request):
                    continue
            if (chain := self.prefixes.find(request)) is None:
                continue
            need = self.prefixes.cost(chain, request.rows_ahead(self.headroom))
            beside = need if self.running else self.prefixes.cost(chain, request.num_pending)
            if not self.prefixes.has_free_pages(pages + beside, chain):
                late = late or request
                continue
            if late is not None:
                late.num_overtaken += request.most_rows
            self._start(request)
            self.last_admitted = self.num_steps
            pages = pages + need - self.prefixes.begin(request, chain)
            plan[request] = self._chunk(request, left)
            left -= plan[request]
