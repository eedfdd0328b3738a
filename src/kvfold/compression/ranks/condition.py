"""Rank method `condition`: by the condition numbers of W_K and W_V (LoRC)."""

from collections.abc import Iterable

import torch
from torch import Tensor

from kvfold.compression.bases.base import Source
from kvfold.compression.ranks.base import Candidates, RankMethod
from kvfold.models.adapter import Projections


class Condition(RankMethod):
    """LoRC eq. 13: d_l = d_max (1 - u_l (1 - d_min / d_max)).

    u_l in [0, 1] is how far the layer's log cumulative condition number (eq. 12) lies below the
    largest one. d_max is the full width, and d_min is lowered until the budget is met (§6.2). Where
    one dimension is still too much, about half of the cache, LoRC defines nothing. As an extension,
    d_max then falls at this d_min / d_max, so that no latent is left with nothing.
    """

    settings = frozenset({"whole_share"})

    def scores(self, candidates: Candidates, sources: Iterable[Source]) -> list[float]:
        logs = log_conditions(source.weights for source in sources)
        return [logs[c.layer] for c in candidates]

    def stays_whole(self, layer: int, num_layers: int, score: float) -> bool:
        """Whether the layer is one of the first `whole_share` of all.

        LoRC's Algorithm 1 leaves layers whole whose cumulative condition number is above a
        threshold. That number (eq. 12) falls from layer to layer, so these are the first ones. The
        thresholds of §6.2 have no unit; which share they leave follows from Table 2
        (docs/lab/paper-differences.md).
        """
        num_whole = round(self.recipe.whole_share * num_layers)
        return layer < num_whole or super().stays_whole(layer, num_layers, score)

    def priorities(self, candidates: Candidates, budget: int) -> list[Tensor]:
        logs = torch.tensor([c.score for c in candidates]).double()
        span = (logs.max() - logs.min()).clamp(min=1e-12)
        below = ((logs.max() - logs) / span).clamp(min=1e-12)
        return [_priorities(c.width, u) for c, u in zip(candidates, below, strict=True)]


def _priorities(width: int, u: Tensor) -> Tensor:
    """Priorities [width]. Dimension j is kept while d_l > j: d_max rises to the width at d_min of
    one dimension in `width`, then d_min rises to the width. u: of the layer, above 0."""
    place, least = torch.arange(width).double() / width, 1 / width
    reached = 1 - u * (1 - least)  # d_l / d_max at the least d_min
    return torch.where(place < reached, 2 - least - place / reached, (1 - place) / u)


def log_conditions(layers: Iterable[Projections]) -> list[float]:
    """LoRC eq. 12: for every layer the log of the product of the condition numbers of W_K and W_V
    of this layer and all later ones."""
    conditions = [[_log_condition(w) for w in (weights.k, weights.v)] for weights in layers]
    total, logs = 0.0, []
    for keys, values in reversed(conditions):
        total = total + keys + values
        logs.append(total)
    return logs[::-1]


def _log_condition(weight: Tensor) -> float:
    s = torch.linalg.svdvals(weight)
    return float((s[0] / s[-1].clamp(min=1e-12 * s[0])).log())
