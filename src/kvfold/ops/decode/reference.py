"""Attention of one new token a sequence over all of its rows, gathered. Shapes as in `decode`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.ops.common.attention import attend_rows
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.decode.groups import segments_of
from kvfold.ops.store.reference import gather
from kvfold.spec.layout import Group


def plan_layers(layers: Sequence[Sequence[Group]], lengths: Tensor, queries: int) -> list[None]:
    """Nothing is planned."""
    return [None] * len(layers)


def decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, plan: None = None
) -> tuple[Tensor, Tensor]:
    """As `ops.decode.decode`."""
    stored, groups = gather(pages, slots, pages.lengths[slots], q.dtype), pages.groups
    k = _spread(stored.rows, groups, "k", q.shape[-1])
    v = _spread(stored.rows, groups, "v", None)
    order = torch.tensor([g.heads[0] for g in groups], device=q.device).argsort()
    return attend_rows(q, k[:, order], v[:, order], stored.valid[:, order], scale)


def _spread(rows: Tensor, groups: Sequence[Group], side: str, width: int | None) -> Tensor:
    """One side's columns of rows [B, T, R] as [B, G, T, width]."""
    segments = [segments_of(group, side) for group in groups]
    if width is None:
        width = max((sum(s.width for s in found) for found in segments), default=0)
    out = rows.new_zeros(rows.shape[0], len(groups), rows.shape[1], width)
    for g, found in enumerate(segments):
        for s in found:
            begin = s.start - found[0].start
            out[:, g, :, begin : begin + s.width] = rows[..., s.start : s.start + s.width]
    return out
