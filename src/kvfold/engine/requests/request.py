"""A request: its tokens, how far the cache has them, and a step's batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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

# An end token; a stop string; its own limit or the longest that a sequence may be; pages that it
# grew to need and nobody has.
FinishReason = Literal["eos", "stop", "length", "pool", "cancelled", "error"]

UNREAD = -1  # a token that the device alone knows yet


class Status(Enum):
    WAITING = "waiting"  # owns no slot
    RUNNING = "running"  # owns a slot
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Natural log-probability of the chosen token, and the likeliest (token id, logprob) pairs.
    rank: of a prompt's token among all, 1 of the likeliest."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """One request's part of a step's outputs.

    token_ids: new outputs, an end token included. text: what of it may be shown; empty without a
    tokenizer. logprobs: one entry a token, or None. finish_reason: set in a request's last output.
    error: what went wrong, if that is "error"; refusal: what is wrong with its settings, where
    these are why. prompt_logprobs: where they are wanted, of all but the prompt's first token, with
    the first outputs.
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
    """A grammar's place in one request's text."""

    def ask(self, outputs: Sequence[int]) -> None:
        """Have what `allowed` tells looked for, once it is sent."""
        ...

    def send(self) -> None:
        """Send what was asked for, of all guides that share a grammar."""
        ...

    def allowed(self, outputs: Sequence[int]) -> np.ndarray:
        """Tokens that may come next, as bits int32 [ceil(V / 32)]: bit j % 32 of number j // 32 is
        token j's. outputs: all so far; asking twice changes nothing. Raises SettingError where it
        takes too long, or nobody knows."""
        ...


