"""A request: its settings, its tokens, how far the cache has them, and a step's batch."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from numbers import Integral
from secrets import randbits
from time import monotonic
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from kvfold.cache.prefix import Names
from kvfold.config import SEEDS, check, setting
from kvfold.engine.packed import PackedContext
from kvfold.errors import SettingError
from kvfold.text import check_text

# An end token; a stop string; its own limit or the longest that a sequence may be; pages that it
# grew to need and nobody has.
FinishReason = Literal["eos", "stop", "length", "pool", "cancelled", "error"]

UNREAD = -1  # a token that the device alone knows yet
GREEDY_BELOW = 1e-5  # a lower temperature is greedy: dividing by it says nothing more


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Raises ValueError.

    temperature: 0 is greedy. top_k, then top_p, limit what temperature leaves (None, 1: no limit).
    min_p: nor is a token taken that is less likely than this share of the likeliest.
    seed: the same seed gives the same tokens (None: from entropy). stop: strings that end the text,
    which is cut before them; stop_token_ids: tokens that do, and are no text. min_tokens: before so
    many no end token, and none of these, is taken. skip_special_tokens: these are no text.
    logprobs: how many of the likeliest tokens are reported beside the chosen one (None: nothing
    is), before all that changes or limits what is likely.
    logit_bias: what is added to tokens' logits, a dict or (token id, bias) pairs.
    presence_penalty, frequency_penalty: taken off the logits of outputs, once, and for each time.
    repetition_penalty: divides positive logits of all tokens so far, and multiplies others.
    allowed_token_ids: no others are taken (None: all are). bad_words: texts, or their token ids,
    that do not come: never the last of their tokens behind the others.
    json_schema, regex: what the whole text keeps to, and ends where it is complete; a schema is a
    dict, a bool or its text.
    """

    max_new_tokens: int = setting(128, "Most tokens to add.", least=1)
    temperature: float = setting(0.0, "Sample at this temperature; 0 is greedy.", least=0)
    top_k: int | None = setting(None, "Sample from the K likeliest tokens only.", least=1)
    top_p: float = setting(
        1.0, "Sample from the likeliest tokens that hold this probability only.", above=0, most=1
    )
    min_p: float = setting(0.0, "Least share of the likeliest's probability.", least=0, most=1)
    seed: int | None = setting(None, "Of the sampling.", **SEEDS)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = setting(0, "Tokens before an end.", least=0)
    ignore_eos: bool = setting(False, "Go on after an end token.")
    skip_special_tokens: bool = setting(True, "Show no special tokens.")
    logprobs: int | None = setting(None, "Likeliest tokens to report.", least=0)
    logit_bias: tuple[tuple[float, float], ...] = ()
    presence_penalty: float = setting(0.0, "Of tokens said.", least=-2, most=2)
    frequency_penalty: float = setting(0.0, "Of every time said.", least=-2, most=2)
    repetition_penalty: float = setting(1.0, "Of all tokens so far.", above=0)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    json_schema: str | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        if isinstance(self.json_schema, Mapping | bool):
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        check(self)
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "logit_bias", tuple(map(tuple, self.logit_bias)))
        if not all(self.stop):
            raise ValueError(f"stop must be strings that are not empty; got {self.stop!r}")
        self._check_logit_bias()
        self._check_allowed()

    def _check_logit_bias(self) -> None:
        for pair in self.logit_bias:
            if len(pair) != 2 or not (isinstance(pair[0], Integral) and abs(pair[1]) <= 100):
                raise SettingError(
                    "`logit_bias` must give token ids a number in -100..100; got "
                    f"{':'.join(map(str, pair))}"
                )

    def _check_allowed(self) -> None:
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise SettingError("`allowed_token_ids` must name at least 1 token; got none")
        words = tuple(x if isinstance(x, str) else tuple(x) for x in self.bad_words)
        object.__setattr__(self, "bad_words", words)
        if not all(words):
            raise SettingError(f"`bad_words` must be texts that are not empty; got {words!r}")
        if not self.guided:
            return
        if self.json_schema is not None and self.regex is not None:
            raise SettingError("`json_schema` and `regex` both say what the text is: give one")
        if self.min_tokens or self.ignore_eos:
            raise SettingError(
                f"`{'regex' if self.json_schema is None else 'json_schema'}` says itself where the "
                "text ends: leave out `min_tokens` and `ignore_eos`"
            )

    @property
    def guided(self) -> bool:
        """Whether a grammar says what the text is."""
        return self.json_schema is not None or self.regex is not None

    @cached_property
    def penalises(self) -> bool:
        """Whether tokens so far change logits."""
        neutral = (0, 0, 1)
        return neutral != (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)

    @cached_property
    def edits(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        asked = (self.penalises, self.logit_bias, self.min_tokens, self.bad_words, self.guided)
        return any(asked) or self.allowed_token_ids is not None

    @property
    def named_tokens(self) -> tuple[int, ...]:
        """Tokens that these settings name."""
        found = [*self.stop_token_ids, *(self.allowed_token_ids or ())]
        found += [id for word in self.bad_words if not isinstance(word, str) for id in word]
        return (*found, *(int(token) for token, _ in self.logit_bias))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, kw_only=True)
