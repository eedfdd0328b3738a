"""Ring buffers of the last queries of each sequence, by layer.

Shapes: B sequences of one attention call (a part of the step), T queries per sequence, Hq query
heads, S slots, W queries of a slot's ring; dk dimension of a query in the space of scores, the
largest of a layer's heads.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvfold.attention.base import LayerAttention
from kvfold.attention.metadata import AttentionMetadata, PoolView


class QueryRing:
    """Ring buffers of queries: the query at position p is in row slot * W + p % W of its layer's
    buffer, which needs no host data to compute. layers: those whose queries are buffered, by
    index."""

    def __init__(self, width: int, view: PoolView, layers: Mapping[int, LayerAttention]) -> None:
        self.width, self.layers, self.device = width, layers, view.pool.device
        self.num_rows = len(view.pool.lengths) * width
        self.queries: dict[int, Tensor] = {}
        for index, layer in layers.items():
            size = self.num_rows, layer.geometry.num_query_heads, layer.key_width
            self.queries[index] = torch.zeros(size, dtype=view.dtype, device=self.device)

    def _rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Buffer indices of queries of slots at positions: int64, the broadcast of both shapes."""
        return slots * self.width + positions % self.width


Recent = Sequence[tuple[AttentionMetadata, Tensor]]


class RecentQueries(QueryRing):
    """The last W queries that the model computed, for policies that use queries."""

    def __init__(self, width: int, view: PoolView, layers: Mapping[int, LayerAttention]) -> None:
        super().__init__(width, view, layers)
        self.positions = torch.full((self.num_rows,), -1, device=self.device)

    def begin(self, parts: Sequence[AttentionMetadata]) -> Recent:
        """Before a step: for each part, the buffer indices int64 [B * min(T, W)] of its last
        queries. Never waits for the device."""
        recent = []
        for part in parts:
            last = part.positions[:, -self.width :]
            rows = self._rows(part.slots[:, None], last).flatten()
            self.positions.index_copy_(0, rows, last.flatten())
            recent.append((part, rows))
        return recent

    def keep(self, layer: int, recent: Recent, packed: Tensor) -> None:
        """Buffer the last of the step's queries, packed [1, Hq, N, dk]."""
        for part, rows in recent:
            last = part.slice_of(packed)[:, :, -self.width :].transpose(1, 2).flatten(0, 1)
            self.queries[layer].index_copy_(0, rows, last)

    def read(
        self, layer: int, slots: Tensor, computed: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The last W queries of sequences slots int64 [B] with `computed` int64 [B] tokens, of
        which the first `first` int64 [B] came with a packed context: queries in order [B, Hq, W,
        dk] and positions int64 [B, W]. Missing ones are 0 at position -1: there were fewer, or the
        sequence was rolled back and other queries took their places."""
        positions = computed[:, None] + torch.arange(-self.width, 0, device=self.device)
        rows = self._rows(slots[:, None], positions)
        # At earlier positions are queries of the sequence that had the slot before.
        is_present = (positions >= first[:, None]) & (self.positions[rows] == positions)
        q = self.queries[layer][rows].where(is_present[..., None, None], 0.0)
        return q.transpose(1, 2), positions.where(is_present, -1)
