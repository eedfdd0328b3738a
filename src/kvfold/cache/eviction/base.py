"""The interface of an eviction policy: what data it needs, and how it scores tokens.

A policy is a frozen dataclass with one function, `score`. The rest is shared: `select` protects
rows, divides the budget between groups and frees whole pages, `compact` moves the remaining rows
together. To vary a setting: `dataclasses.replace(kv_compress(), window=32, power=1)`.

Shapes: B sequences, Hq query heads, Hk KV heads, G groups of one sequence (all layers), T row
slots, padded to the longest group of all sequences, W the policy's window, d dimension of a head. A
row is the entry of one token in one group.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

Scope = Literal["group", "layer", "pyramid", "all"]
Need = Literal["attention", "keys", "learned", "local", "queries", "replay", "values"]
Groups = Sequence[tuple[int, ...]]  # for one layer: the KV heads of each group


class RowSource(Protocol):
    """Keys, values and queries of the sequences to score, computed at each call."""

    def keys(self, layer: int) -> Tensor: ...

    def values(self, layer: int) -> Tensor: ...

    def queries(self, layer: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class RowsView:
    """The stored rows of B sequences, as a policy sees them.

    positions: int [B, G, T].
    valid: bool [B, G, T], False for empty slots.
    mass: fp32 [B, G, T]; read it as `metrics`.
    sizes: T of each sequence without padding.
    in_order: rows are sorted by position.
    layers: the groups of each layer.
    needs: the policy's needs; nothing else may be read.
    generator: for random numbers, on the device of the rows.
    source: reads keys, values and queries.
    scale: factor of attention scores q k.
    """

    positions: Tensor
    valid: Tensor
    mass: Tensor
    sizes: Sequence[int]
    in_order: bool
    layers: Sequence[Groups]
    needs: frozenset[Need]
    source: RowSource
    generator: torch.Generator | None = None
    scale: float = 1.0

    @property
    def metrics(self) -> Tensor:
        """fp32 [B, G, T]: the sum of `attention_mass`, or the score of a re-scoring pass, of local
        attention or of a learned projection (0: the row was not scored). Undefined where no row is
        valid."""
        if not self.needs & {"learned", "local", "replay"}:
            self._check("attention")
        return self.mass

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
        assert need in self.needs, f"the policy reads {need}, but its needs are {set(self.needs)}"


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
class Policy(ABC):
    """How rows are scored and how groups share the budget. Lengths are in tokens.

    needs: what `score` reads in addition to positions; nothing else is computed. `attention` is for
        subclasses of `AttentionPolicy`, `local` of `LocalPolicy`, `queries` for policies with a
        window.
    scope: which groups compete for pages. `group`: none, all groups have the same number; `layer`:
        the groups of a layer compete, all layers have the same average per group (Ada-KV);
        `pyramid`: none, deeper layers have fewer (PyramidKV); `all`: all groups of all layers
        compete (KV-Compress).
    window: how many of the last queries are observed (None: all of the prompt). As many last tokens
        are never evicted, because they are too young for a fair score.
    sinks, recent: first and last tokens that are never evicted.
    recent_share: share of a sequence's budget that is reserved for its last tokens, in [0, 1)
        (H2O).
    floor: share of an even split that each group is guaranteed, in [0, 1]; the rest is shared by
        competition within a layer or all layers (the safeguard alpha of Ada-KV).
    page: rows per page with which the method was published; None: any.
    """

    needs: ClassVar[frozenset[Need]] = frozenset()

    name: str
    scope: Scope = "group"
    window: int | None = None
    sinks: int = 0
    recent: int = 0
    recent_share: float = 0.0
    floor: float = 0.0
    page: int | None = None

    def __post_init__(self) -> None:
        for need in self.needs.difference(get_args(Need)):
            raise ValueError(f"needs must be among {', '.join(get_args(Need))}; got {need!r}")
        if "queries" in self.needs and self.window is None:
            raise ValueError(f"{self.name!r} needs queries, so window must say how many, got None")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 query, got {self.window}; None is all")
        if self.scope not in get_args(Scope):
            legal = ", ".join(get_args(Scope))
            raise ValueError(f"scope must be one of {legal}; got {self.scope!r}")
        self._check_tokens("sinks", "recent")
        if not 0 <= self.recent_share < 1:
            raise ValueError(f"recent_share must be in [0, 1), got {self.recent_share}; 0 is off")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be in [0, 1], got {self.floor}; 0 is off")

    def _check_tokens(self, *fields: str) -> None:
        for field in fields:
            if (value := getattr(self, field)) < 0:
                raise ValueError(f"{field} must be at least 0 tokens, got {value}; 0 is off")

    @property
    def unit(self) -> int:
        """Multiple of tokens in which a prompt's prefill chunks must be cut, so that they are
        scored together."""
        return 1

    @abstractmethod
    def score(self, view: RowsView) -> Tensor:
        """Score of each row, fp32 [B, G, T]; the lowest are evicted first. Undefined where no row
        is valid. A sequence's scores must not depend on the other sequences of the batch. Never
        waits for the device, and changes nothing."""

    def protected_recent(self, tokens: int) -> int:
        """How many of the last tokens are never evicted if a group may keep `tokens` on average:
        the maximum of `recent`, `recent_share` of `tokens`, and the window, whose tokens are too
        young for a fair score."""
        return max(self.recent, int(tokens * self.recent_share), self.window or 0)
