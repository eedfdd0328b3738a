"""The engine loop: schedule, run, postprocess. It works on token ids; `LLM` adds text."""

import logging
import operator
from collections.abc import Callable, Collection, Sized
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import count
from time import perf_counter
from typing import Any

from kvfold.cache.pool import Pool
from kvfold.engine.core.compression import Schedule
from kvfold.engine.core.launched import LaunchedStep, RequestTokens
from kvfold.engine.core.lock import EngineLock
from kvfold.engine.core.prefix_cache import NoPrefixCache
from kvfold.engine.core.scheduler import Scheduler
from kvfold.engine.core.shadow import Shadow
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
from kvfold.engine.runner.sampler import SampledToken
from kvfold.utils.errors import SettingError

logger = logging.getLogger(__name__)


class Hooks:
    """Callbacks of the engine, called in the thread that steps or adds. Override those you need.

    They may add and cancel requests. An error in a callback is logged and ends no request.
    """

    def on_request_init(self, request: Request) -> None:
        """A request was accepted and is waiting."""

    def on_context_step_end(self, chunks: Items[ScheduledChunk]) -> None:
        """These prefill chunks are in the cache."""

    def on_generation_step_end(self, chunks: Items[ScheduledChunk]) -> None:
        """These decoding requests have computed their last token, and the next one is sampled."""

    def on_request_finish(self, request: Request) -> None:
        """A request ended, for whatever reason. Its pages are free."""


def default_chunk(device_type: str) -> int:
    """Default number of prompt tokens per step: keeps a GPU busy, or a CPU step short."""
    return 2048 if device_type == "cuda" else 512


def default_step_seconds(device_type: str) -> float | None:
    """Default target duration of a step in seconds. None on a GPU, where full steps are shorter."""
    return None if device_type == "cuda" else 0.25


