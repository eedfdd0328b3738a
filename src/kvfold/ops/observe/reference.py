"""Eviction metrics from queries that were kept, gathering all rows. Shapes as in `observe`."""

import torch
from torch import Tensor

from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.decode.groups import segments_of
from kvfold.ops.store.reference import add_metrics, gather
from kvfold.spec.layout import Group


def observe(
    q: Tensor, lse: Tensor, positions: Tensor, pages: LayerPages, slots: Tensor, scale: float,
    *, power: int, exclude: int = 0,
) -> None:  # fmt: skip
    """As `ops.observe.observe`."""
    stored, groups = gather(pages, slots, pages.lengths[slots], q.dtype), pages.groups
    queries = q.shape[1] // len(groups)
    last = torch.where(positions < 0, -1, positions - exclude)
    mass = torch.zeros(stored.valid.shape, device=q.device)
    for g, group in enumerate(groups):
        first = group.heads[0] * queries
        heads = slice(first, first + queries)
        k = torch.cat([stored.rows[..., :0], *_keys(stored.rows, group)], -1).float()
        s = q[:, heads, :, : k.shape[-1]].float() @ k[:, None].mT  # [B, N, W, T]
        p = torch.exp2(power * (s * (scale * LOG2_E) - lse[:, heads, :, None]))
        seen = stored.positions[:, g, None] <= last[..., None]
        mass[:, g] = p.where(seen[:, None], 0.0).sum((1, 2))
    add_metrics(pages, slots, mass, stored.valid)


def _keys(rows: Tensor, group: Group) -> list[Tensor]:
    """The group's columns of rows [B, T, R] that are keys, in the order of segments."""
    return [rows[..., s.start : s.start + s.width] for s in segments_of(group, "k")]
