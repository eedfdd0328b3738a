"""Attention over gathered rows in plain PyTorch, under a mask: whatever no kernel serves.

Shapes: B sequences of a part, T queries of each, S stored rows (of the longest group), R numbers of
a row, Hk KV heads, W numbers that W_O takes.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from kvfold.attention.backend import AttentionBackend, Task
from kvfold.attention.base import LayerMaps
from kvfold.attention.metadata import AttentionMetadata
from kvfold.attention.rows import gather_rows, member_of, rope_of
from kvfold.cache.eviction.attention import attention_mass
from kvfold.ops.store import StoredRows, add_metrics
from kvfold.spec.layout import Group


class Fallback(AttentionBackend):
    """Any layer and any queries, with explicit weights where these are observed."""

    observes: ClassVar[bool] = True

    @classmethod
    def supports(cls, layer: LayerMaps, groups: Sequence[Group], task: Task) -> None:
        return None

    def attend(self, layer: LayerMaps, part: AttentionMetadata, q: Tensor) -> Tensor:
        """q [B, Hq, T, .] -> [B, T, W]."""
        groups = self.view.pages[layer.index].groups
        size = part.sizes[layer.index]
        stored = gather_rows(self.view, layer, part.slots, size)
        rope = rope_of(layer, stored, groups, part.stop)
        member = member_of(groups, q.device)
        positions = stored.positions[:, member]  # [B, 1 or Hk, S]
        queries = part.positions[:, None, :, None]
        mask = stored.valid[:, member, None] & (positions[:, :, None] <= queries)
        if layer.window is not None:
            mask &= positions[:, :, None] > queries - layer.window
        mask = _per_query_head(mask, layer.geometry.queries_per_kv)
        observed = part.prompt_lengths is not None
        out, weights = layer.attend(q, stored.rows, rope, mask, need_weights=observed)
        if weights is not None:
            self._observe(layer, part, weights, positions, stored)
        return out

    def _observe(
        self,
        layer: LayerMaps,
        part: AttentionMetadata,
        weights: Tensor,
        positions: Tensor,
        stored: StoredRows,
    ) -> None:
        """Add weights [B, Hq, T, S] to the metrics of rows at positions [B, 1 or Hk, S]."""
        policy, lengths = self.view.observing, part.prompt_lengths
        if policy is None or lengths is None:
            return
        pages = self.view.pages[layer.index]
        heads = [group.heads for group in pages.groups]
        each = positions.expand(-1, sum(map(len, heads)), -1)
        mass = attention_mass(weights, each, part.positions, lengths, policy, heads)
        add_metrics(pages, part.slots, mass, stored.valid)


def _per_query_head(mask: Tensor, group: int) -> Tensor:
    """[B, 1 or Hk, T, S] -> [B, 1 or Hq, T, S]."""
    return mask if mask.shape[1] == 1 else mask.repeat_interleave(group, dim=1)
