"""Decode attention in plain PyTorch: gathers all entries first. For layouts without a kernel.

Shapes as in `ops.decode`; T entries of the longest group, R numbers of an entry, Hk KV heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.layout import Side
from kvfold.layout.pages import Group
from kvfold.ops.common.attention import attend_rows
from kvfold.ops.common.pages import LayerPages, owner_of
from kvfold.ops.common.pieces import latents_of, widest_value
from kvfold.ops.decode.limits import Limits
from kvfold.ops.store.reference import gather


def plan_layers(
    layers: Sequence[Sequence[Group]],
    lengths: Tensor,
    queries: int,
    rows: int,
    limited: bool = False,
) -> list[None]:
    """Return None for every layer: nothing is planned."""
    return [None] * len(layers)


def decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, plan: None = None,
    limits: Limits | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `ops.decode.decode`."""
    stored, groups = gather(pages, slots, pages.lengths[slots], q.dtype), pages.groups
    owner = torch.tensor(owner_of(groups), device=q.device)
    k = _spread(stored.rows, groups, "k", q.shape[-1])
    v = _spread(stored.rows, groups, "v", widest_value(groups))
    valid = stored.valid[:, owner]
    if limits is None:
        return attend_rows(q, k, v, valid, scale)
    if limits.window is not None:
        first = limits.positions - limits.window
        valid = valid & (stored.positions[:, owner] > first[:, None, None])
    return attend_rows(q, k, v, valid, scale, limits.softcap)


def _spread(rows: Tensor, groups: Sequence[Group], side: Side, width: int) -> Tensor:
    """Copy one side (k or v) of entries [B, T, R] to every KV head that reads it:
    [B, Hk, T, width]."""
    heads = len(owner_of(tuple(groups)))
    out = rows.new_zeros(rows.shape[0], heads, rows.shape[1], width)
    for latent in (x for group in groups for x in latents_of(group, side)):
        first, last = latent[0], latent[-1]
        numbers = rows[:, None, :, first.start : last.start + last.width]
        out[:, list(first.heads), :, : numbers.shape[-1]] = numbers
    return out