class Engine:
    """Serves requests with continuous batching on one pool. Any thread may add, cancel and step.

    eos_ids: tokens that end a sequence.
    chunk (default: `default_chunk`), max_batch_tokens, headroom, step_seconds, schedule,
        prefix_cache: see `Scheduler`.
    async_scheduling: launch the next decode step before the tokens of the current one have been
        read, if the runner supports it and the tokens cannot change the next batch.
    shadow: scores a sample of the requests again (None: none).
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
        prefix_cache: NoPrefixCache | None = None,
        async_scheduling: bool = True,
        shadow: Shadow | None = None,
    ) -> None:
        self.scheduler = Scheduler(
            runner,
            pool,
            chunk=default_chunk(pool.device.type) if chunk is None else chunk,
            max_batch_tokens=max_batch_tokens,
            headroom=headroom,
            step_seconds=step_seconds,
            schedule=schedule,
            prefix_cache=prefix_cache,
        )
        self.runner, self.hooks = runner, hooks or Hooks()
        self.eos_ids, self.lock = frozenset(eos_ids), EngineLock()
        self.async_scheduling, self.shadow = async_scheduling, shadow
        self._launched: LaunchedStep | None = None  # the next step, if it was launched already
        self._requests: dict[int, Request] = {}  # accepted, and not delivered to the end
        self._undelivered: list[StepOutput] = []  # outputs that `step` will return
        self._ids = count()

    @property
    def has_work(self) -> bool:
        """Whether a request has not been delivered to its end."""
        return bool(self._requests or self._undelivered)

    def add(
        self,
        prompt_ids: Items[int],
        sampling: SamplingParams | None = None,
        cache: CacheParams | None = None,
        *,
        deliver: Deliver | None = None,
    ) -> int:
        """Queue a request, and return its id. It ends with "length" at the pool's `max_tokens`.

        deliver: called with each output, in the thread that steps (None: `step` returns them).
        Raises ValueError if the request can never be served.
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
        """Create and check a request, which `submit` queues. So a caller can check several requests
        before it queues any.

        guide: matcher of the grammar in `sampling`, if there is one.
        context: packed context that holds the first tokens of the prompt.
        Raises ValueError if the request can never be served.
        """
        sampling = sampling or SamplingParams()
        _check_textless(sampling, guide)
        ids = token_ids(prompt_ids)
        room = self.scheduler.pool.max_tokens - len(ids) + 1  # the last output has no cache entry
        limit = max(1, min(sampling.max_new_tokens, room))
        cache = cache or CacheParams()
        _check_compress_after(cache, len(ids), sampling, context)
        if sampling.prompt_logprobs is not None:
            cache = _compute_all(cache, context)
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
        """Queue a request made by `request`. deliver: see `add`."""
        request.deliver = deliver
        if self.shadow is not None and self.shadow.draws(request):
            request.served = []
        self._requests[request.id] = request
        self.lock.call_soon(lambda: self._queue(request))

    def _queue(self, request: Request) -> None:
        self.scheduler.add(request)
        self._call_safely(self.hooks.on_request_init, request)

    def start_computed(self, id: int, num_computed: int) -> None:
        """Start a waiting request whose first `num_computed` tokens the caller writes to the
        cache."""
        self.scheduler.start_computed(self._requests[id], num_computed)

    def cancel(self, id: int) -> bool:
        """End a request and free its pages, at the latest after the current step. The next step
        delivers its last output. False if it has ended already."""
        request = self._requests.get(id)
        if request is None or request.finish_reason is not None:
            return False
        self.lock.call_soon(lambda: self.scheduler.finish(request, "cancelled"))
        return True

    def step(self) -> list[StepOutput]:
        """Run one forward pass for all running requests, and return the outputs of requests without
        `deliver`, of this step and of `step_or_wait` before it.

        Requests for which the runner fails end with reason "error". An AssertionError, which is our
        bug, ends all running requests and is raised again. After an interrupt they are prefilled
        again. If a step raises, the next one returns its outputs.
        """
        with self.lock.hold():
            self._step()
            outputs, self._undelivered = self._undelivered, []
            return outputs

    def step_or_wait(self, box: Sized) -> None:
        """Run a step; or, if another thread is running steps, wait until `box` is not empty or it
        stops."""
        with self.lock.hold(wait=False) as is_held:
            if is_held:
                self._step()
        if not is_held:
            self.lock.wait_for(box)

    def run_idle(self) -> bool:
        """Compute one chunk of the shadow scoring, for a caller with nothing else to do. Returns
        whether more is left. Does nothing while another thread runs steps."""
        if self.shadow is None:
            return False
        with self.lock.hold(wait=False) as is_held:
            if is_held:
                self.shadow.run_if_idle()
        return is_held and self.shadow.has_work

    def _step(self) -> None:
        """Schedule, run, postprocess."""
        start = perf_counter()
        with self.scheduler.guard():
            steps = self._take_launched() or self._run(self.scheduler.schedule())
            for step in steps:
                self._mark_computed(step.batch)
            self._launched = self._launch_next(steps)
            sampled = [pair for step in steps for pair in step.sampled_tokens()]
            self.scheduler.pace.record(sum(x.num_prefill for x in steps), perf_counter() - start)
            self._postprocess(sampled)
        self._deliver([request for request, _ in sampled])
        if self.shadow is not None:
            scheduler = self.scheduler
            running, waiting = len(scheduler.running), len(scheduler.waiting)
            most = scheduler.pace.max_tokens
            self.shadow.run_if_idle(running=running, waiting=waiting, most=most)

    def _take_launched(self) -> list[LaunchedStep]:
        """The step that was launched asynchronously, if one of its requests still runs."""
        step, self._launched = self._launched, None
        return [step] if step and any(x.is_current for x in step.batch.chunks) else []

    def _run(self, batch: Batch) -> list[LaunchedStep]:
        """Launch one step for all chunks. If it fails and the runner can retry, launch its halves,
        so that only those requests end with an error for which it fails alone."""
        chunks = batch.chunks
        if not chunks:
            return []
        try:
            return [LaunchedStep.launch(self.runner, batch, self.eos_ids)]
        except AssertionError:
            raise
        except Exception as error:
            if len(chunks) == 1 or not self.runner.can_retry:
                for chunk in chunks:
                    self.scheduler.fail(chunk.request, error)
                return []
        # Retry outside of `except`: the error's frames would hold device memory.
        half = len(chunks) // 2
        return self._run(Batch(chunks=chunks[:half])) + self._run(Batch(chunks=chunks[half:]))

    def _launch_next(self, steps: list[LaunchedStep]) -> LaunchedStep | None:
        """Launch the next step while this one runs, so that the device does not wait for the host.
        If this step's token ends a request, the token that the next step computes is dropped."""
        if len(steps) != 1 or not (self.async_scheduling and self.runner.supports_async):
            return None
        (step,) = steps
        if (batch := self.scheduler.schedule_async(step.batch)) is None:
            return None
        try:
            return LaunchedStep.launch(self.runner, batch, self.eos_ids, step.input_tokens(batch))
        except AssertionError:
            raise
        except Exception as error:  # `_run` will end the requests for which it fails again
            logger.warning("a step could not be launched ahead: %s", str(error))
            self.scheduler.rollback(batch)
            return None

    def _mark_computed(self, batch: Batch) -> None:
        """Count the tokens of a batch as computed, except for requests that ended meanwhile."""
        batch = Batch(chunks=tuple(x for x in batch.chunks if x.is_current))
        self.runner.free_outside_windows(batch)
        self.scheduler.mark_computed(batch)
        decodes, prefills = batch.chunks[: batch.num_decode], batch.chunks[batch.num_decode :]
        if prefills:
            self._call_safely(self.hooks.on_context_step_end, prefills)
        if decodes:
            self._call_safely(self.hooks.on_generation_step_end, decodes)

    def _postprocess(self, sampled: RequestTokens) -> None:
        """Append the sampled tokens, and end the requests that they end."""
        for request, token in sampled:
            if request.status is not Status.FINISHED:
                self._append_token(request, token)

    def _append_token(self, request: Request, sampled: SampledToken) -> None:
        """Append a sampled token, or end the request with an error if there is none."""
        if sampled.token is None:
            why = "the model's logits are not finite"
            if sampled.refusal is not None:
                why = str(sampled.refusal)
            elif request.sampling.edits:
                why += ", or the request's settings allow no next token"
            self.scheduler.finish(request, "error", why, sampled.refusal)
            return
        request.append(sampled.token, sampled.logprobs)
        if reason := self._finish_reason(request, sampled.token):
            self.scheduler.finish(request, reason)

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        if token in self.eos_ids and not request.sampling.ignore_eos:
            return "eos"
        if token in request.sampling.stop_token_ids:
            return "stop"
        return "length" if request.num_outputs >= request.sampling.max_new_tokens else None

    def _deliver(self, stepped: list[Request]) -> None:
        """Deliver new tokens and ends, request by request, so that an error affects only one."""
        for request in stepped:
            if request.status is not Status.FINISHED:
                self._send_output(request)
        ended = self.scheduler.finished
        while ended:
            request = ended[0]
            self._send_output(request)
            self._requests.pop(request.id, None)
            ended.pop(0)
            if self.shadow is not None:
                self.shadow.offer(request)
            self._call_safely(self.hooks.on_request_finish, request)

    def _send_output(self, request: Request) -> None:
        output = request.output()
        if request.deliver is None:
            self._undelivered.append(output)
        else:
            self._call_safely(request.deliver, output)
        request.num_delivered += len(output.token_ids)

    def _call_safely(self, callback: Callable[[Any], object], argument: Any) -> None:
        """Call a user's callback, and log its errors."""
        try:
            callback(argument)
        except Exception:
            logger.exception("a hook or a `deliver` callback failed; the engine continues")


