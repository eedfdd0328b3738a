"""Rank methods that read the singular values of bases alone."""

import torch
from torch import Tensor

from kvfold.compression.ranks.base import Candidates, RankMethod


class Uniform(RankMethod):
    """Every latent keeps the same share of its dimensions."""

    def priorities(self, candidates: Candidates, budget: int) -> list[Tensor]:
        return [-torch.arange(c.width).double() / c.width for c in candidates]


class Energy(RankMethod):
    """ZACK eq. 6: one removal rate r for all heads. A dimension is dropped when the singular values
    from it on sum to at most r of all. Spending the budget by that tail share equals ZACK's F_p,
    the bisection of r to a target."""

    def priorities(self, candidates: Candidates, budget: int) -> list[Tensor]:
        return [
            c.singular.flip(0).cumsum(0).flip(0) / c.singular.sum().clamp(min=1e-300)
            for c in candidates
        ]

    def of_block(self, priorities: Tensor) -> Tensor:
        """The first priority of the block, so that a head whose first direction holds nearly all
        its energy does not lose it for the empty ones in the same block."""
        return priorities[0]


class Greedy(RankMethod):
    """The dimensions with the largest predicted losses stay, over all layers, heads, keys and
    values."""

    def priorities(self, candidates: Candidates, budget: int) -> list[Tensor]:
        return [c.loss for c in candidates]
