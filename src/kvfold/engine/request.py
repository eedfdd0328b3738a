"""A request: its settings, its tokens, how far the cache has them, and a step's batch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from math import inf
from secrets import randbits
from typing import Literal, Protocol

from torch import Tensor

FinishReason = Literal["stop", "length", "cancelled", "error"]
Detokenize = Callable[[list[int]], str]

GREEDY_BELOW = 1e-5  # a lower temperature is greedy: dividing by it says nothing more


def _require(legal: bool, field: str, value: object, wanted: str) -> None:
    if not legal:
        raise ValueError(f"{field} must be {wanted}; got {value!r}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Raises ValueError.

    temperature: 0 is greedy. top_k, then top_p, limit what temperature leaves (None, 1: no limit).
    seed: the same seed gives the same tokens whatever else is served (None: from entropy).
    stop: strings that end the text, which is cut before them. logprobs: how many of the likeliest
    tokens are reported beside the chosen one (None: nothing is), before temperature and limits.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        _require(0 <= self.temperature < inf, "temperature", self.temperature, "0 (greedy) or more")
        _require(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "at least 1, or None")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]; 1 is no limit")
        seeds = self.seed is None or 0 <= self.seed < 2**63
        _require(seeds, "seed", self.seed, "in [0, 2**63), or None")
        strings = not isinstance(self.stop, str) and all(self.stop)
        _require(strings, "stop", self.stop, "a tuple of strings that are not empty")
        count = self.logprobs is None or self.logprobs >= 0
        _require(count, "logprobs", self.logprobs, "at least 0, or None")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, kw_only=True)
class CacheParams:
    """How many tokens' rows a request may keep after compression. Raises ValueError.

    max_cache_tokens: rows a group on average. keep_tokens: fraction of the tokens seen so far.
    Neither: nothing is evicted. protected: most recent tokens that are never evicted (None: as the
    policy says).
    """

    max_cache_tokens: int | None = None
    keep_tokens: float | None = None
    protected: int | None = None

    def __post_init__(self) -> None:
        most, keep, protected = self.max_cache_tokens, self.keep_tokens, self.protected
        _require(most is None or most >= 1, "max_cache_tokens", most, "at least 1, or None")
        _require(keep is None or 0 < keep <= 1, "keep_tokens", keep, "in (0, 1], or None")
        _require(protected is None or protected >= 0, "protected", protected, "at least 0, or None")
        if most is not None and keep is not None:
            raise ValueError(
                f"max_cache_tokens={most} and keep_tokens={keep} both limit the cache: give one"
            )
        room = most is None or protected is None or protected <= most
        _require(room, "protected", protected, f"at most max_cache_tokens={most}")


class Status(Enum):
    WAITING = "waiting"  # owns no slot
    RUNNING = "running"  # owns a slot
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Natural log-probability of the chosen token, and the likeliest (token id, logprob) pairs."""

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(kw_only=True, eq=False)
class Request:
    """One request. Ids count up in order of arrival.

    token_ids: prompt, then outputs. num_computed: leading tokens that went through the model since
    the slot was opened; the next one's position. The cache may hold fewer rows than that once some
    are evicted. num_prefill: tokens that this slot prefills: the prompt, and after a pre-emption
    the outputs until then too. last_compressed: step in which this slot was last compressed, or
    found within its budget after prefill. seed: of its draws, from entropy where none was given.
    """

    id: int
    token_ids: list[int]
    num_prompt: int
    sampling: SamplingParams
    cache: CacheParams = CacheParams()
    seed: int = field(init=False)
    text: "TextStream | None" = None
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    slot: int | None = None
    num_computed: int = 0
    num_prefill: int = 0
    last_compressed: int | None = None
    num_compressed: int = 0  # num_computed at the last compression
    num_delivered: int = 0  # outputs that step() has returned
    logprobs: list[TokenLogprobs] = field(default_factory=list)

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

    def prefill_until(self, position: int) -> None:
        """Tokens from `position` on are decoded."""
        self.num_prefill = position

    def next_chunk(self, count: int) -> "ScheduledChunk":
        """The next `count` tokens; logits are wanted after the last one known."""
        start, end = self.num_computed, self.num_computed + count
        tokens = tuple(self.token_ids[start:end])
        ends = end == len(self.token_ids)
        return ScheduledChunk(request=self, start=start, tokens=tokens, wants_logits=ends)

    def advance(self, count: int) -> None:
        """The next `count` tokens went through the model."""
        self.num_computed += count

    def rewind(self, position: int) -> None:
        """Forget the tokens from `position` on."""
        self.num_computed = position
        del self.token_ids[position:]

    def restart(self) -> None:
        """Back to waiting, to prefill everything known so far."""
        self.status, self.slot = Status.WAITING, None
        self.num_computed = self.num_compressed = 0
        self.last_compressed = None
        self.num_prefill = len(self.token_ids)

    def finish(self, reason: FinishReason, error: str | None) -> None:
        self.status, self.slot = Status.FINISHED, None
        self.finish_reason, self.error = reason, error


@dataclass(frozen=True, kw_only=True)
class ScheduledChunk:
    """Consecutive tokens of one request, the first at position `start`."""

    request: Request
    start: int
    tokens: tuple[int, ...]
    wants_logits: bool  # of its last token

    @property
    def is_decode(self) -> bool:
        return self.start >= self.request.num_prefill


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

    def run(self, batch: Batch) -> Tensor:
        """Write every chunk's rows; logits fp32 [len(batch.with_logits), V] in order."""
        ...

    def needs_compression(self, request: Request) -> bool:
        """Does it hold more pages than its budget?"""
        ...

    def compress(self, requests: list[Request]) -> None:
        """Evict to each one's budget and give the pages back to the pool."""
        ...


class TextStream:
    """Text of a request's outputs, and which part of it may be shown already.

    Held back: an unfinished UTF-8 character, and an end that may be the beginning of a stop string.
    """

    def __init__(self, detokenize: Detokenize, stop: tuple[str, ...]) -> None:
        self.detokenize = detokenize
        self.stop = stop
        self.text = ""
        self._ids: list[int] = []  # the first `_context` are in `text` and say how the rest reads
        self._context = 0
        self._shown = 0

    def push(self, token: int) -> bool:
        """Take in a token; True if a stop string ended the text, which is cut before it."""
        return self._read([*self._ids, token], last=False)

    def take(self, *, last: bool) -> str:
        """The text that may be shown and has not been; everything if `last`."""
        if last:
            self._read(self._ids, last=True)
        end = len(self.text) - (0 if last else self._held())
        start, self._shown = self._shown, max(self._shown, end)  # a cut text may end like a stop
        return self.text[start:end]

    def _read(self, ids: list[int], *, last: bool) -> bool:
        """Move what is a whole character to the text. A detokenizer's error changes nothing."""
        before = self.detokenize(ids[: self._context])
        now = self.detokenize(ids)
        self._ids = ids
        if now.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return False
        self._ids = ids[self._context :]
        self._context = len(self._ids)
        seen = len(self.text)
        self.text += now[len(before) :]
        return self._cut(seen)

    def _cut(self, seen: int) -> bool:
        """Cut before the stop string that is complete first, whatever the tokens' borders."""
        found = []
        for stop in self.stop:
            start = self.text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if found:
            self.text = self.text[: min(found)[1]]
        return bool(found)

    def _held(self) -> int:
        """Characters at the end that begin a stop string."""
        longest = max(map(len, self.stop), default=0) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self.stop):
                return size
        return 0
