"""The interface of a scorer: what data it needs, and how it scores the entries of a cache.

An *entry* is what the cache stores of one token in one group: a key vector and a value vector, or
their latents. A *group* is a KV head, or the heads of a layer that share stored numbers.

Shapes: B sequences, Hq query heads, Hk KV heads, G groups of one sequence (all layers), T entry
slots, padded to the longest group of all sequences, W the policy's window, d dimension of a head.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

Need = Literal["attention", "keys", "learned", "local", "queries", "rescoring", "values"]
Groups = Sequence[tuple[int, ...]]  # for one layer: the KV heads of each group


class EntrySource(Protocol):
    """Keys, values and queries of the sequences to score, computed at each call."""

    def keys(self, layer: int) -> Tensor: ...

    def values(self, layer: int) -> Tensor: ...

    def queries(self, layer: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class EntriesView:
    """The stored entries of B sequences, as a scorer sees them.

    positions: int [B, G, T].
    valid: bool [B, G, T], False for empty slots.
    raw_metrics: fp32 [B, G, T]; read it as `metrics`.
    sizes: T of each sequence without padding.
    in_order: entries are sorted by position.
    layers: the groups of each layer.
    needs: the scorer's needs; nothing else may be read.
    generator: for random numbers, on the device of the entries.
    source: reads keys, values and queries.
    scale: factor of attention scores q k.
    sinks: how many of the first tokens the policy never evicts.
    """

    positions: Tensor
    valid: Tensor
    raw_metrics: Tensor
    sizes: Sequence[int]
    in_order: bool
    layers: Sequence[Groups]
    needs: frozenset[Need]
    source: EntrySource
    generator: torch.Generator | None = None
    scale: float = 1.0
    sinks: int = 0

    @property
    def metrics(self) -> Tensor:
        """fp32 [B, G, T]: the sum of `attention_scores`, or the score of a re-scoring pass, of
        local attention or of a learned projection (0: the entry was not scored). Undefined where no
        entry is valid."""
        if not self.needs & {"learned", "local", "rescoring"}:
            self._check("attention")
        return self.raw_metrics

    def keys(self, layer: int) -> Tensor:
        """Keys in the space of attention scores, [B, Hk, T, d or widest rank], in the model's
        dtype: what a query of `queries` is multiplied with. Zeros for empty slots and beyond a
        head's rank. Each call reads the pool: keep only one layer's keys at a time."""
        self._check("keys")
        return self.source.keys(layer)

    def values(self, layer: int) -> Tensor:
        """Values [B, Hk, T, d], in the model's dtype, with zeros as in `keys`. Compressed values
        lack a constant, which the bias of W_O adds. If the values' projection is folded into W_O
        (`fused`), these are the latents that attention sums, [B, Hk, T, widest rank]."""
        self._check("values")
        return self.source.values(layer)

    def queries(self, layer: int) -> tuple[Tensor, Tensor]:
        """The last W queries that the model computed, in order, [B, Hq, W, d or widest rank], and
        their positions int64 [B, W]. Missing ones are zeros at position -1. RoPE is applied, the
        scale of scores is not."""
        self._check("queries")
        return self.source.queries(layer)

    def by_layer(self, score: Callable[[int], Tensor]) -> Tensor:
        """Scores fp32 [B, G, T] of all layers: `score(layer)` [B, Hk, T], summed over the heads of
        each group."""
        layer_scores = (by_group(score(i).float(), groups) for i, groups in enumerate(self.layers))
        return torch.cat(list(layer_scores), 1)

    def _check(self, need: Need) -> None:
        assert need in self.needs, f"the scorer reads {need}, but its needs are {set(self.needs)}"


def by_group(x: Tensor, groups: Groups) -> Tensor:
    """Sum over the KV heads of each group: x [B, Hk, T] -> [B, len(groups), T]."""
    return F.pad(x, (0, 0, 0, 1))[:, _members(tuple(groups), x.shape[1], x.device)].sum(2)


@lru_cache
def _members(groups: tuple[tuple[int, ...], ...], heads: int, device: torch.device) -> Tensor:
    """KV heads of each group, int64 [G, largest group], padded with `heads`. Cached, because the
    copy to the device waits."""
    widest = max(map(len, groups))
    padded = [[*group, *[heads] * (widest - len(group))] for group in groups]
    return torch.tensor(padded, device=device)


@dataclass(frozen=True, kw_only=True)
class Scorer(ABC):
    """Gives every entry a score. A frozen dataclass, whose fields are the scorer's settings.

    needs: what `score` reads in addition to positions; nothing else is computed. `attention` is for
        subclasses of `Attention`, `local` of `Local`, `rescoring` of `Rescoring`, `queries` for
        policies with a window.
    """

    needs: ClassVar[frozenset[Need]] = frozenset()

    def __post_init__(self) -> None:
        for need in self.needs.difference(get_args(Need)):
            raise ValueError(f"needs must be among {', '.join(get_args(Need))}; got {need!r}")

    @property
    def prefill_multiple(self) -> int:
        """Multiple of tokens in which a prompt's prefill chunks must be cut, so that they are
        scored together."""
        return 1

    def num_too_young(self, window: int | None) -> int:
        """How many of the last tokens are too young for a fair score, if the last `window` queries
        are observed."""
        return window or 0

    @abstractmethod
    def score(self, view: EntriesView) -> Tensor:
        """Score of each entry, fp32 [B, G, T]; the lowest are evicted first. Undefined where no
        entry is valid. A sequence's scores must not depend on the other sequences of the batch.
        Never waits for the device, and changes nothing."""
