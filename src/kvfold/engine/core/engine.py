"""The loop: schedule, run, deliver. It knows tokens; text is for who reads it."""

import logging
import operator
from collections.abc import Callable, Collection, Sized
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import count
from time import perf_counter
from typing import Any

from kvfold.cache.pool import Pool
from kvfold.engine.core.compressions import Schedule
from kvfold.engine.core.flight import Flight
from kvfold.engine.core.prefixes import Prefixes
from kvfold.engine.core.scheduler import Scheduler
from kvfold.engine.core.turn import Turn
from kvfold.engine.requests.packed import PackedContext
from kvfold.engine.requests.request import (
    Batch,
    CacheParams,
    Deliver,
    FinishReason,
    Guide,
    Request,
    Runner,
    SamplingParams,
    ScheduledChunk,
    Status,
    StepOutput,
)
from kvfold.engine.runner.sampler import Choice
from kvfold.utils.errors import SettingError

logger = logging.getLogger(__name__)
Chunks = tuple[ScheduledChunk, ...]


class Hooks:
    """Called by the engine as it goes, in the thread that steps or adds. Override what is needed.
    They may add and cancel requests; an error of theirs is logged, and ends nothing."""

    def on_request_init(self, request: Request) -> None:
        """A request was accepted and waits."""

    def on_context_step_end(self, chunks: Items[ScheduledChunk]) -> None:
        """These prefill chunks are in the cache."""

    def on_generation_step_end(self, chunks: Items[ScheduledChunk]) -> None:
        """These decoding requests have their next token."""

    def on_request_finish(self, request: Request) -> None:
        """A request ended, whatever the reason. Its pages are back in the pool."""


def default_chunk(device_type: str) -> int:
    """Tokens of a prompt in a step: as many as keep a GPU busy, or a CPU's steps short."""
    return 2048 if device_type == "cuda" else 512


def default_step_seconds(device_type: str) -> float | None:
    """Time that a step should take: a GPU reads its most tokens in less, and is not waited for."""
    return None if device_type == "cuda" else 0.25


