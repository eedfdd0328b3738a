"""Update eviction metrics from recent queries in plain PyTorch, gathering all token entries.

Shapes as in `ops.observe`.
"""

import torch
from torch import Tensor

from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.decode.groups import segments_of
from kvfold.ops.store.reference import add_metrics, gather


def observe(
    q: Tensor, lse: Tensor, positions: Tensor, pages: LayerPages, slots: Tensor, scale: float,
    *, power: int, exclude: int = 0,
) -> None:  # fmt: skip
    """Like `ops.observe.observe`."""
    stored = gather(pages, slots, pages.lengths[slots], q.dtype)
    rows, queries = stored.rows, q.shape[1] // len(pages.groups)
    last = torch.where(positions < 0, -1, positions - exclude)
    mass = torch.zeros(stored.valid.shape, device=q.device)
    for g, group in enumerate(pages.groups):
        first = group.heads[0] * queries
        heads = slice(first, first + queries)
        keys = [rows[..., s.start : s.start + s.width] for s in segments_of(group, "k")]
        k = torch.cat([rows[..., :0], *keys], -1).float()
        s = q[:, heads, :, : k.shape[-1]].float() @ k[:, None].mT  # [B, N, W, T]
        p = torch.exp2(power * (s * (scale * LOG2_E) - lse[:, heads, :, None]))
        seen = stored.positions[:, g, None] <= last[..., None]
        mass[:, g] = p.where(seen[:, None], 0.0).sum((1, 2))
    add_metrics(pages, slots, mass, stored.valid)
