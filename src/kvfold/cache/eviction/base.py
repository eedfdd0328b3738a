"""The contract of an eviction policy: what it needs to see, and what a row is worth to it.

A policy is a frozen dataclass with one function, `score`. The rest is done for all of them:
`select` protects rows, shares the budget between groups and frees whole pages, `compact` moves
what stays together. To ablate, edit one: `dataclasses.replace(kv_compress(), window=32, power=1)`.

Shapes: B sequences, Hq query heads, Hk KV heads, G groups of one sequence (all layers), T row
slots, padded to the longest group of all sequences, W the policy's window, d numbers of a head.
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
Groups = Sequence[tuple[int, ...]]  # KV heads of each of a layer's groups


class RowSource(Protocol):
    """Keys, values and queries of the sequences that are scored, read when asked for."""

    def keys(self, layer: int) -> Tensor: ...

    def values(self, layer: int) -> Tensor: ...

    def queries(self, layer: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class RowsView:
    """The stored rows of B sequences, as a policy sees them.

    positions int [B, G, T]; valid bool [B, G, T]; mass fp32 [B, G, T]: read it as `metrics`; sizes:
    T of every sequence alone; in_order: positions ascend; layers: the groups of every layer;
    needs: of the policy; generator: for what is drawn, on the rows' device; source: of the rest;
    scale: of scores q k.
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
        """fp32 [B, G, T]: summed `attention_mass`, or what a replay, tokens close by or a learned
        map made of rows (0: nothing did); anything where no row is valid."""
        if not self.needs & {"learned", "local", "replay"}:
            self._check("attention")
        return self.mass

    def keys(self, layer: int) -> Tensor:
        """Keys in the space of scores, [B, Hk, T, d or widest rank], in the model's dtype: what a
        query of `queries` is multiplied with. Zeros where there is no row and beyond a head's own
        rank. Read from the pool at every call: keep none but the layer's at hand."""
        self._check("keys")
        return self.source.keys(layer)

    def values(self, layer: int) -> Tensor:
        """Values [B, Hk, T, d], in the model's dtype, zeros as in `keys`; of compressed ones less a
        constant that W_O's bias adds. Where their map sits in W_O (`fused`) the latents that
        attention sums, [B, Hk, T, widest rank]."""
        self._check("values")
        return self.source.values(layer)

    def queries(self, layer: int) -> tuple[Tensor, Tensor]:
        """The last W queries that the model computed, in order, [B, Hq, W, d or widest rank], and
        their positions int64 [B, W]: zeros at -1 where there were fewer. RoPE is done, the scale of
        scores is not."""
        self._check("queries")
        return self.source.queries(layer)

    def by_layer(self, score: Callable[[int], Tensor]) -> Tensor:
        """Scores fp32 [B, G, T]: `score(layer)` [B, Hk, T] of all layers, summed over a group's
        heads."""
        each = (by_group(score(i).float(), groups) for i, groups in enumerate(self.layers))
        return torch.cat(list(each), 1)

    def _check(self, need: Need) -> None:
        assert need in self.needs, f"the policy reads {need}, but its needs are {set(self.needs)}"


def by_group(x: Tensor, groups: Groups) -> Tensor:
    """Sums over the KV heads of groups: x [B, Hk, T] -> [B, len(groups), T]."""
    return F.pad(x, (0, 0, 0, 1))[:, _members(tuple(groups), x.shape[1], x.device)].sum(2)


@lru_cache
def _members(groups: tuple[tuple[int, ...], ...], heads: int, device: torch.device) -> Tensor:
    """int64 [G, most heads of a group], padded with `heads`. Cached, as the copy waits."""
    widest = max(map(len, groups))
    padded = [[*group, *[heads] * (widest - len(group))] for group in groups]
    return torch.tensor(padded, device=device)


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """How rows are scored and how groups share the budget. Lengths are tokens.

    needs: what `score` reads beside positions; nothing else is computed. `attention` is for
        subclasses of `AttentionPolicy`, `local` of `LocalPolicy`, `queries` for policies with a
        window.
    scope: who shares the pages that are kept. `group`: every group as many; `layer`: every layer
        as many a group, its groups compete (Ada-KV); `pyramid`: fewer the deeper the layer, its
        groups alike (PyramidKV); `all`: all groups of all layers compete (KV-Compress).
    window: the last queries that are looked at (None: all of the prompt's). As many last tokens are
        never evicted, being too young for a fair score.
    sinks, recent: first and last tokens that are never evicted. recent_share: the share of what a
        sequence may keep that its last tokens are, in [0, 1) (H2O).
    floor: what part of an even share of its unit's pages a group has for sure, in [0, 1]; the rest
        is shared as groups compete (the safeguard alpha of Ada-KV).
    page: rows of a page that the method was published with; None: it has no say.
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
        """Tokens of a prompt that are looked at together, as it is prefilled."""
        return 1

    @abstractmethod
    def score(self, view: RowsView) -> Tensor:
        """Each row's worth, fp32 [B, G, T]: the lowest go first. Anything where no row is
        valid. A sequence's scores must not depend on those beside it. Never waits for the device,
        and changes nothing."""

    def protected_recent(self, tokens: int) -> int:
        """Last tokens that are never evicted where a group may keep `tokens` on average: `recent`,
        its share of them, and those too young for a fair score."""
        return max(self.recent, int(tokens * self.recent_share), self.window or 0)
