"""Policies that read the context once more.

Shapes: B sequences, G groups, T row slots.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.cache.eviction.base import Need, RowsView
from kvfold.cache.eviction.policies.keys import unlike_others
from kvfold.cache.eviction.replay import ReplayPolicy


@dataclass(frozen=True, kw_only=True)
class ReplayAndKeys(ReplayPolicy):
    """A row stays for either of two reasons: its rank by what the second reading makes of it, or
    its rank by how unlike others its key is, less `behind`. Ranks are shares of a sequence's rows
    of all groups, so that `behind` says how much of the cache the first reason has to itself.
    """

    needs = frozenset[Need]({"replay", "keys"})

    behind: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.behind <= 1:
            raise ValueError(f"behind must be in [0, 1], got {self.behind}; 1 leaves keys out")

    def score(self, view: RowsView) -> Tensor:
        scored = view.valid & (view.metrics > 0)
        apart = view.by_layer(lambda layer: unlike_others(view.keys(layer).float()))
        read, unlike = (rank_of(x, scored) for x in (view.metrics, apart))
        return torch.maximum(read, unlike - self.behind).where(scored, torch.inf)


def rank_of(x: Tensor, scored: Tensor) -> Tensor:
    """Share of a sequence's scored rows that come before each of them, fp32 [B, G, T] in [0, 1), by
    ascending x [B, G, T]; anything where a row is not scored."""
    count = scored.flatten(1).sum(1, keepdim=True)
    order = x.where(scored, torch.inf).flatten(1).argsort(dim=1, stable=True)
    ranks = torch.arange(order.shape[1], device=x.device).expand_as(order)
    share = ranks / count.clamp(min=1)
    return torch.empty_like(share).scatter_(1, order, share).view_as(x)


def kvzip() -> ReplayPolicy:
    """KVzip: attention while the context is repeated, one ranking over all layers and heads."""
    return ReplayPolicy(name="kvzip", scope="all", sinks=4)


def kvzip_past() -> ReplayPolicy:
    """KVzip whose second reading of a piece sees what came before its end alone, so that scores of
    a beginning serve all who begin so."""
    return replace(kvzip(), name="kvzip-past", whole=False)


def kvzip_keys() -> ReplayAndKeys:
    """KVzip's rows, and those whose keys are least like others' (KeyDiff)."""
    return ReplayAndKeys(name="kvzip-keys", scope="all", sinks=4, recent_share=0.125)