class CacheParams:
    """How many tokens' rows a request may keep after compression. Raises ValueError.

    max_cache_tokens: rows a group on average. keep_tokens: fraction of the tokens seen so far.
    Neither: nothing is evicted. protected: most recent tokens that are never evicted (None: as the
    policy says). prefix_caching: whether it takes rows that others computed, and they may have its
    own; cache_salt: of those with the same one alone.
    """

    max_cache_tokens: int | None = setting(None, "Tokens to keep, averaged over heads.", least=1)
    keep_tokens: float | None = setting(None, "Share of the tokens to keep.", above=0, most=1)
    protected: int | None = setting(None, "Most recent tokens that stay.", least=0)
    prefix_caching: bool = field(default=True, repr=False)
    cache_salt: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check(self)
        check_text("cache_salt", self.cache_salt or "")
        most, keep, protected = self.max_cache_tokens, self.keep_tokens, self.protected
        if most is not None and keep is not None:
            raise ValueError(
                f"max_cache_tokens={most} and keep_tokens={keep} both limit the cache: give one"
            )
        if most is not None and protected is not None and protected > most:
            raise ValueError(f"protected must be at most max_cache_tokens={most}; got {protected}")

    @property
    def limited(self) -> bool:
        """Whether it says what is evicted."""
        found = (self.max_cache_tokens, self.keep_tokens, self.protected)
        return any(x is not None for x in found)


class Status(Enum):
    WAITING = "waiting"  # owns no slot
    RUNNING = "running"  # owns a slot
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Natural log-probability of the chosen token, and the likeliest (token id, logprob) pairs."""

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """One request's part of a step's outputs.

    token_ids: new outputs, an end token included. text: what of it may be shown; empty without a
    tokenizer. logprobs: one entry a token, or None. finish_reason: set in a request's last output.
    error: what went wrong, if that is "error".
    """

    id: int
    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


Deliver = Callable[[StepOutput], object]


class Guide(Protocol):
    """A grammar's place in one request's text."""

    def allowed(self, outputs: Sequence[int]) -> np.ndarray:
        """Tokens that may come next, as bits int32 [ceil(V / 32)]: bit j % 32 of number j // 32 is
        token j's. outputs: all so far; asking twice changes nothing."""
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
    cache: CacheParams = CacheParams()
    guide: Guide | None = None
    seed: int = field(init=False)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
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
    names: Names | None = None
    started: float | None = None  # when it first ran, in seconds of time.monotonic
    num_delivered: int = 0  # outputs that left the engine
    deliver: Deliver | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
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
    def prefilled(self) -> bool:
        return self.num_computed >= self.num_prefill

    @property
    def num_uncompressed(self) -> int:
        """Tokens computed since the last compression."""
        return self.num_computed - self.num_compressed

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

    def finish(self, reason: FinishReason, error: str | None) -> None:
        self.status, self.slot = Status.FINISHED, None
        self.finish_reason, self.error = reason, error

    def output(self) -> StepOutput:
        """Outputs that have not left the engine yet."""
        start = self.num_delivered
        wanted = self.sampling.logprobs is not None
        return StepOutput(
            id=self.id,
            token_ids=tuple(self.token_ids[self.num_prompt + start :]),
            logprobs=tuple(self.logprobs[start:]) if wanted else None,
            finish_reason=self.finish_reason,
            error=self.error,
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
    def stop(self) -> int:
        """Position behind its last token."""
        return self.start + len(self.tokens)

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

    def compress(self, requests: list[Request]) -> None:
        """Evict to each one's budget and give the pages back to the pool."""
        ...
