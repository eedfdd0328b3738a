"""Attention in plain PyTorch over gathered token entries with a mask, for everything that no kernel
serves.

Shapes: B sequences of one attention call (a part of the step), T queries per sequence, S stored
token entries (of the longest group), R numbers of an entry, Hk KV heads, s widest value rank, W
input width of W_O.
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.attention.backend import AttentionBackend, Task, Weighed
from kvfold.attention.base import LayerAttention, LayerShape
from kvfold.attention.buckets import attend_in_buckets
from kvfold.attention.metadata import AttentionMetadata
from kvfold.attention.rows import gather_entries, group_of_head, rope_of
from kvfold.cache.eviction.scorers.attention import attention_scores
from kvfold.layout.pages import Group
from kvfold.ops.common.attention import attend_rows
from kvfold.ops.store import add_metrics


class Fallback(AttentionBackend):
    """Serves any layer and any queries. Computes attention weights explicitly if they are
    observed."""

    returns_weights: ClassVar[bool] = True

    @classmethod
    def unsupported_reason(cls, layer: LayerShape, groups: Sequence[Group], task: Task) -> None:
        return None

    def attend(
        self, layer: LayerAttention, part: AttentionMetadata, q: Tensor, into: Tensor | None = None
    ) -> Tensor:
        return attend_in_buckets(partial(self._attend, layer), part, layer.index, q)

    def _attend(self, layer: LayerAttention, part: AttentionMetadata, q: Tensor) -> Tensor:
        """Attention with all sequences padded to the longest."""
        pages = self.view.pages[layer.index]
        stored = gather_entries(self.view, layer, part.slots, part.size(layer.index))
        rope = rope_of(layer, stored, pages.groups, part.stop)
        member = group_of_head(pages.groups, q.device)
        positions = stored.positions[:, member]  # [B, 1 or Hk, S]
        queries = part.positions[:, None, :, None]
        mask = stored.valid[:, member, None] & (positions[:, :, None] <= queries)
        if layer.window is not None:
            mask &= positions[:, :, None] > queries - layer.window
        if mask.shape[1] > 1:  # one mask per KV head; repeat it for each query head
            mask = mask.repeat_interleave(layer.geometry.queries_per_kv, dim=1)
        observation, lengths = self.view.observing, part.prompt_lengths
        out, weights = layer.attend(q, stored.rows, rope, mask, lengths is not None)
        if observation is not None and lengths is not None and weights is not None:
            heads = [group.heads for group in pages.groups]
            head_positions = positions.expand(-1, layer.geometry.num_kv_heads, -1)
            observed = part.positions, lengths, observation
            added = attention_scores(weights, head_positions, *observed, heads, layer.index)
            add_metrics(pages, part.slots, added, stored.valid)
        return out

    def weigh(self, layer: LayerAttention, part: AttentionMetadata, q: Tensor) -> Weighed:
        joined = attend_in_buckets(partial(self._weigh, layer), part, layer.index, q)
        return joined[..., :-1], joined[..., -1]

    def _weigh(self, layer: LayerAttention, part: AttentionMetadata, q: Tensor) -> Tensor:
        """Output and log2-sum-exp2 side by side, fp32 [B, Hq, 1, s + 1]."""
        pages = self.view.pages[layer.index]
        stored = gather_entries(self.view, layer, part.slots, part.size(layer.index))
        k = layer.score_keys(stored.rows, rope_of(layer, stored, pages.groups, part.stop))
        v = layer.value_columns.spread(layer.value_columns.gather(stored.rows))
        heads = group_of_head(pages.groups, q.device)
        valid = stored.valid[:, heads]
        if layer.window is not None:
            valid = valid & (stored.positions[:, heads] > part.positions[..., None] - layer.window)
        valid = valid.expand(-1, k.shape[1], -1)
        out, lse = attend_rows(q[:, :, 0], k, v, valid, layer.scale, layer.softcap)
        return torch.cat((out.float(), lse[..., None]), -1)[:, :, None]
