"""The interface of a cache to evaluation: tokens in, logits out, bytes counted.

Perplexity, needle and tasks use `Session` alone. `DenseSession` is transformers' cache and
`PagedSession` the engine's paged cache.
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
    """What the sequences of a session hold.

    tokens: that were fed. cache_bytes: of the stored entries; in the paged cache, of one sequence's
    pages after its prompt was compressed. kept_fraction: bits of stored numbers and quantiser
    metadata over those of the uncompressed 16-bit cache. pool_fraction: bytes of pages (with
    rounding, positions and metrics) and of the page table over the same. The fractions are None for
    transformers' cache.
    """

    tokens: int
    cache_bytes: int
    kept_fraction: float | None = None
    pool_fraction: float | None = None


class Session(ABC):
    """Sequences in a cache. It is empty when the `with` block begins, and freed when it ends."""

    evicts: bool = False
    can_rewind: bool = True
    whole_windows: ClassVar[bool]  # also feed a window's last token, which predicts nothing

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
        """Append tokens ids int64 [B, T], `chunk` at a time, and yield logits [B, c, V] of each
        chunk.

        prompt: where the prompt ends, in tokens from the start of the sequence; policies with a
        window observe the last queries before it. None: unchanged. last: only the logits of each
        chunk's last token are needed. Raises ValueError if the cache is full.
        """
        if prompt is not None:
            self._end_prompt(prompt)
        while ids.shape[1]:
            step = min(chunk or self.chunk, self._most())
            yield self._append(ids[:, :step], last)
            ids = ids[:, step:]

    @abstractmethod
    def _append(self, ids: Tensor, last: bool) -> Tensor:
        """Append one chunk."""

    @abstractmethod
    def _end_prompt(self, position: int) -> None:
        """Set where the prompt ends."""

    def _most(self) -> int:
        """Most tokens that can be appended at once."""
        return sys.maxsize

    def read(self, ids: Sequence[int], *, prompt: int | None = None) -> Tensor:
        """Append tokens to the only sequence; return the logits [V] of the last one."""
        for logits in self.chunks(torch.tensor([ids]), prompt=prompt, last=True):
            last = logits[0, -1]
        return last

    def greedy(
        self, logits: Tensor, num_tokens: int, stops: Collection[int | None] = ()
    ) -> list[int]:
        """Generate up to `num_tokens` tokens greedily, the first from `logits` [V]. Ends before a
        token of `stops`."""
        tokens: list[int] = []
        while (token := int(logits.argmax())) not in stops:
            tokens.append(token)
            if len(tokens) == num_tokens:
                break
            logits = self.read([token])
        return tokens

    @abstractmethod
    def compress(self) -> None:
        """Evict to the budget, if there is one."""

    @abstractmethod
    def footprint(self) -> Footprint:
        """Count what the cache holds now."""

    @abstractmethod
    def mark(self) -> Any:
        """Return the position of the sequences for `rewind`. Compression makes it invalid."""

    @abstractmethod
    def rewind(self, mark: Any) -> None:
        """Remove the tokens that were fed since `mark`. Only if `can_rewind`."""


Sessions = Callable[[], Session]