@dataclass(kw_only=True, eq=False)
class Request:
    """One request. Ids count up in order of arrival.

    token_ids: prompt, then outputs. num_computed: leading tokens that went through the model since
    the slot was opened; the next one's position. The cache may hold fewer rows than that once some
    are evicted. num_prefill: tokens that this slot prefills: the prompt, and after a pre-emption
    the outputs until then too. last_compressed: step in which this slot was last compressed, or
    found within its budget after prefill. seed: of its draws, from entropy where none was given.
    num_overtaken: rows of requests that were let in before it. num_evicted: tokens, averaged over
    groups, that the cache lost to eviction since this slot was opened. deliver: takes its outputs,
    in place of who steps. guide: of a text that keeps to a grammar. num_cached: leading tokens that
    others had computed when it first ran; names: of its blocks; num_indexed: leading blocks that
    others may have (None: none of them, nor any that come). context: rows of its first tokens.
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
    refusal: SettingError | None = None  # what its settings have to do with the error
    slot: int | None = None
    num_computed: int = 0
    num_prefill: int = 0
    last_compressed: int | None = None
    num_compressed: int = 0  # num_computed at the last compression
    num_scored: int = 0  # leading tokens whose rows were read again for a policy
    num_overtaken: int = 0
    num_evicted: float = 0.0
    num_restarts: int = 0
    num_cached: int = 0
    num_indexed: int | None = None
    context: PackedContext | None = None
    names: BlockHasher | None = None
    started: float | None = None  # when it first ran, in seconds of time.monotonic
    num_delivered: int = 0  # outputs that left the engine
    deliver: Deliver | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    _counts: dict[int, int] = field(default_factory=dict)
    _num_counted: int = 0

    def __post_init__(self) -> None:
        self.num_prefill = len(self.token_ids)
        self.seed = randbits(63) if self.sampling.seed is None else self.sampling.seed

    @property
    def open_slot(self) -> int:
        """Its slot in the pool, which it must own."""
        assert self.slot is not None, f"request {self.id} is {self.status.value}"
        return self.slot

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def outputs(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    def seen(self) -> dict[int, int]:
        """How often each token so far is an output. Reads what came since the last call only."""
        for i in range(self._num_counted, len(self.token_ids)):
            token = self.token_ids[i]
            self._counts[token] = self._counts.get(token, 0) + (i >= self.num_prompt)
        self._num_counted = len(self.token_ids)
        return self._counts

    @property
    def num_pending(self) -> int:
        """Tokens the model has yet to see."""
        return len(self.token_ids) - self.num_computed

    @property
    def own_start(self) -> int:
        """The position of its first token that is in no packed context."""
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
        """Whether it is to be compressed by now, if it is over its budget."""
        every = self.cache.every
        return every is not None and self.num_uncompressed >= every

    @property
    def most_rows(self) -> int:
        """Rows it writes in all, if nothing ends it early."""
        return self.num_prompt + self.sampling.max_new_tokens - 1

    def lets_by(self, other: "Request") -> bool:
        """Whether another may be let in before it, which waits for pages: for as many rows as it
        needs itself, and none once it ran and was pre-empted."""
        return not self.num_outputs and self.num_overtaken + other.most_rows <= self.most_rows

    def rows_ahead(self, headroom: int) -> int:
        """Rows it writes until `headroom` more tokens are out; the last token needs none."""
        return self.num_pending + min(headroom, self.sampling.max_new_tokens - self.num_outputs - 1)

    # Status, slot and progress are written by these alone; the pool's slots by who calls them.

    @classmethod
    def by_hand(cls, slot: int) -> "Request":
        """An empty one that runs without a scheduler: who holds it appends to `token_ids`."""
        request = cls(id=0, token_ids=[], num_prompt=0, sampling=SamplingParams())
        request.run(slot)
        return request

    def run(self, slot: int) -> None:
        self.status, self.slot = Status.RUNNING, slot
        self.started = self.started or monotonic()

    def prefill_until(self, position: int) -> None:
        """Tokens from `position` on are decoded."""
        self.num_prefill = position

    def next_chunk(self, count: int) -> "ScheduledChunk":
        """The next `count` tokens; logits are wanted after the last one known."""
        start, end = self.num_computed, self.num_computed + count
        tokens = tuple(self.token_ids[start:end])
        ends = end == len(self.token_ids)
        return ScheduledChunk(request=self, start=start, tokens=tokens, wants_logits=ends)

    def chunk_ahead(self) -> "ScheduledChunk":
        """Its next token once all known ones are computed: the one that these lead to."""
        assert not self.num_pending, f"{self.num_pending} tokens are not computed"
        return ScheduledChunk(
            request=self, start=self.num_computed, tokens=(UNREAD,), wants_logits=True
        )

    def advance(self, count: int) -> None:
        """The next `count` tokens went through the model."""
        self.num_computed += count

    def rewind(self, position: int) -> None:
        """Forget the tokens from `position` on."""
        self.num_computed, self.num_scored = position, min(self.num_scored, position)
        del self.token_ids[position:]

    def restart(self) -> None:
        """Back to waiting, to prefill everything known so far."""
        self.status, self.slot = Status.WAITING, None
        self.num_computed = self.num_compressed = self.num_scored = 0
        self.num_evicted = 0.0
        self.num_indexed = None
        self.num_restarts += 1
        self.last_compressed = None
        self.num_prefill = len(self.token_ids)

    def finish(
        self, reason: FinishReason, error: str | None, refusal: SettingError | None = None
    ) -> None:
        self.status, self.slot = Status.FINISHED, None
        self.finish_reason, self.error, self.refusal = reason, error, refusal

    def output(self) -> StepOutput:
        """Outputs that have not left the engine yet."""
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
    """Consecutive tokens of one request, the first at position `start`. One that nobody has read
    yet is UNREAD."""

    request: Request
    start: int
    tokens: tuple[int, ...]
    wants_logits: bool  # of its last token

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + len(self.tokens)

    @property
    def scores_prompt(self) -> bool:
        """Whether it tells how likely tokens of a prompt are that wants to know."""
        request = self.request
        if request.sampling.prompt_logprobs is None or request.num_outputs:
            return False
        return self.start + 1 < request.num_prompt

    @property
    def is_decode(self) -> bool:
        return self.start >= self.request.num_prefill

    @property
    def is_next(self) -> bool:
        """Whether its request goes on with it still."""
        return self.request.status is Status.RUNNING and self.request.num_computed == self.start


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tokens of one forward pass: decodes, then prefill chunks. Their rows have pages."""

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
    def goes_ahead(self) -> bool:
        """Whether a step may be launched before the tokens of the one in front are read."""
        ...

    @property
    def long_chunks(self) -> bool:
        """Whether a prompt's chunk may be as long as a step: its work space grows no faster."""
        ...

    @property
    def unit(self) -> int:
        """Tokens of a prompt that are looked at together: its chunks end at multiples of so many,
        or where it does."""
        ...

    def run(self, batch: Batch, tokens: Tensor | None = None) -> Tensor:
        """Write every chunk's rows; logits [len(batch.with_logits), V] in order. tokens: int64 [N]
        on the device, in place of the batch's own, which nobody has read yet."""
        ...

    @property
    def repeatable(self) -> bool:
        """Whether `run` may be called again with a part of a batch that it failed for."""
        ...

    def slide(self, batch: Batch) -> None:
        """Free what no token after a batch that is done sees."""
        ...

    def needs_compression(self, request: Request) -> bool:
        """Does it hold more pages than its budget?"""
        ...

    @property
    def demotes(self) -> bool:
        """Whether requests are compressed as they go on, each whenever it is over its budget."""
        ...

    def compress(self, requests: list[Request]) -> None:
        """Evict to each one's budget and give the pages back to the pool."""
        ...

    def unread(self, request: Request) -> bool:
        """Whether some of its rows have to be read again before it can be compressed."""
        ...

    def read(self, request: Request) -> None:
        """Read a piece of it again, which gets no pages."""
        ...
