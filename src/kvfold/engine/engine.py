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
    """What a step has for one request.

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

    def on_request_init(self, sequence: Request) -> None:
        """A request was accepted and waits."""

    def on_context_step_end(self, pieces: Items[ScheduledChunk]) -> None:
        """These prefill chunks are in the cache."""

    def on_generation_step_end(self, pieces: Items[ScheduledChunk]) -> None:
        """These decoding sequences have their next token."""

    def on_request_finish(self, sequence: Request) -> None:
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
        self._sequences: dict[int, Request] = {}  # accepted and not yet delivered to the end
        self._ids = count()

    @property
    def has_work(self) -> bool:
        """Is there a request that has not been delivered to its end?"""
        return bool(self._sequences)

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
        sequence = Request(
            id=next(self._ids),
            token_ids=list(prompt_ids),
            num_prompt=len(prompt_ids),
            sampling=sampling,
            cache=cache or CacheParams(),
            generator=sampling.generator(),
            text=TextStream(self.detokenize, sampling.stop) if self.detokenize else None,
        )
        self.scheduler.add(sequence)
        self._sequences[sequence.id] = sequence
        self.hooks.on_request_init(sequence)
        return sequence.id

    def cancel(self, id: int) -> bool:
        """End a request and return its pages; the next step delivers the end. False if it ended."""
        sequence = self._sequences.get(id)
        if sequence is None or sequence.finish_reason is not None:
            return False
        self.scheduler.finish(sequence, "cancelled")
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
        """The model, then a choice for every piece that wants one; none after a failure."""
        params = [piece.sequence.sampling for piece in batch.with_logits]
        generators = [piece.sequence.generator for piece in batch.with_logits]
        with self.scheduler.guard([piece.sequence for piece in batch.pieces]):
            if batch.pieces:
                logits = self.runner.run(batch)
                self._advance(batch)
                return sample(logits, params, generators).choices(params) if params else []
        return []

    def _advance(self, batch: Batch) -> None:
        for piece in batch.pieces:
            piece.sequence.num_computed += len(piece.tokens)
        decodes, prefills = batch.pieces[: batch.num_decode], batch.pieces[batch.num_decode :]
        if prefills:
            self.hooks.on_context_step_end(prefills)
        if decodes:
            self.hooks.on_generation_step_end(decodes)

    def _postprocess(self, batch: Batch, choices: list[Choice]) -> list[StepOutput]:
        """Append the tokens, end who is done, and report both."""
        for piece, choice in zip(batch.with_logits, choices, strict=False):
            with self.scheduler.guard([piece.sequence]):  # a detokenizer may refuse a token
                self._append(piece.sequence, choice)
        ended, self.scheduler.finished = self.scheduler.finished, []
        touched = dict.fromkeys([*(piece.sequence for piece in batch.with_logits), *ended])
        outputs = [_output(sequence) for sequence in touched]
        for sequence in ended:
            del self._sequences[sequence.id]
            self.hooks.on_request_finish(sequence)
        return outputs

    def _append(self, sequence: Request, choice: Choice) -> None:
        if sequence.status is Status.FINISHED:  # a hook cancelled it
            return
        if choice.token is None:
            self.scheduler.finish(sequence, "error", "the model's logits are not finite")
            return
        sequence.token_ids.append(choice.token)
        if choice.logprobs:
            sequence.logprobs.append(choice.logprobs)
        if reason := self._end(sequence, choice.token):
            self.scheduler.finish(sequence, reason)

    def _end(self, sequence: Request, token: int) -> FinishReason | None:
        if token in self.eos_ids and not sequence.sampling.ignore_eos:
            return "stop"
        if sequence.text and sequence.text.push(token):
            return "stop"
        return "length" if sequence.num_outputs >= sequence.sampling.max_new_tokens else None


def _output(sequence: Request) -> StepOutput:
    """What has not been delivered yet."""
    start, sequence.num_delivered = sequence.num_delivered, sequence.num_outputs
    wanted = sequence.sampling.logprobs is not None
    return StepOutput(
        id=sequence.id,
        token_ids=tuple(sequence.token_ids[sequence.num_prompt + start :]),
        text=sequence.text.take(last=sequence.finish_reason is not None) if sequence.text else "",
        logprobs=tuple(sequence.logprobs[start:]) if wanted else None,
        finish_reason=sequence.finish_reason,
        error=sequence.error,
    )
