"""Attention of prompt tokens to each other within short chunks, for scorers that need it.

Shapes: B sequences of one attention call (a part of the step), T tokens per sequence; N tokens of a
step, R numbers of a token entry, G groups of a layer, S stored entries.
"""

import torch
from torch import Tensor

from kvfold.attention.base import LayerAttention
from kvfold.attention.metadata import AttentionMetadata, CacheView
from kvfold.cache.eviction.base import by_group
from kvfold.cache.eviction.scorers.compactor import Local, local_attention
from kvfold.cache.eviction.scorers.rescoring import LEAST
from kvfold.ops.store import add_metrics


class LocalAttention:
    """Computes local attention as prompts are stored, and adds it to the metrics of their
    entries."""

    def __init__(self, view: CacheView, scorer: Local) -> None:
        self.view, self.scorer = view, scorer

    def add(
        self,
        layer: LayerAttention,
        part: AttentionMetadata,
        q: Tensor,
        entries: Tensor,
        index: Tensor,
    ) -> None:
        """Add the local attention of a prefill part. q [1, Hq, N, .] and entries [1, N, R] are
        the step's; index int64 [N, G]: the indices of these entries in the layer's groups."""
        pages = self.view.pages[layer.index]
        rope, part_entries = None, part.slice_of(entries[:, None])[:, 0]
        if layer.rope is not None:
            rope = layer.rope.tables(part_entries, part.positions[:, None].long(), part.stop)
        scores = local_attention(
            part.slice_of(q), layer.score_keys(part_entries, rope), self.scorer.chunk
        )
        scores = by_group(scores, [group.heads for group in pages.groups]).clamp(min=LEAST)
        indices = part.slice_of(index[None, None])[:, 0].mT  # [B, G, T]
        values = scores.new_zeros(*indices.shape[:2], part.size(layer.index)).scatter_(
            2, indices, scores
        )
        is_scored = torch.zeros_like(values, dtype=torch.bool).scatter_(2, indices, True)
        add_metrics(pages, part.slots, values, is_scored)
