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
from dataclasses import dataclass
from itertools import islice

from kvfold.cache.eviction.compact import capped
from kvfold.cache.pool import Pool, PoolFull
from kvfold.engine.prefixes import Prefixes
from kvfold.engine.request import Batch, FinishReason, Request, Runner, Status
from kvfold.errors import SettingError
from kvfold.spec.layout import Ints

logger = logging.getLogger(__name__)
Plan = dict[Request, int]  # tokens each request computes in the coming step, in order

LOOK = 64  # waiting requests that a step considers behind one that lacks pages


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


class Scheduler:
    """First come, first served: decodes of all running requests, then prefill chunks.

    chunk: most tokens of one request in a step, lest those that decode wait for it; where nobody
    does, and the runner takes them, all that a step may have. max_batch_tokens: most tokens in a
    step, at least one a slot, so that every running request decodes. headroom: tokens by which all
    that run must be able to grow before another is admitted, lest admission leads to pre-emption.
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
        self.runner, self.pool, self.when = runner, pool, schedule or Schedule()
        self.unit, self.headroom = runner.unit, headroom
        self.chunk = max(chunk // self.unit, 1) * self.unit
        self.max_batch_tokens = max(max_batch_tokens, self.unit + pool.num_slots - 1)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.reading: list[Request] = []  # some of those, which are read again to be compressed
        self.finished: list[Request] = []  # until the engine has delivered them
        self.prefixes = Prefixes(pool, chunk) if prefixes is None else prefixes
        self.full = False  # whether nobody who waits can be let in until one ends or comes
        self.num_steps = self.last_admitted = 0
        self.num_preemptions = 0
        self.num_compressions = 0  # of requests
        self.num_evicted = 0.0  # tokens, averaged over groups

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
        self._compress(self._read_first(self._due()))
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
        if any(x.sampling.edits for x in going) or self._due_next(going):
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
            self.pool.shrink(slot, self.pool.host_lengths[slot] - 1)

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

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a request, if it has not ended, and return its pages."""
        if request.status is Status.FINISHED:
            return
        slot, self.full = request.slot, False
        request.finish(reason, error)
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
        self.reading.clear()
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
        decodes = {x: 1 for x in self.running if x.prefilled and x not in self.reading}
        prefills = [x for x in self.running if not x.prefilled][:1]
        return decodes or {x: self._chunk(x, self.max_batch_tokens) for x in prefills}

    def _make_room(self) -> Plan:
        """Compress, pre-empt or end until what must go on has pages; what that is."""
        while (plan := self._first()) and not self.pool.can_supply(self._demand(plan)):
            if not (self.when.before_preempt and self._compress(self._compressible(self.running))):
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
        request.run(self.pool.open())
        self.running.append(request)
        self.waiting.remove(request)

    def _requeue(self, request: Request) -> None:
        self.waiting.appendleft(request)
        self._leave(request, request.open_slot)
        request.restart()

    def _leave(self, request: Request, slot: int) -> None:
        """A request gives its slot back."""
        self.prefixes.leave(request)
        self.pool.close(slot)
        self.running.remove(request)
        self.reading = [x for x in self.reading if x is not request]

    def _demand(self, plan: Plan) -> Ints:
        """Pages of every class for so many more tokens of each."""
        lengths = self.pool.host_lengths[[request.open_slot for request in plan]]
        return self.pool.demand(lengths, list(plan.values()), self.chunk)

    # Prefill ------------------------------------------------------------------------------------

    @property
    def longest_chunk(self) -> int:
        """Tokens of one request in the coming step, at most."""
        whole = self.runner.long_chunks and not any(x.prefilled for x in self.running)
        return self.max_batch_tokens if whole else self.chunk

    def _chunk(self, request: Request, left: int) -> int:
        """Tokens of its next chunk, where a step has `left` for it: where it does not end,
        in whole units of its own."""
        most = self.pool.layout.most_at(request.num_computed)
        tokens = min(self.longest_chunk, request.num_pending, left, most)
        if tokens == request.num_pending:
            return tokens
        first = request.num_computed - request.own_start
        return max((first + tokens) // self.unit * self.unit - first, 0)

    def _left(self, plan: Plan) -> int:
        return self.max_batch_tokens - sum(plan.values())

    def _continue_prefills(self, plan: Plan) -> None:
        prefills = [x for x in self.running if not x.prefilled and x not in plan]
        if not prefills:
            return
        pages, left = self._demand(plan), self._left(plan)
        for request in prefills:
            tokens = self._chunk(request, left)
            pages = pages + self._demand({request: tokens})
            if tokens < 1 or not self.pool.can_supply(pages):
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
        if not self.pool.can_supply(pages):
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
            if not self.prefixes.can_supply(pages + beside, chain):
                late = late or request
                continue
            if late is not None:
                late.num_overtaken += request.most_rows
            self._start(request)
            self.last_admitted = self.num_steps
            pages = pages + need - self.prefixes.begin(request, chain)
            plan[request] = self._chunk(request, left)
            left -= plan[request]

    # Compression --------------------------------------------------------------------------------

    def _read_first(self, due: list[Request]) -> list[Request]:
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
        return self._compressible([x for x in alive if x not in self.reading])

    def _read(self, request: Request) -> None:
        """A piece again."""
        self.runner.read(request)
        self.prefixes.scored(request)

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
        """Those that are compressed now. After a prefill only that request, or one that says so
        itself, so that its tokens do not depend on when others arrive."""
        when = self.when
        if self.runner.demotes:
            return self._compressible(self.running)
        if when.every and self.num_steps % when.every == 0:
            return self._compressible(self.running)
        if when.uncompressed:
            found = self._compressible(self.running)
            if sum(request.num_uncompressed for request in found) >= when.uncompressed:
                return found
        new = self._new() if when.after_prefill else []
        own = self._compressible([x for x in self.running if x.wants_compression])
        return list(dict.fromkeys([*new, *own]))

    def _due_next(self, going: list[Request]) -> bool:
        """Whether the schedule may compress some of these before the next step."""
        when = self.when
        timed = (
            self.runner.demotes
            or when.uncompressed
            or (when.every and (self.num_steps + 1) % when.every == 0)
        )
        due = [x for x in going if timed or x.wants_compression]
        if any(map(self.runner.needs_compression, due)):
            return True
        return when.after_prefill and bool(self._new())

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
        self._evict(chosen)
        self.reading = [x for x in self.reading if x not in chosen]  # to its end by now
        for request in chosen:
            request.last_compressed = self.num_steps
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
        slots, narrow = [request.open_slot for request in requests], self.pool.narrow
        rows: Ints = self.pool.host_lengths[slots]
        return rows if narrow is None else rows + narrow.host_lengths[slots]

    def _count(self, requests: list[Request], before: Ints) -> None:
        """Add what they lost."""
        lost = (before - self._rows(requests)).mean(1).tolist()
        self.num_compressions += len(requests)
        self.num_evicted += sum(lost)
        for request, tokens in zip(requests, lost, strict=True):
            request.num_evicted += tokens

    def _capped(self, order: list[Request]) -> list[Request]:
        limit = self.when.max_compressed_rows
        if limit is None:
            return order
        rows = self._rows(order).sum(1)
        return capped(list(zip(order, rows.tolist(), strict=True)), limit) or order[:1]
