"""Ranks by the spectra of bases alone."""

import torch
from torch import Tensor

from kvfold.compression.ranks.base import Candidates, RankMethod


class Uniform(RankMethod):
    """The same share of every latent."""

    def priorities(self, candidates: Candidates, budget: int) -> list[Tensor]:
        return [-torch.arange(c.width).double() / c.width for c in candidates]


class Energy(RankMethod):
    """ZACK eq. 6: one rate r for all heads; a dimension goes when the tail from it is <= r of the
    sum of singular values. Filling by that tail share is F_p, the bisection of r to a target."""

    def priorities(self, candidates: Candidates, budget: int) -> list[Tensor]:
        return [
            c.singular.flip(0).cumsum(0).flip(0) / c.singular.sum().clamp(min=1e-300)
            for c in candidates
        ]

    def of_block(self, priorities: Tensor) -> Tensor:
        """The tail from where it begins, so that no head loses a first direction that holds nearly
        all, in a block with others that hold nothing."""
        return priorities[0]


class Greedy(RankMethod):
    """The largest predicted losses of all layers, heads, keys and values."""

    def priorities(self, candidates: Candidates, budget: int) -> list[Tensor]:
        return [c.loss for c in candidates]
