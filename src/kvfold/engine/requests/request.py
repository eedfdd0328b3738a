"""A request and its progress, the chunks and the batch of a step, and the interface of the
runner."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from secrets import randbits
from time import monotonic
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from kvfold.cache.prefix import BlockHasher
from kvfold.engine.requests.packed import PackedContext
from kvfold.engine.requests.params import CacheParams as CacheParams
from kvfold.engine.requests.params import SamplingParams as SamplingParams
from kvfold.utils.errors import SettingError

# eos: an end token. stop: a stop token or string. length: the request's own limit or `max_tokens`.
# pool: its cache entries no longer fit in the pool.
FinishReason = Literal["eos", "stop", "length", "pool", "cancelled", "error"]

UNKNOWN_TOKEN = -1  # placeholder of a sampled token that is not on the host yet


class Status(Enum):
    WAITING = "waiting"  # has no slot
    RUNNING = "running"  # has a slot
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Natural log-probability of the chosen token, and the likeliest (token id, logprob) pairs.

    rank: only of prompt tokens: rank among all tokens, 1 for the likeliest.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """New outputs of one request in a step.

    token_ids: new tokens, an end token included.
    text: new text that may be shown; empty without a tokenizer.
    logprobs: one entry per token, or None.
    finish_reason: set in a request's last output.
    error: the error message if finish_reason is "error".
    refusal: the wrong setting, if that is the cause of the error.
    prompt_logprobs: if requested, of all prompt tokens but the first; comes with the first outputs.
    """

    id: int
    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    refusal: SettingError | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


Deliver = Callable[[StepOutput], object]


class Guide(Protocol):
    """Matches one request's outputs against a grammar."""

    def prepare(self, outputs: Sequence[int]) -> None:
        """Start computing the answer of `allowed_tokens`, after the next `flush`."""
        ...

    def flush(self) -> None:
        """Send the prepared calls of all guides that share a grammar."""
        ...

    def allowed_tokens(self, outputs: Sequence[int]) -> np.ndarray:
        """Tokens that may come next, as a bit mask int32 [ceil(V / 32)]: bit j % 32 of entry j //
        32 is token j.

        outputs: all outputs so far; a repeated call has no side effect. Raises SettingError if it
            takes too long, or the grammar's process has ended.
        """
        ...


