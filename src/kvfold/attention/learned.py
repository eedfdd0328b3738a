"""What rows are worth by their tokens' hidden states, written beside them as they are stored.

Shapes: N tokens of a step, D width, Hk KV heads, G groups of a layer.
"""

import torch
from torch import Tensor

from kvfold.attention.base import LayerMaps
from kvfold.attention.metadata import PoolView
from kvfold.ops.store import set_metrics

LARGEST = 10.0  # of a logarithm; learned from weights of attention, whose largest is 0


class LearnedScores:
    """Of one layer at a time: first its hidden states, then where the rows went."""

    def __init__(self, view: PoolView) -> None:
        self.view = view

    def of(self, layer: LayerMaps, x: Tensor) -> Tensor:
        """What tokens of hidden states x [1, N, D] are worth to groups, fp32 [N, G], above 0."""
        assert layer.score_map is not None, "checked where the runner is built"
        weight, bias = layer.score_map.float().split([x.shape[-1], 1], dim=1)
        found = (x[0].float() @ weight.mT + bias[:, 0]).clamp(-LARGEST * 5, LARGEST).exp()
        groups = self.view.pages[layer.index].groups
        return torch.stack([found[:, list(group.heads)].amax(1) for group in groups], 1)

    def write(self, layer: LayerMaps, slots: Tensor, index: Tensor, worth: Tensor) -> None:
        """worth fp32 [N, G] of rows index int64 [N, G] of sequences slots [N]."""
        set_metrics(self.view.pages[layer.index], slots, index, worth)
