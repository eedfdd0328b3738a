"""ZACK's ranks."""

from collections.abc import Sequence

from torch import Tensor

from kvfold.compression.ranks.base import LatentCandidate, RankMethod


class Energy(RankMethod):
    """ZACK eq. 6: one rate r for all heads; a dimension goes when the tail from it is <= r of the
    sum of singular values. Filling by that tail share is F_p, the bisection of r to a target."""

    def priorities(self, candidates: Sequence[LatentCandidate], budget: int) -> list[Tensor]:
        return [
            c.singular.flip(0).cumsum(0).flip(0) / c.singular.sum().clamp(min=1e-300)
            for c in candidates
        ]