@dataclass(kw_only=True, eq=False)
class Request:
    """One request. Ids count up in order of arrival.

    token_ids: prompt, then outputs.
    num_computed: leading tokens that went through the model since the request got its slot; also
        the position of the next one. The cache holds fewer entries once some are evicted.
    num_prefill: leading tokens to prefill: the prompt, and after a pre-emption also the outputs so
        far; with `CacheParams.compress_after` only so many.
    num_cached: leading tokens that came from the prefix cache when the request first ran.
    num_indexed: leading blocks that the prefix cache has (None: it gets no blocks of this request).
    num_scored: leading tokens whose entries have been re-scored for a policy.
    num_evicted: tokens, averaged over groups, evicted since the request got its slot.
    num_overtaken: cache entries of the requests that were admitted before it although it came
        first.
    last_compressed: step in which it was last compressed, or was within its budget after its
        prefill.
    seed: of its sampling; from entropy if `sampling` has none.
    deliver: called with its outputs (None: `Engine.step` returns them).
    guide: matcher of its grammar.
    context: packed context that holds the entries of its first tokens.
    block_hasher: hashes of its blocks, for the prefix cache.
    served: log-probabilities of all outputs, each with the likeliest token (None: they are not
        needed, as the request is not in the sample of `Shadow`).
    """

    id: int
    token_ids: list[int]
    num_prompt: int
    sampling: SamplingParams
    cache: CacheParams = field(default_factory=CacheParams)
    guide: Guide | None = None
    seed: int = field(init=False)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    refusal: SettingError | None = None  # the wrong setting, if that is the cause of the error
    slot: int | None = None
    num_computed: int = 0
    num_prefill: int = 0
    last_compressed: int | None = None
    num_compressed: int = 0  # num_computed at the last compression
    num_scored: int = 0
    num_overtaken: int = 0
    num_evicted: float = 0.0
    num_restarts: int = 0
    num_cached: int = 0
    num_indexed: int | None = None
    context: PackedContext | None = None
    block_hasher: BlockHasher | None = None
    started: float | None = None  # when it first ran, time.monotonic() in seconds
    num_delivered: int = 0  # outputs that were delivered
    deliver: Deliver | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    served: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    _counts: dict[int, int] = field(default_factory=dict)
    _num_counted: int = 0

    def __post_init__(self) -> None:
        self.num_prefill = self.cache.compress_after or len(self.token_ids)
        self.seed = randbits(63) if self.sampling.seed is None else self.sampling.seed

    @property
    def open_slot(self) -> int:
        """The slot of a running request. Asserts that it has one."""
        assert self.slot is not None, f"request {self.id} is {self.status.value}"
        return self.slot

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @cached_property
    def measured_sampling(self) -> SamplingParams:
        """Its sampling, with at least one likeliest token per output if it is in a sample."""
        if self.served is None or self.sampling.logprobs:
            return self.sampling
        return self.sampling.changed(logprobs=1)

    def append(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Append an output. logprobs: with as many likeliest tokens as `measured_sampling` says."""
        self.token_ids.append(token)
        if logprobs is None:
            return
        if self.served is None:
            self.logprobs.append(logprobs)
            return
        self.served.append(logprobs)
        if (wanted := self.sampling.logprobs) is not None:
            self.logprobs.append(replace(logprobs, top=logprobs.top[:wanted]))

    @property
    def outputs(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    def token_counts(self) -> dict[int, int]:
        """How often each token of prompt and outputs occurs in the outputs. Only counts tokens that
        are new since the last call."""
        for i in range(self._num_counted, len(self.token_ids)):
            token = self.token_ids[i]
            self._counts[token] = self._counts.get(token, 0) + (i >= self.num_prompt)
        self._num_counted = len(self.token_ids)
        return self._counts

    @property
    def num_pending(self) -> int:
        """Tokens that have not been computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def context_length(self) -> int:
        """Number of leading tokens that a packed context holds."""
        return 0 if self.context is None else len(self.context.token_ids)

    @property
    def prefilled(self) -> bool:
        return self.num_computed >= self.num_prefill

    @property
    def num_uncompressed(self) -> int:
        """Tokens computed since the last compression."""
        return self.num_computed - self.num_compressed

    @property
    def wants_compression(self) -> bool:
        """Whether its own schedule (`CacheParams.every`) says that it is compressed now, if it is
        above its budget."""
        every = self.cache.every
        return every is not None and self.num_uncompressed >= every

    @property
    def max_entries(self) -> int:
        """Most cache entries per group that it can write."""
        return self.num_prompt + self.sampling.max_new_tokens - 1

    def allows_overtake(self, other: "Request") -> bool:
        """Whether `other` may be admitted before this request, which waits for pages. The cache
        entries of such requests in total must not exceed its own, and there is none once it ran and
        was pre-empted."""
        return not self.num_outputs and self.num_overtaken + other.max_entries <= self.max_entries

    def entries_needed(self, headroom: int) -> int:
        """Cache entries per group that it writes for its pending tokens and up to `headroom` more
        outputs. The last output of a request has none."""
        return self.num_pending + min(headroom, self.sampling.max_new_tokens - self.num_outputs - 1)

    # Only these methods change status, slot and progress. The caller allocates and frees the slot.

    @classmethod
    def unscheduled(cls, slot: int) -> "Request":
        """An empty request that runs without a scheduler. The caller appends to `token_ids`."""
        request = cls(id=0, token_ids=[], num_prompt=0, sampling=SamplingParams())
        request.start(slot)
        return request

    def start(self, slot: int) -> None:
        """Run in a slot of the pool."""
        self.status, self.slot = Status.RUNNING, slot
        self.started = self.started or monotonic()

    def prefill_until(self, position: int) -> None:
        """Prefill the tokens before `position`; decode those from `position` on."""
        self.num_prefill = position

    def next_chunk(self, count: int) -> "ScheduledChunk":
        """The next `count` tokens. Its last token samples if it is the last known one."""
        start, end = self.num_computed, self.num_computed + count
        tokens = tuple(self.token_ids[start:end])
        ends = end == len(self.token_ids)
        return ScheduledChunk(request=self, start=start, tokens=tokens, wants_logits=ends)

    def next_decode_chunk(self) -> "ScheduledChunk":
        """The chunk of the next output, which is being sampled: all known tokens are computed."""
        assert not self.num_pending, f"{self.num_pending} tokens are not computed"
        return ScheduledChunk(
            request=self, start=self.num_computed, tokens=(UNKNOWN_TOKEN,), wants_logits=True
        )

    def advance(self, count: int) -> None:
        """Count `count` more tokens as computed."""
        self.num_computed += count

    def rewind(self, position: int) -> None:
        """Drop the tokens from `position` on."""
        self.num_computed, self.num_scored = position, min(self.num_scored, position)
        del self.token_ids[position:]

    def restart(self) -> None:
        """Go back to waiting, to prefill all known tokens again."""
        self.status, self.slot = Status.WAITING, None
        self.num_computed = self.num_compressed = self.num_scored = 0
        self.num_evicted = 0.0
        self.num_indexed = None
        self.num_restarts += 1
        self.last_compressed = None
        self.num_prefill = self.cache.compress_after or len(self.token_ids)

    def finish(
        self, reason: FinishReason, error: str | None, refusal: SettingError | None = None
    ) -> None:
        """Set the final status."""
        self.status, self.slot = Status.FINISHED, None
        self.finish_reason, self.error, self.refusal = reason, error, refusal

    def output(self) -> StepOutput:
        """The outputs that have not been delivered."""
        start = self.num_delivered
        wanted = self.sampling.logprobs is not None
        scored = self.sampling.prompt_logprobs is not None and not start and self.num_outputs
        return StepOutput(
            id=self.id,
            token_ids=tuple(self.token_ids[self.num_prompt + start :]),
            logprobs=tuple(self.logprobs[start:]) if wanted else None,
            finish_reason=self.finish_reason,
            error=self.error,
            refusal=self.refusal,
            prompt_logprobs=tuple(self.prompt_logprobs) if scored else None,
        )


@dataclass(frozen=True, kw_only=True)
class ScheduledChunk:
    """Consecutive tokens of one request, the first at position `start`. A token that is not on the
    host yet is UNKNOWN_TOKEN."""

    request: Request
    start: int
    tokens: tuple[int, ...]
    wants_logits: bool  # whether its last token samples the next one

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + len(self.tokens)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt tokens are requested."""
        request = self.request
        if request.sampling.prompt_logprobs is None or request.num_outputs:
            return False
        return self.start + 1 < request.num_prompt

    @property
    def is_decode(self) -> bool:
        return self.start >= self.request.num_prefill

    @property
    def is_current(self) -> bool:
        """Whether its request still runs and expects this chunk next."""
        return self.request.status is Status.RUNNING and self.request.num_computed == self.start


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tokens of one forward pass: decodes, then prefill chunks. Their pages are allocated."""

    chunks: tuple[ScheduledChunk, ...]

    @cached_property
    def num_decode(self) -> int:
        return sum(chunk.is_decode for chunk in self.chunks)

    @cached_property
    def with_logits(self) -> tuple[ScheduledChunk, ...]:
        return tuple(chunk for chunk in self.chunks if chunk.wants_logits)


class Runner(Protocol):
    """The model side of the engine."""

    @property
    def supports_async(self) -> bool:
        """Whether a step may be launched before the tokens of the previous one are on the host."""
        ...

    @property
    def supports_long_chunks(self) -> bool:
        """Whether a prefill chunk may have as many tokens as a step, since its workspace does not
        grow faster."""
        ...

    @property
    def prefill_multiple(self) -> int:
        """Prefill chunks end at multiples of this number of tokens, or with the prompt."""
        ...

    def run(self, batch: Batch, tokens: Tensor | None = None) -> Tensor:
        """Run a batch and write its cache entries. Returns logits [len(batch.with_logits), V] in
        order.

        tokens: int64 [N] on the device; replaces the batch's tokens, which are not on the host yet.
        """
        ...

    @property
    def can_retry(self) -> bool:
        """Whether `run` may be called again with a part of a batch for which it failed."""
        ...

    def free_outside_windows(self, batch: Batch) -> None:
        """Free the pages that left all sliding windows, after a batch is computed."""
        ...

    def needs_compression(self, request: Request) -> bool:
        """Whether a request holds more pages than its budget and can be compressed. May drop cached
        pages without readers, so that there is room for copies of those that it shares."""
        ...

    @property
    def demotes(self) -> bool:
        """Whether entries become low-rank as requests go on, so that each is compressed whenever it
        is above its budget."""
        ...

    def compress(self, requests: list[Request]) -> None:
        """Evict entries of requests down to their budgets, and free the pages."""
        ...

    def num_demotable(self, request: Request) -> int:
        """How many pages `demote` can free of a request, in each group; 0 unless pages may be
        demoted to fewer bits."""
        ...

    def demote(self, request: Request) -> None:
        """Demote some of a request's oldest pages to fewer bits, and free the bytes."""
        ...

    def needs_rescoring(self, request: Request) -> bool:
        """Whether a request must be re-scored before it can be compressed."""
        ...

    def rescore_segment(self, request: Request) -> None:
        """Run a re-scoring pass over the next prompt segment of a request. Allocates no pages."""
        ...
