"""The baseline that any metric has to beat."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kvfold.cache.eviction.base import Policy, RowsView


class Random(Policy):
    """Any row may go."""

    def score(self, view: RowsView) -> Tensor:
        """A sequence's draws do not depend on how long those beside it are."""
        num_groups, most = view.valid.shape[1:]
        how, device = view.generator, view.valid.device
        draws = (torch.rand(num_groups, x, generator=how, device=device) for x in view.sizes)
        return torch.stack([F.pad(x, (0, most - x.shape[1])) for x in draws])


def random() -> Random:
    """Rows drawn at random in every group."""
    return Random(name="random")
