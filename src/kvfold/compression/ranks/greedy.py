"""Ours: ranks by predicted loss."""

from collections.abc import Sequence

from torch import Tensor

from kvfold.compression.ranks.base import LatentCandidate, RankMethod


class Greedy(RankMethod):
    """The largest predicted losses of all layers, heads, keys and values."""

    def priorities(self, candidates: Sequence[LatentCandidate], budget: int) -> list[Tensor]:
        return [c.loss for c in candidates]
