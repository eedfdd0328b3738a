"""Eviction scores predicted from tokens' hidden states, stored as metrics together with the token
entries.

Shapes: N tokens of a step, D width, Hk KV heads, G groups of a layer.
"""

import torch
from torch import Tensor

from kvfold.attention.base import LayerAttention
from kvfold.attention.metadata import PoolView
from kvfold.ops.store import set_metrics

LARGEST = 10.0  # upper limit of the predicted log score; targets are at most 0


class LearnedScores:
    """Computes the scores of one layer from its hidden states, then writes them for the stored
    token entries."""

    def __init__(self, view: PoolView) -> None:
        self.view = view

    def of(self, layer: LayerAttention, x: Tensor) -> Tensor:
        """Scores of tokens with hidden states x [1, N, D], fp32 [N, G], above 0."""
        assert layer.score_map is not None, "checked where the runner is built"
        weight, bias = layer.score_map.float().split([x.shape[-1], 1], dim=1)
        head_scores = (x[0].float() @ weight.mT + bias[:, 0]).clamp(-LARGEST * 5, LARGEST).exp()
        groups = self.view.pages[layer.index].groups
        return torch.stack([head_scores[:, list(group.heads)].amax(1) for group in groups], 1)

    def write(self, layer: LayerAttention, slots: Tensor, index: Tensor, worth: Tensor) -> None:
        """Write scores worth fp32 [N, G] as metrics of the entries index int64 [N, G] of sequences
        slots [N]."""
        set_metrics(self.view.pages[layer.index], slots, index, worth)
