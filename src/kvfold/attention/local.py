"""Attention of a prompt's tokens to each other within short chunks, for policies that look at it.

Shapes: a part's B sequences, T tokens of each; N tokens of a step, R numbers of a row, G groups of
a layer, S row slots.
"""

import torch
from torch import Tensor

from kvfold.attention.base import LayerMaps
from kvfold.attention.metadata import AttentionMetadata, CacheView
from kvfold.cache.eviction.base import by_group
from kvfold.cache.eviction.local import LocalPolicy, local_attention
from kvfold.cache.eviction.replay import LEAST
from kvfold.ops.store import add_metrics


class LocalAttention:
    """Adds to the metrics of a prompt's rows as they are stored."""

    def __init__(self, view: CacheView, policy: LocalPolicy) -> None:
        self.view, self.policy = view, policy

    def add(
        self, layer: LayerMaps, part: AttentionMetadata, q: Tensor, rows: Tensor, index: Tensor
    ) -> None:
        """Of a part that is prefilled. The step's q [1, Hq, N, .] and rows [1, N, R]; index int64
        [N, G]: where these lie in the layer's groups."""
        pages = self.view.pages[layer.index]
        rope, own = None, part.of(rows[:, None])[:, 0]
        if layer.rope is not None:
            rope = layer.rope.tables(own, part.positions[:, None].long(), part.stop)
        found = local_attention(part.of(q), layer.score_keys(own, rope), self.policy.chunk)
        found = by_group(found, [group.heads for group in pages.groups]).clamp(min=LEAST)
        at = part.of(index[None, None])[:, 0].mT  # [B, G, T]
        values = found.new_zeros(*at.shape[:2], part.size(layer.index)).scatter_(2, at, found)
        there = torch.zeros_like(values, dtype=torch.bool).scatter_(2, at, True)
        add_metrics(pages, part.slots, values, there)
