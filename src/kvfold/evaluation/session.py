"""One session over any cache: tokens go in, logits come out, and what they took is counted.

Perplexity, needle and tasks are written against `Session` alone; `DenseSession` is transformers'
cache and `PagedSession` the engine's pages.
Shapes: B sequences, T tokens fed, c tokens of a chunk, V vocabulary.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes that a session's sequences hold: `tokens` fed to them, `cache_bytes` their rows take.

    Of pages, one sequence's after its prompt was compressed, without tables; and kept_fraction:
    bits of stored numbers and quantiser metadata over those of the uncompressed 16-bit cache;
    pool_fraction: bytes of pages, with rounding, positions and metrics, and of the sequence's page
    table, over the same. None for transformers' cache.
    """

    tokens: int
    cache_bytes: int
    kept_fraction: float | None = None
    pool_fraction: float | None = None


class Session(ABC):
    """Sequences in a cache, empty from `with` on; the cache is free again after it."""

    evicts: bool = False
    can_rewind: bool = True
    whole_windows: ClassVar[bool]  # feed a window's last token too, which predicts nothing

    def __init__(self, chunk: int) -> None:
        if chunk < 1:
            raise ValueError(f"chunk: {chunk} is not positive; feed at least 1 token at a time")
        self.chunk = chunk

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...

    def chunks(
        self,
        ids: Tensor,
        *,
        prompt: int | None = None,
        chunk: int | None = None,
        last: bool = False,
    ) -> Iterator[Tensor]:
        """Append tokens ids int64 [B, T], `chunk` at a time; logits [B, c, V] of each chunk.

        prompt: where the prompt ends, in tokens from the sequence's start; its last queries are
        those that a window policy observes. None: as it was. last: only those of a chunk's last
        token are asked for. Raises ValueError if a cache is full.
        """
        if prompt is not None:
            self._end_prompt(prompt)
        while ids.shape[1]:
            step = min(chunk or self.chunk, self._most())
            yield self._append(ids[:, :step], last)
            ids = ids[:, step:]

    @abstractmethod
    def _append(self, ids: Tensor, last: bool) -> Tensor:
        """One chunk of `chunks`."""

    @abstractmethod
    def _end_prompt(self, position: int) -> None:
        """The prompt ends there."""

    def _most(self) -> int:
        """Tokens that may be appended at once."""
        return sys.maxsize

    def read(self, ids: Sequence[int], *, prompt: int | None = None) -> Tensor:
        """Append tokens to a sequence of its own; logits [V] of the last one."""
        for logits in self.chunks(torch.tensor([ids]), prompt=prompt, last=True):
            last = logits[0, -1]
        return last

    def greedy(
        self, logits: Tensor, num_tokens: int, stops: Collection[int | None] = ()
    ) -> list[int]:
        """Up to `num_tokens` likeliest tokens after the one whose logits [V] are given.

        Ends before a token of `stops`.
        """
        found: list[int] = []
        while (token := int(logits.argmax())) not in stops:
            found.append(token)
            if len(found) == num_tokens:
                break
            logits = self.read([token])
        return found

    @abstractmethod
    def compress(self) -> None:
        """Evict to the budget, if there is one."""

    @abstractmethod
    def footprint(self) -> Footprint:
        """Counted now."""

    @abstractmethod
    def mark(self) -> Any:
        """Where the sequences stand, for `rewind`; a compression in between makes it void."""

    @abstractmethod
    def rewind(self, mark: Any) -> None:
        """Forget the tokens fed since `mark`. Only where `can_rewind`."""


Sessions = Callable[[], Session]
