"""What rows were attended to, from queries that were kept: eviction metrics without weights.

Shapes: B sequences, Hq query heads, W kept queries of each, G groups of the layer, S slots, n pages
of the longest group, T rows. Direct rows only, as in `decode`: what is stored is in score space,
and a group is one KV head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.ops.backend import use_triton
from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.decode import reference as decode
from kvfold.ops.store.reference import add_metrics, gather
from kvfold.spec.layout import Group


def supports(groups: Sequence[Group]) -> bool:
    """Whether `observe` has a kernel for these pages: those of `decode`, tracked."""
    return decode.supports(groups) and all(group.layout.tracked for group in groups)


def observe(
    q: Tensor,
    lse: Tensor,
    positions: Tensor,
    arena: Tensor,
    tables: Tensor,
    lengths: Tensor,
    groups: Sequence[Group],
    slots: Tensor,
    scale: float,
    *,
    power: int,
    exclude: int = 0,
) -> None:
    """Add sum p^power of these queries to the metrics of the rows they see, p = exp2(s - lse).

    q [B, Hq, W, widest key rank] in score space, zeros beyond a head's own rank; lse fp32
    [B, Hq, W]: log2-sum-exp2 of the scaled scores over what the query attended to; positions int
    [B, W], negative: not counted; arena uint8; tables int32 [S, G, n]; lengths int [S, G]; slots
    int64 [B], distinct; groups: of one layer, tracked. Summed over the query heads of a group
    (KV-Compress §4.1, eq. 9-11, 19, 20). A row at position j counts for a query at i where
    j <= i - exclude: rows stored after a query have larger positions, so that a late call sees
    what the query saw. Never waits for the device.
    """
    args = q, lse, positions, arena, tables, lengths, groups, slots, scale
    if use_triton(arena.device.type) and supports(groups):
        from kvfold.ops.observe import triton as observe_triton

        observe_triton.observe(*args, power=power, exclude=exclude)
    else:
        observe_reference(*args, power=power, exclude=exclude)


def observe_reference(
    q: Tensor,
    lse: Tensor,
    positions: Tensor,
    arena: Tensor,
    tables: Tensor,
    lengths: Tensor,
    groups: Sequence[Group],
    slots: Tensor,
    scale: float,
    *,
    power: int,
    exclude: int = 0,
) -> None:
    """`observe`, gathering all rows. Waits for the device to know the longest group."""
    pages = LayerPages(arena, tables, lengths, tuple(groups))
    stored = gather(pages, slots, lengths[slots], q.dtype)
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
    segments = group.layout.segments
    return [rows[..., s.start : s.start + s.width] for s in segments if s.side == "k"]
