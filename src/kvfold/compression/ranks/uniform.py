"""The same ranks everywhere."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.compression.ranks.base import LatentCandidate, RankMethod


class Uniform(RankMethod):
    """The same share of every latent."""

    def priorities(self, candidates: Sequence[LatentCandidate], budget: int) -> list[Tensor]:
        return [-torch.arange(c.width).double() / c.width for c in candidates]
