"""Rows gathered from pages, and whose they are: for backends that read no page themselves.

Shapes: B sequences of a part, S stored rows (of the longest group), R numbers of a row, G groups of
a layer, Hk KV heads.
"""

from functools import lru_cache

import torch
from torch import Tensor

from kvfold.attention.base import LayerMaps
from kvfold.attention.metadata import AttentionMetadata, PoolView
from kvfold.ops.common.attention import Tables
from kvfold.ops.store import residual as kivi
from kvfold.ops.store.reference import StoredRows
from kvfold.spec.layout import Group


def gather_rows(
    view: PoolView, layer: LayerMaps, part: AttentionMetadata, dtype: torch.dtype
) -> StoredRows:
    """Rows [B, S, R] of a part's sequences in a layer, the step's own among them."""
    arena, tables, lengths, groups = view.pages[layer.index]
    gather = kivi.gather if view.pool.layout.residual else view.store.gather
    size = part.sizes[layer.index]
    found: StoredRows = gather(arena, tables, groups, part.slots, lengths[part.slots], dtype, size)
    return found


def rope_of(
    layer: LayerMaps, stored: StoredRows, groups: tuple[Group, ...], stop: int, like: Tensor
) -> Tables | None:
    """cos, sin [B, 1 or Hk, S, rotary dims] of the rows' positions, where keys are rebuilt."""
    if layer.rope is None:
        return None
    positions = stored.positions[:, member_of(groups, like.device)]
    return layer.rope.tables(like, positions.long(), stop)


@lru_cache
def owner_of(groups: tuple[Group, ...]) -> tuple[int, ...]:
    """Group number of every KV head."""
    owner = {head: number for number, group in enumerate(groups) for head in group.heads}
    return tuple(owner[head] for head in sorted(owner))


@lru_cache
def member_of(groups: tuple[Group, ...], device: torch.device) -> Tensor:
    """The same as a tensor [Hk]; [1] where there is one group."""
    owner = owner_of(groups)
    return torch.tensor(owner if any(owner) else owner[:1], device=device)