def _compute_all(cache: CacheParams, context: PackedContext | None) -> CacheParams:
    """Cache settings of a request whose prompt tokens must all be computed. Raises SettingError."""
    if context is not None:
        raise SettingError(
            "`prompt_logprobs`: the tokens of a packed context are not computed again, so they have"
            " no log-probabilities: leave out `prompt_logprobs` or `context`"
        )
    return replace(cache, prefix_caching=False)


def _check_compress_after(
    cache: CacheParams, prompt: int, sampling: SamplingParams, context: PackedContext | None
) -> None:
    """Raises SettingError if `compress_after` does not fit the prompt or other settings."""
    if cache.compress_after is None:
        return
    if not 0 < cache.compress_after <= prompt:
        raise SettingError(
            f"`compress_after` must be in 1..{prompt}, the tokens of the prompt; got"
            f" {cache.compress_after}"
        )
    if context is not None or sampling.prompt_logprobs is not None:
        name = "context" if context is not None else "prompt_logprobs"
        raise SettingError(
            f"`compress_after` and `{name}` cannot be combined, as only the first reads a prompt in"
            " two parts: leave one out"
        )


def _check_textless(sampling: SamplingParams, guide: Guide | None) -> None:
    """Raises ValueError for settings that need a tokenizer, which an engine does not have."""
    words = tuple(x for x in sampling.bad_words if isinstance(x, str))
    for name, text in (("stop", sampling.stop), ("bad_words", words)):
        if text:
            raise ValueError(
                f"{name} must be empty, because Engine works on token ids only; got {text}: "
                "use LLM, which has a tokenizer"
            )
    if sampling.guided and guide is None:
        raise ValueError(
            f"{sampling.grammars[0]} settings need a `guide`: use LLM, which makes one"
        )


def token_ids(prompt_ids: Items[int]) -> list[int]:
    """Token ids as ints. Raises ValueError if they are not integers, or there are none."""
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
