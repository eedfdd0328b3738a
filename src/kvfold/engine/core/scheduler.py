"""Choose the tokens of the next forward pass, and allocate pages for them.

A request waits, runs (it holds a slot of the pool: it prefills in chunks, then decodes one token
per step) and finishes. If pages run out, entries of running requests are evicted, if there is a
policy, or pages are demoted to fewer bits (`when_full="demote"`). Then the youngest request is
pre-empted: its pages are freed, and its prompt and outputs are prefilled again later. Without
eviction and demotion it then generates exactly the tokens it would have generated anyway. With
eviction the tokens may differ, because prompt and outputs then compete for one budget. In this
package "compress" means to evict entries of a request.
"""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

from kvfold.cache.pool import Pool
from kvfold.engine.core.compression import CompressionScheduler, Schedule
from kvfold.engine.core.pace import PrefillPace
from kvfold.engine.core.prefix_cache import Chain, NoPrefixCache
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
ScheduledTokens = dict[Request, int]  # number of tokens of each request in the next step, in order

MAX_TRIED = 64  # waiting requests tried after the first one that does not fit


class Scheduler:
    """Each step decodes all running requests, then prefills. Waiting requests are admitted in order
    of arrival; a smaller one may overtake one that does not fit (see `_admit`).

    chunk: most prompt tokens of one request in a step, which bounds the delay of requests that
        decode. If none decodes and the runner supports long chunks, the limit is max_batch_tokens.
    max_batch_tokens: most tokens in a step; at least one per slot, so that every running request
        can decode.
    headroom: tokens by which every running request must be able to grow before another one is
        admitted, so that admission does not cause pre-emption.
    step_seconds: target duration of a step in which requests decode. It may reduce the number of
        prompt tokens below the limits above, down to one `prefill_multiple`.
    prefix_cache: None: no prefix caching.

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
        step_seconds: float | None = None,
        schedule: Schedule | None = None,
        prefix_cache: NoPrefixCache | None = None,
    ) -> None:
        if chunk < 1 or headroom < 0:
            raise ValueError(f"chunk must be at least 1 and headroom 0; got {chunk} and {headroom}")
        if max_batch_tokens < pool.num_slots:
            raise ValueError(
                f"max_batch_tokens must be at least the pool's num_slots={pool.num_slots}, so that "
                f"every sequence can decode; got {max_batch_tokens}: raise it or lower num_slots"
            )
        self.runner, self.pool, self.headroom = runner, pool, headroom
        self.prefill_multiple, self.pace = runner.prefill_multiple, PrefillPace(step_seconds)
        self.chunk = max(chunk // self.prefill_multiple, 1) * self.prefill_multiple
        self.max_batch_tokens = max(max_batch_tokens, self.prefill_multiple + pool.num_slots - 1)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished: list[Request] = []  # until the engine has delivered their outputs
        self.prefix_cache = NoPrefixCache(pool, chunk) if prefix_cache is None else prefix_cache
        # True: nothing can be admitted until a request finishes or a new one arrives.
        self.admission_blocked = False
        self.num_steps = self.last_admitted = 0
        self.num_preemptions = self.num_demotions = 0
        self.compressions = CompressionScheduler(
            runner, pool, self.prefix_cache, schedule or Schedule(), self.running, self.fail
        )

    @property
    def when(self) -> Schedule:
        return self.compressions.when

    def check(self, request: Request) -> None:
        """Raises SettingError if its prompt and one decode do not fit in an empty pool."""
        pool, prompt = self.pool, request.num_prompt
        if prompt > pool.max_tokens:
            raise SettingError(
                f"the prompt has {prompt} tokens, and `max_tokens` is {pool.max_tokens}: shorten "
                "the prompt, or raise `max_tokens` if the model has more positions"
            )
        needed = prompt + (request.sampling.max_new_tokens > 1)
        if not self.prefix_cache.fits_empty_pool(request, needed):
            raise SettingError(
                f"`kv_bytes`: a pool of {pool.kv_bytes} bytes holds {pool.capacity(self.chunk)} "
                f"tokens of a sequence, and this request starts with {needed}: use "
                f"{pool.kv_bytes_for(needed)} bytes, or shorten the prompt"
            )

    def add(self, request: Request) -> None:
        """Queue a request."""
        if request.status is not Status.FINISHED:  # it may have been cancelled already
            self.waiting.append(request)
            self.admission_blocked = False

    def schedule(self) -> Batch:
        """Compress the requests that are due, choose the tokens of the next step, and allocate
        their pages."""
        self.num_steps += 1
        self.compressions.compress_due(self.num_steps)
        scheduled = self._schedule_running()
        self._schedule_prefills(scheduled)
        self._admit(scheduled)
        self.pool.extend([request.open_slot for request in scheduled], list(scheduled.values()))
        chunks = tuple(request.next_chunk(tokens) for request, tokens in scheduled.items())
        only_decodes = all(chunk.is_decode for chunk in chunks)
        self.admission_blocked = only_decodes and not self._admission_postponed()
        return Batch(chunks=chunks)

    def schedule_async(self, batch: Batch) -> Batch | None:
        """Schedule the decode step after `batch`, which has been launched, before its sampled
        tokens reach the host, and allocate its pages: one more token of each running request,
        except those whose sampled token is their last.

        None if it must wait for the sampled tokens: a request may be admitted, is to be compressed
        or edits its logits, or pages are missing.
        """
        sampled = [x.request for x in batch.with_logits if x.request.status is Status.RUNNING]
        requests = [x for x in sampled if x.num_outputs + 1 < x.sampling.max_new_tokens]
        blocked = self.admission_blocked and len(requests) == len(sampled)
        may_admit = not blocked and not self._admission_postponed(1)
        if (self.waiting and may_admit) or not requests or len(sampled) < len(self.running):
            return None
        edited = any(x.sampling.edits for x in requests)
        if edited or self.compressions.may_compress_next(requests, self.num_steps):
            return None
        slots = [x.open_slot for x in requests]
        if not self.pool.make_room_to_extend(slots, [1] * len(slots)):
            return None
        self.pool.extend(slots, [1] * len(slots))
        self.num_steps += 1
        return Batch(chunks=tuple(x.next_decode_chunk() for x in requests))

    def rollback(self, batch: Batch) -> None:
        """Undo `schedule_async` if its batch could not be launched: free its pages."""
        self.num_steps -= 1
        for chunk in batch.chunks:
            slot = chunk.request.open_slot
            self.pool.truncate(slot, self.pool.host_lengths[slot] - 1)

    def start_computed(self, request: Request, num_computed: int) -> None:
        """Start a waiting request whose first `num_computed` tokens count as computed: allocate
        their pages, whose contents the caller writes (as vLLM's KV connectors do)."""
        self._start(request)
        self.pool.extend([request.open_slot], [num_computed])
        request.prefill_until(num_computed)
        request.advance(num_computed)

    def mark_computed(self, batch: Batch) -> None:
        """Count the tokens of a launched batch as computed, since later launches on the device run
        after it, and add full blocks to the prefix cache."""
        for chunk in batch.chunks:
            chunk.request.advance(len(chunk.tokens))
            self.prefix_cache.publish(chunk.request)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        error: str | None = None,
        refusal: SettingError | None = None,
    ) -> None:
        """End a request, unless it has ended, and free its pages."""
        if request.status is Status.FINISHED:
            return
        slot, self.admission_blocked = request.slot, False
        request.finish(reason, error, refusal)
        self.finished.append(request)
        if slot is not None:
            self._release(request, slot)
        elif request in self.waiting:  # if not, `add` has not run yet
            self.waiting.remove(request)

    def fail(self, request: Request, error: Exception) -> None:
        """Log an error, and end the request with it."""
        logger.error("request %d failed", request.id, exc_info=error)
        self.finish(request, "error", f"{type(error).__name__}: {error}")

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Keep the scheduler consistent if a step raises, and raise again.

        An Exception is our bug: it ends all running requests. An interrupt (other BaseException)
        does not: all running requests are prefilled again.
        """
        try:
            yield
        except Exception as error:
            for request in tuple(self.running):
                self.fail(request, error)
            self._restart_all()
            raise
        except BaseException:
            self._restart_all()
            raise

    def _restart_all(self) -> None:
        """Move all requests that have not ended to `waiting`, and free all pages. Correct wherever
        an interrupt came: a request enters its new list before it leaves the old one."""
        self.prefix_cache.reset()
        requests = {request.id: request for request in (*self.waiting, *self.running)}
        self.running.clear()
        self.compressions.rescoring.clear()
        self.waiting.clear()
        for _, request in sorted(requests.items()):
            if request.status is not Status.FINISHED:
                request.restart()
                self.waiting.append(request)
                if request.num_outputs and not self._can_recompute(request):
                    self.finish(request, "pool")
            elif request not in self.finished:
                self.finished.append(request)

    # Running requests -----------------------------------------------------------------------------

    def _schedule_running(self) -> ScheduledTokens:
        """Schedule the requests that must progress (see `_must_run`). Compress, pre-empt or end
        others until their pages are free."""
        while scheduled := self._must_run():
            if self.pool.make_room(self._pages_needed(scheduled)):
                break
            if self.when.before_preempt and self.compressions.free_memory(self.num_steps):
                continue
            if not self._demote():
                self._preempt()
        return scheduled

    def _must_run(self) -> ScheduledTokens:
        """One token of each request that decodes, or, if none decodes, a chunk of the oldest
        prefill."""
        rescoring = self.compressions.rescoring
        decodes = {x: 1 for x in self.running if x.prefilled and x not in rescoring}
        prefills = [x for x in self.running if not x.prefilled][:1]
        return decodes or {x: self._chunk_tokens(x, self.max_batch_tokens) for x in prefills}

    def _demote(self) -> bool:
        """Demote the oldest pages of the request that can free most to fewer bits. Returns False if
        none can."""
        request = max(self.running, key=lambda x: (self.runner.num_demotable(x), -x.id))
        if not self.runner.num_demotable(request):
            return False
        try:
            self.runner.demote(request)
            self.num_demotions += 1
        except AssertionError:
            raise
        except Exception as error:  # its entries may be lost
            self.fail(request, error)
        return True

    def _preempt(self) -> None:
        """Free the pages of the youngest request that can be recomputed. If none can, end the
        youngest."""
        victim = max(self.running, key=lambda x: (self._can_recompute(x), x.id))
        if self._can_recompute(victim):
            self._requeue(victim)
            self.num_preemptions += 1
        else:  # because of eviction it could grow longer than the pool
            self.finish(victim, "pool")

    def _can_recompute(self, request: Request) -> bool:
        """Whether prompt and outputs fit in an empty pool."""
        return self.prefix_cache.fits_empty_pool(request, len(request.token_ids))

    def _start(self, request: Request) -> None:
        request.start(self.pool.allocate_slot())
        self.running.append(request)
        self.waiting.remove(request)

    def _requeue(self, request: Request) -> None:
        self.waiting.appendleft(request)
        self._release(request, request.open_slot)
        request.restart()

    def _release(self, request: Request, slot: int) -> None:
        """Free the slot and the pages of a running request."""
        self.prefix_cache.release(request)
        self.pool.free_slot(slot)
        self.running.remove(request)
        self.compressions.remove(request)

    def _pages_needed(self, scheduled: ScheduledTokens) -> Ints:
        """Pages per class [C] that these tokens need."""
        lengths = self.pool.host_lengths[[request.open_slot for request in scheduled]]
        return self.pool.pages_needed(lengths, list(scheduled.values()), self.chunk)

    # Prefill --------------------------------------------------------------------------------------

    @property
    def max_chunk(self) -> int:
        """Most tokens of one request in the next step."""
        no_decode = not any(x.prefilled for x in self.running)
        return (
            self.max_batch_tokens if self.runner.supports_long_chunks and no_decode else self.chunk
        )

    def _chunk_tokens(self, request: Request, budget: int) -> int:
        """Number of tokens of a request's next chunk, if the step has a budget of `budget` prompt
        tokens. Unless it is the last chunk, it ends at a multiple of `prefill_multiple` after the
        packed context."""
        layout_limit = self.pool.layout.max_tokens_in_step(request.num_computed)
        rest = request.num_prefill - request.num_computed
        tokens = min(self.max_chunk, rest, budget, layout_limit)
        if tokens == rest:
            return tokens
        start, multiple = request.num_computed - request.context_length, self.prefill_multiple
        return max((start + tokens) // multiple * multiple - start, 0)

    def _prompt_budget(self, scheduled: ScheduledTokens) -> int:
        """How many more prompt tokens fit into the next step: at most `max_batch_tokens` in all
        and, if requests decode, what `pace` allows."""
        budget = self.max_batch_tokens - sum(scheduled.values())
        if not any(request.prefilled for request in scheduled):
            return budget
        prompts = sum(tokens for request, tokens in scheduled.items() if not request.prefilled)
        return int(min(budget, max(self.pace.max_tokens, self.prefill_multiple) - prompts))

    def _schedule_prefills(self, scheduled: ScheduledTokens) -> None:
        """Schedule chunks of running requests whose prompts are not computed yet."""
        prefills = [x for x in self.running if not x.prefilled and x not in scheduled]
        if not prefills:
            return
        pages, budget = self._pages_needed(scheduled), self._prompt_budget(scheduled)
        for request in prefills:
            tokens = self._chunk_tokens(request, budget)
            pages = pages + self._pages_needed({request: tokens})
            if tokens < 1 or not self.pool.make_room(pages):
                return
            scheduled[request] = tokens
            budget -= tokens

    # Admission ------------------------------------------------------------------------------------

    def _admission_postponed(self, steps: int = 0) -> bool:
        """Whether `Schedule.admit_every` still delays admission `steps` steps from now. A first
        waiting prompt of at least one chunk is never delayed."""
        early = self.num_steps + steps - self.last_admitted < self.when.admit_every
        return early and all(x.num_pending < self.chunk for x in islice(self.waiting, 1))

    def _admit(self, scheduled: ScheduledTokens) -> None:
        """Admit waiting requests while there are free slots, prompt tokens, and pages for
        `headroom` more tokens of all running requests.

        If the first request does not fit, later ones may overtake it, but their cache entries in
        total must not exceed the number it needs itself, so that it does not starve.
        """
        if not self.waiting or len(self.running) == self.pool.num_slots:
            return
        if self._admission_postponed() and any(request.prefilled for request in self.running):
            return
        pages = self._pages_needed({x: x.entries_needed(self.headroom) for x in self.running})
        if not self.pool.make_room(pages):
            return
        budget, overtaken, num_tried = self._prompt_budget(scheduled), None, 0
        for request in tuple(self.waiting):
            if num_tried == MAX_TRIED or budget < 1 or len(self.running) == self.pool.num_slots:
                return
            if budget < min(self.prefill_multiple, request.num_pending):
                return
            if overtaken is not None:
                num_tried += 1
                if not overtaken.allows_overtake(request):
                    continue
            if (chain := self.prefix_cache.lookup(request)) is None:
                continue
            needed = self._make_room(request, chain, pages)
            if needed is None and chain and not self.running:
                # Nothing will free pages, and those of the chain are in the way: they may have to
                # be copied, or lie in slabs that other pages need.
                self.prefix_cache.drop_unread()
                chain = self.prefix_cache.lookup(request) or []
                needed = self._make_room(request, chain, pages)
            if needed is None:
                overtaken = overtaken or request
                continue
            if overtaken is not None:
                overtaken.num_overtaken += request.max_entries
            self._start(request)
            self.last_admitted = self.num_steps
            pages = pages + needed - self.prefix_cache.start(request, chain)
            scheduled[request] = self._chunk_tokens(request, budget)
            budget -= scheduled[request]

    def _make_room(self, request: Request, chain: Chain, pages: Ints) -> Ints | None:
        """Have the pages free that a waiting request needs if it starts with a chain, in addition
        to `pages` [C]. Returns them [C], with headroom; None if there is no room."""
        needed = self.prefix_cache.pages_needed(chain, request.entries_needed(self.headroom))
        required = needed
        if not self.running:  # then it is admitted without headroom
            required = self.prefix_cache.pages_needed(chain, request.num_pending)
        return needed if self.prefix_cache.make_room(pages + required, chain) else None