class Engine:
    """Serves requests together from one pool. Any thread may add, cancel and step.

    eos_ids: tokens that end a sequence. chunk (default: `default_chunk`), max_batch_tokens,
    headroom, step_seconds, schedule, prefixes: see Scheduler. ahead: launch a step before the
    tokens of the one in front are read, where the runner can and nothing depends on them.
    """

    def __init__(
        self,
        runner: Runner,
        pool: Pool,
        *,
        eos_ids: Collection[int] = (),
        hooks: Hooks | None = None,
        chunk: int | None = None,
        max_batch_tokens: int = 2048,
        headroom: int = 32,
        step_seconds: float | None = None,
        schedule: Schedule | None = None,
        prefixes: Prefixes | None = None,
        ahead: bool = True,
    ) -> None:
        self.scheduler = Scheduler(
            runner,
            pool,
            chunk=default_chunk(pool.device.type) if chunk is None else chunk,
            max_batch_tokens=max_batch_tokens,
            headroom=headroom,
            step_seconds=step_seconds,
            schedule=schedule,
            prefixes=prefixes,
        )
        self.runner, self.hooks = runner, hooks or Hooks()
        self.eos_ids, self.turn = frozenset(eos_ids), Turn()
        self.ahead = ahead
        self._flight: Flight | None = None  # the step that was launched ahead
        self._requests: dict[int, Request] = {}  # accepted and not yet delivered to the end
        self._owed: list[StepOutput] = []  # what `step` has yet to return
        self._ids = count()

    @property
    def has_work(self) -> bool:
        """Is there a request that has not been delivered to its end?"""
        return bool(self._requests or self._owed)

    def add(
        self,
        prompt_ids: Items[int],
        sampling: SamplingParams | None = None,
        cache: CacheParams | None = None,
        *,
        deliver: Deliver | None = None,
    ) -> int:
        """Queue a request; its id. deliver: is called with its outputs, in the thread that steps;
        None: `step` returns them. It ends where the pool's `max_tokens` do, as by its own limit.

        Raises ValueError if it can never be served.
        """
        request = self.request(prompt_ids, sampling, cache)
        self.submit(request, deliver)
        return request.id

    def request(
        self,
        prompt_ids: Items[int],
        sampling: SamplingParams | None = None,
        cache: CacheParams | None = None,
        guide: Guide | None = None,
        context: PackedContext | None = None,
    ) -> Request:
        """What `add` would queue, checked: for who wants all of several requests or none. guide: of
        the grammar that `sampling` names, if any. context: of which the first tokens are."""
        sampling = sampling or SamplingParams()
        _check_textless(sampling, guide)
        ids = token_ids(prompt_ids)
        room = self.scheduler.pool.max_tokens - len(ids) + 1  # the last token needs no row
        limit = max(1, min(sampling.max_new_tokens, room))
        cache = cache or CacheParams()
        if sampling.prompt_logprobs is not None:
            cache = _read_whole(cache, context)
        request = Request(
            id=next(self._ids),
            token_ids=ids,
            num_prompt=len(ids),
            sampling=sampling.changed(max_new_tokens=limit),
            cache=cache,
            guide=guide,
            context=context,
        )
        self.scheduler.check(request)
        return request

    def submit(self, request: Request, deliver: Deliver | None = None) -> None:
        """Queue a request that `request` made."""
        request.deliver = deliver
        self._requests[request.id] = request
        self.turn.ask(lambda: self._queue(request))

    def _queue(self, request: Request) -> None:
        self.scheduler.add(request)
        self._call(self.hooks.on_request_init, request)

    def adopt(self, id: int, computed: int) -> None:
        """Go on with a waiting request whose first `computed` tokens the caller puts into the
        cache."""
        self.scheduler.adopt(self._requests[id], computed)

    def cancel(self, id: int) -> bool:
        """End a request and return its pages, if need be when the step in hand is over; the next
        step delivers the end. False if it ended."""
        request = self._requests.get(id)
        if request is None or request.finish_reason is not None:
            return False
        self.turn.ask(lambda: self.scheduler.finish(request, "cancelled"))
        return True

    def step(self) -> list[StepOutput]:
        """One forward pass for all that run; the outputs that no `deliver` takes, of this step and
        of `work` before it.

        Requests that the runner fails for end with reason "error". An assertion, which is our bug,
        ends all that run and is raised again; after an interrupt they are prefilled once more. What
        a step that raises owes, the next one gives.
        """
        with self.turn.take():
            self._step()
            owed, self._owed = self._owed, []
            return owed

    def work(self, box: Sized) -> None:
        """Take a step, or wait while another thread takes some and `box` is empty."""
        with self.turn.take(wait=False) as mine:
            if mine:
                self._step()
        if not mine:
            self.turn.wait(box)

    def _step(self) -> None:
        begun = perf_counter()
        with self.scheduler.guard():
            flights = self._landing() or self._launch(self.scheduler.schedule().chunks)
            for flight in flights:
                self._advance(flight.batch)
            self._flight = self._launch_ahead(flights)
            chosen = [x for flight in flights for x in flight.choices()]
            self.scheduler.pace.took(sum(x.num_prefill for x in flights), perf_counter() - begun)
            for request, choice in chosen:
                if request.status is not Status.FINISHED:
                    self._append(request, choice)
        self._deliver([request for request, _ in chosen])

    def _landing(self) -> list[Flight]:
        """The step that was launched ahead, if one of its requests still goes on."""
        flight, self._flight = self._flight, None
        return [flight] if flight and any(x.is_next for x in flight.batch.chunks) else []

    def _launch(self, chunks: Chunks) -> list[Flight]:
        """One step for all of them. Where it fails halves are tried alone, if they may be, so that
        only those end with an error that cannot be served."""
        if not chunks:
            return []
        try:
            return [Flight.launch(self.runner, Batch(chunks=chunks), self.eos_ids)]
        except AssertionError:
            raise
        except Exception as error:
            if len(chunks) == 1 or not self.runner.repeatable:
                for chunk in chunks:
                    self.scheduler.fail(chunk.request, error)
                return []
        # Here the error's frames are gone, and with them what they held of the device's memory.
        half = len(chunks) // 2
        return self._launch(chunks[:half]) + self._launch(chunks[half:])

    def _launch_ahead(self, flights: list[Flight]) -> Flight | None:
        """The next step while this one runs: the device then never waits for the host. One that a
        token ends in between computes a token more, which nobody reads."""
        if len(flights) != 1 or not (self.ahead and self.runner.goes_ahead):
            return None
        (flight,) = flights
        if (batch := self.scheduler.ahead(flight.batch)) is None:
            return None
        try:
            return Flight.launch(self.runner, batch, self.eos_ids, flight.tokens(batch))
        except AssertionError:
            raise
        except Exception as error:  # the usual way says who cannot be served
            logger.warning("a step could not be launched ahead: %s", str(error))
            self.scheduler.take_back(batch)
            return None

    def _advance(self, batch: Batch) -> None:
        """A batch is in the cache, but for requests that ended since it was launched."""
        batch = Batch(chunks=tuple(x for x in batch.chunks if x.is_next))
        self.runner.slide(batch)
        self.scheduler.advanced(batch)
        decodes, prefills = batch.chunks[: batch.num_decode], batch.chunks[batch.num_decode :]
        if prefills:
            self._call(self.hooks.on_context_step_end, prefills)
        if decodes:
            self._call(self.hooks.on_generation_step_end, decodes)

    def _append(self, request: Request, choice: Choice) -> None:
        if choice.token is None:
            why = "the model's logits are not finite"
            if choice.refusal is not None:
                why = str(choice.refusal)
            elif request.sampling.edits:
                why += ", or the request's settings leave no token that may come next"
            self.scheduler.finish(request, "error", why, choice.refusal)
            return
        request.token_ids.append(choice.token)
        if choice.logprobs:
            request.logprobs.append(choice.logprobs)
        if reason := self._end(request, choice.token):
            self.scheduler.finish(request, reason)

    def _end(self, request: Request, token: int) -> FinishReason | None:
        if token in self.eos_ids and not request.sampling.ignore_eos:
            return "eos"
        if token in request.sampling.stop_token_ids:
            return "stop"
        return "length" if request.num_outputs >= request.sampling.max_new_tokens else None

    def _deliver(self, stepped: list[Request]) -> None:
        """New tokens and ends, one request after another, so that no error costs another its."""
        for request in stepped:
            if request.status is not Status.FINISHED:
                self._put(request)
        ended = self.scheduler.finished
        while ended:
            request = ended[0]
            self._put(request)
            self._requests.pop(request.id, None)
            ended.pop(0)
            self._call(self.hooks.on_request_finish, request)

    def _put(self, request: Request) -> None:
        output = request.output()
        if request.deliver is None:
            self._owed.append(output)
        else:
            self._call(request.deliver, output)
        request.num_delivered += len(output.token_ids)

    def _call(self, foreign: Callable[[Any], object], argument: Any) -> None:
        """Call what others wrote. Its errors are theirs."""
        try:
            foreign(argument)
        except Exception:
            logger.exception("a hook or a reader of outputs failed; the engine goes on")


