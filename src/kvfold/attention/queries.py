"""The last queries of every sequence, kept in a ring by layer.

Shapes: B sequences, T queries of each, Hq query heads, S slots, W queries of a slot's ring; dk
numbers of a query in the space of scores, the widest of a layer's heads.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvfold.attention.base import LayerMaps
from kvfold.attention.metadata import AttentionMetadata, PoolView


class QueryRing:
    """The query at position p lies in row slot * W + p % W of its layer's buffer, which a step
    finds without the host. layers: by number, those whose queries are kept."""

    def __init__(self, width: int, view: PoolView, layers: Mapping[int, LayerMaps]) -> None:
        self.width, self.layers, self.device = width, layers, view.pool.device
        self.num_rows = len(view.pool.lengths) * width
        self.queries: dict[int, Tensor] = {}
        for index, layer in layers.items():
            size = self.num_rows, layer.geometry.num_query_heads, layer.key_width
            self.queries[index] = torch.zeros(size, dtype=view.dtype, device=self.device)

    def _rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Where queries of slots at positions lie; int64, of a shape that both broadcast to."""
        return slots * self.width + positions % self.width


Recent = Sequence[tuple[AttentionMetadata, Tensor]]


class RecentQueries(QueryRing):
    """The last W queries that the model computed, for policies that look at queries."""

    def __init__(self, width: int, view: PoolView, layers: Mapping[int, LayerMaps]) -> None:
        super().__init__(width, view, layers)
        self.positions = torch.full((self.num_rows,), -1, device=self.device)

    def begin(self, parts: Sequence[AttentionMetadata]) -> Recent:
        """Before a step: its parts, and the rows int64 [B * min(T, W)] of their last queries. Never
        waits for the device."""
        found = []
        for part in parts:
            last = part.positions[:, -self.width :]
            rows = self._rows(part.slots[:, None], last).flatten()
            self.positions.index_copy_(0, rows, last.flatten())
            found.append((part, rows))
        return found

    def keep(self, layer: int, recent: Recent, packed: Tensor) -> None:
        """Keep the last of the step's queries, packed [1, Hq, N, dk]; later parts come later."""
        for part, rows in recent:
            last = part.of(packed)[:, :, -self.width :].transpose(1, 2).flatten(0, 1)
            self.queries[layer].index_copy_(0, rows, last)

    def read(self, layer: int, slots: Tensor, computed: Tensor) -> tuple[Tensor, Tensor]:
        """Of sequences slots int64 [B] with `computed` int64 [B] tokens: queries in order
        [B, Hq, W, dk], and positions int64 [B, W]; 0 and -1 where there were fewer, or where the
        sequence went back and others lie in their rows."""
        wanted = computed[:, None] + torch.arange(-self.width, 0, device=self.device)
        rows = self._rows(slots[:, None], wanted)
        kept = (wanted >= 0) & (self.positions[rows] == wanted)
        q = self.queries[layer][rows].where(kept[..., None, None], 0.0)
        return q.transpose(1, 2), wanted.where(kept, -1)
