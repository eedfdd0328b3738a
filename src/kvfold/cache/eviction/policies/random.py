"""The random baseline, which any metric has to beat."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvfold.cache.eviction.base import Policy, RowsView


class Random(Policy):
    """Score rows with uniform random numbers."""

    def score(self, view: RowsView) -> Tensor:
        """Random numbers per sequence, the same whatever the lengths of the other sequences in the
        batch."""
        num_groups, num_slots = view.valid.shape[1:]
        generator, device = view.generator, view.valid.device
        draws = (torch.rand(num_groups, x, generator=generator, device=device) for x in view.sizes)
        return torch.stack([F.pad(x, (0, num_slots - x.shape[1])) for x in draws])


def random() -> Random:
    """Random eviction in each group."""
    return Random(name="random")
