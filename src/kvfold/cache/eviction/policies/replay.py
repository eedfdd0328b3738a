"""The KVzip policies, which score tokens in a re-scoring pass over the context.

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
    """Score = max(rank by attention in the re-scoring pass, rank by dissimilarity of the key -
    `behind`).

    Ranks are in [0, 1), over the rows of all groups of a sequence. `behind` is the share of the
    cache that the first criterion alone decides.
    """

    needs = frozenset[Need]({"replay", "keys"})

    behind: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.behind <= 1:
            raise ValueError(f"behind must be in [0, 1], got {self.behind}; 1 leaves keys out")

    def score(self, view: RowsView) -> Tensor:
        scored = view.valid & (view.metrics > 0)
        dissimilarity = view.by_layer(lambda layer: unlike_others(view.keys(layer).float()))
        attended, unlike = (rank_of(x, scored) for x in (view.metrics, dissimilarity))
        return torch.maximum(attended, unlike - self.behind).where(scored, torch.inf)


def rank_of(x: Tensor, scored: Tensor) -> Tensor:
    """Rank of each scored row of a sequence by ascending x [B, G, T], as a share of their number:
    fp32 [B, G, T] in [0, 1). Undefined where a row is not scored."""
    count = scored.flatten(1).sum(1, keepdim=True)
    order = x.where(scored, torch.inf).flatten(1).argsort(dim=1, stable=True)
    ranks = torch.arange(order.shape[1], device=x.device).expand_as(order)
    share = ranks / count.clamp(min=1)
    return torch.empty_like(share).scatter_(1, order, share).view_as(x)


def kvzip() -> ReplayPolicy:
    """KVzip: attention while the model repeats the context; one ranking over all layers and
    heads."""
    return ReplayPolicy(name="kvzip", scope="all", sinks=4)


def kvzip_past() -> ReplayPolicy:
    """KVzip with re-scoring passes that see the cache only up to the end of their segment, so that
    scores are valid for all requests that share the prefix."""
    return replace(kvzip(), name="kvzip-past", whole=False)


def kvzip_keys() -> ReplayAndKeys:
    """KVzip combined with KeyDiff: also keep rows whose keys are least similar to the others."""
    return ReplayAndKeys(name="kvzip-keys", scope="all", sinks=4, recent_share=0.125)
