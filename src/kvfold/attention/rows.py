"""Token entries gathered from pages, for backends that do not read pages and for eviction policies.

Shapes: B sequences, S stored token entries (of the longest group), R numbers of an entry, G groups
of a layer, Hk KV heads, d head dim, r the widest rank of a side (keys or values).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kvfold.attention.base import Columns, LayerAttention
from kvfold.attention.metadata import CacheView, PoolView
from kvfold.attention.queries import RecentQueries
from kvfold.layout.pages import Group
from kvfold.ops.common.attention import Tables
from kvfold.ops.common.launch import upload
from kvfold.ops.common.pages import owner_of
from kvfold.ops.store import StoredRows, gather


def gather_entries(view: CacheView, layer: LayerAttention, slots: Tensor, size: int) -> StoredRows:
    """Token entries [B, S, R] of the sequences slots int64 [B] in a layer; size: entries of the
    longest group."""
    pages = view.pages[layer.index]
    return gather(pages, slots, pages.lengths[slots], view.dtype, size)


def rope_of(
    layer: LayerAttention, stored: StoredRows, groups: tuple[Group, ...], stop: int
) -> Tables | None:
    """cos, sin [B, 1 or Hk, S, rotary dims] at the entries' positions; None if keys are not
    reconstructed."""
    if layer.rope is None:
        return None
    positions = stored.positions[:, group_of_head(groups, stored.positions.device)]
    return layer.rope.tables(stored.rows, positions.long(), stop)


@lru_cache
def group_of_head(groups: tuple[Group, ...], device: torch.device) -> Tensor:
    """Group of each KV head as a tensor [Hk]; [1] if there is one group. See `owner_of`."""
    owner = owner_of(groups)
    return torch.tensor(owner if any(owner) else owner[:1], device=device)


@dataclass(frozen=True)
class PoolEntries:
    """The stored token entries of sequences for eviction policies, read one layer at a time.

    slots: int64 [B].
    size: S.
    computed: tokens of each sequence; first: of those, the tokens of a packed context, whose
        queries the sequence did not compute.
    recent: the buffer of last queries, if there is one.
    """

    view: PoolView
    layers: Sequence[LayerAttention]
    recent: RecentQueries | None
    slots: Tensor
    size: int
    computed: list[int]
    first: list[int]

    def keys(self, layer: int) -> Tensor:
        """Keys in the space of scores [B, Hk, S, d or r]."""
        maps, stored = self.layers[layer], self._stored(layer)
        groups = self.view.pages[layer].groups
        rope = rope_of(maps, stored, groups, max(self.computed))
        k = maps.score_keys(stored.rows, rope)
        keys = k if maps.reconstructs_keys else _within_ranks(k, maps.key_columns)
        return self._present(keys, layer, stored)

    def values(self, layer: int) -> Tensor:
        """Values [B, Hk, S, d], or latents [B, Hk, S, r] if their projection is folded into W_O."""
        maps, stored = self.layers[layer], self._stored(layer)
        if maps.value_up is not None:
            return self._present(maps.full_values(stored.rows).transpose(1, 2), layer, stored)
        columns = maps.value_columns
        v = columns.spread(columns.gather(stored.rows))
        return self._present(_within_ranks(v, columns), layer, stored)

    def queries(self, layer: int) -> tuple[Tensor, Tensor]:
        """The last W queries [B, Hq, W, d or r] and their positions int64 [B, W]."""
        assert self.recent is not None, "queries are kept for policies that need them"
        computed, first = upload(np.array((self.computed, self.first)), self.slots.device)
        return self.recent.read(layer, self.slots, computed, first)

    def _stored(self, layer: int) -> StoredRows:
        return gather_entries(self.view, self.layers[layer], self.slots, self.size)

    def _present(self, x: Tensor, layer: int, stored: StoredRows) -> Tensor:
        """x [B, Hk, S, .] with zeros in empty slots."""
        heads = group_of_head(self.view.pages[layer].groups, x.device)
        return x.where(stored.valid[:, heads, :, None], 0.0)


def _within_ranks(x: Tensor, columns: Columns) -> Tensor:
    """x [B, Hk, S, r] with zeros beyond each head's rank, where `gather` fills up short latents."""
    if columns.uniform:
        return x
    ranks = upload(np.array(columns.head_ranks(1)), x.device)
    inside = torch.arange(columns.widest, device=x.device) < ranks[:, None]
    return x.where(inside[:, None], 0.0)