def _read_whole(cache: CacheParams, context: PackedContext | None) -> CacheParams:
    """Of a prompt whose every token goes through the model."""
    if context is not None:
        raise SettingError(
            "`prompt_logprobs`: a packed context is not read again, so nobody knows how likely its "
            "tokens are: leave it or `context` out"
        )
    return replace(cache, prefix_caching=False)


def _check_textless(sampling: SamplingParams, guide: Guide | None) -> None:
    words = tuple(x for x in sampling.bad_words if isinstance(x, str))
    for name, text in (("stop", sampling.stop), ("bad_words", words)):
        if text:
            raise ValueError(
                f"{name} must be empty here, since an engine sees no text; got {text}: "
                "LLM has a tokenizer to find them with"
            )
    if sampling.guided and guide is None:
        raise ValueError("json_schema and regex need a guide here: LLM has a tokenizer to make one")


def token_ids(prompt_ids: Items[int]) -> list[int]:
    """Whole numbers as they are. Raises ValueError for other ones, and for none."""
    try:
        ids = [operator.index(i) for i in prompt_ids if not isinstance(i, bool)]
        if len(ids) < len(prompt_ids):
            raise TypeError
    except TypeError:
        raise ValueError(
            f"prompt_ids must be whole numbers, token ids; got {prompt_ids!r:.100}"
        ) from None
    if not ids:
        raise ValueError("prompt_ids must hold at least 1 token; got none")
    return ids
