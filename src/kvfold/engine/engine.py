"""The loop: schedule, run, postprocess. Text stays outside, but for what stop strings need."""

from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import count

from kvfold.cache.pool import Pool
from kvfold.engine.request import (
    Batch,
    CacheParams,
    Detokenize,
    FinishReason,
    Request,
    Runner,
    SamplingParams,
    ScheduledChunk,
    Status,
    TextStream,
    TokenLogprobs,
)
from kvfold.engine.sampler import Choice, sample
from kvfold.engine.scheduler import Schedule, Scheduler


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """One request's part of a step's outputs.

    token_ids: new outputs, an end-of-sequence token included. text: what of it may be shown; empty
    without a detokenizer. logprobs: one entry a token, or None. finish_reason: set in a request's
    last output. error: what went wrong, if that is "error".
    """

    id: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    error: str | None


class Hooks:
    """Called by the engine as it goes. Override what is needed."""

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


class Engine:
    """Serves requests together from one pool.

    eos_ids: tokens that end a sequence; they never become text. detokenize: token ids to text,
    needed for stop strings and StepOutput.text. chunk (default: `default_chunk`), max_batch_tokens,
    headroom, schedule: see Scheduler.
    """

    def __init__(
        self,
        runner: Runner,
        pool: Pool,
        *,
        eos_ids: Collection[int] = (),
        detokenize: Detokenize | None = None,
        hooks: Hooks | None = None,
        chunk: int | None = None,
        max_batch_tokens: int = 2048,
        headroom: int = 32,
        schedule: Schedule | None = None,
    ) -> None:
        self.scheduler = Scheduler(
            runner,
            pool,
            chunk=default_chunk(pool.device.type) if chunk is None else chunk,
            max_batch_tokens=max_batch_tokens,
            headroom=headroom,
            schedule=schedule,
        )
        self.runner, self.hooks = runner, hooks or Hooks()
        self.eos_ids, self.detokenize = frozenset(eos_ids), detokenize
        self._requests: dict[int, Request] = {}  # accepted and not yet delivered to the end
        self._ids = count()

    @property
    def has_work(self) -> bool:
        """Is there a request that has not been delivered to its end?"""
        return bool(self._requests)

    def add(
        self,
        prompt_ids: Items[int],
        sampling: SamplingParams | None = None,
        cache: CacheParams | None = None,
    ) -> int:
        """Queue a request; its id. Raises ValueError if it can never be served."""
        sampling = sampling or SamplingParams()
        if not prompt_ids:
            raise ValueError("prompt_ids must hold at least 1 token; got none: add a start token")
        if sampling.stop and self.detokenize is None:
            raise ValueError(
                f"stop must be empty in an engine without detokenize; got {sampling.stop!r}: "
                "give the engine a detokenizer, or stop at tokens with eos_ids"
            )
        request = Request(
            id=next(self._ids),
            token_ids=list(prompt_ids),
            num_prompt=len(prompt_ids),
            sampling=sampling,
            cache=cache or CacheParams(),
            text=TextStream(self.detokenize, sampling.stop) if self.detokenize else None,
        )
        self.scheduler.add(request)
        self._requests[request.id] = request
        self.hooks.on_request_init(request)
        return request.id

    def adopt(self, id: int, computed: int) -> None:
        """Go on with a waiting request whose first `computed` tokens the caller puts into the
        cache."""
        self.scheduler.adopt(self._requests[id], computed)

    def cancel(self, id: int) -> bool:
        """End a request and return its pages; the next step delivers the end. False if it ended."""
        request = self._requests.get(id)
        if request is None or request.finish_reason is not None:
            return False
        self.scheduler.finish(request, "cancelled")
        return True

    def step(self) -> list[StepOutput]:
        """One forward pass for all that run, and what came of it.

        A failure of the runner, or of a hook, ends the requests of its batch with reason "error";
        an assertion, which is our bug, is raised again, and the next step delivers those ends.
        """
        batch = self.scheduler.schedule()
        choices = self._run(batch)
        return self._postprocess(batch, choices)

    def _run(self, batch: Batch) -> list[Choice]:
        """The model, then a choice for every chunk that wants one; none after a failure."""
        params = [chunk.request.sampling for chunk in batch.with_logits]
        seeds = [chunk.request.seed for chunk in batch.with_logits]
        positions = [chunk.start + len(chunk.tokens) for chunk in batch.with_logits]
        with self.scheduler.guard([chunk.request for chunk in batch.chunks]):
            if batch.chunks:
                logits = self.runner.run(batch)
                self._advance(batch)
                return sample(logits, params, seeds, positions).choices(params) if params else []
        return []

    def _advance(self, batch: Batch) -> None:
        for chunk in batch.chunks:
            chunk.request.advance(len(chunk.tokens))
        decodes, prefills = batch.chunks[: batch.num_decode], batch.chunks[batch.num_decode :]
        if prefills:
            self.hooks.on_context_step_end(prefills)
        if decodes:
            self.hooks.on_generation_step_end(decodes)

    def _postprocess(self, batch: Batch, choices: list[Choice]) -> list[StepOutput]:
        """Append the tokens, end who is done, and report both."""
        for chunk, choice in zip(batch.with_logits, choices, strict=False):
            with self.scheduler.guard([chunk.request]):  # a detokenizer may refuse a token
                self._append(chunk.request, choice)
        ended, self.scheduler.finished = self.scheduler.finished, []
        touched = dict.fromkeys([*(chunk.request for chunk in batch.with_logits), *ended])
        outputs = [_output(request) for request in touched]
        for request in ended:
            del self._requests[request.id]
            self.hooks.on_request_finish(request)
        return outputs

    def _append(self, request: Request, choice: Choice) -> None:
        if request.status is Status.FINISHED:  # a hook cancelled it
            return
        if choice.token is None:
            self.scheduler.finish(request, "error", "the model's logits are not finite")
            return
        request.token_ids.append(choice.token)
        if choice.logprobs:
            request.logprobs.append(choice.logprobs)
        if reason := self._end(request, choice.token):
            self.scheduler.finish(request, reason)

    def _end(self, request: Request, token: int) -> FinishReason | None:
        if token in self.eos_ids and not request.sampling.ignore_eos:
            return "stop"
        if request.text and request.text.push(token):
            return "stop"
        return "length" if request.num_outputs >= request.sampling.max_new_tokens else None


def _output(request: Request) -> StepOutput:
    """Outputs that have not been delivered yet."""
    start, request.num_delivered = request.num_delivered, request.num_outputs
    wanted = request.sampling.logprobs is not None
    return StepOutput(
        id=request.id,
        token_ids=tuple(request.token_ids[request.num_prompt + start :]),
        text=request.text.take(last=request.finish_reason is not None) if request.text else "",
        logprobs=tuple(request.logprobs[start:]) if wanted else None,
        finish_reason=request.finish_reason,
        error=request.error,
    )
