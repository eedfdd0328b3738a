"""Attention of many new tokens, written out head by head. Shapes as in `prefill`."""

import torch
from torch import Tensor

from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.prefill.rows import KVView, Seen


def prefill(
    q: Tensor, keys: KVView, values: KVView, seen: Seen, scale: float
) -> tuple[Tensor, Tensor]:
    """As `ops.prefill.prefill`, in fp32 (fp64 for fp64 queries)."""
    group, dtype = q.shape[1] // len(seen.owner), torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:3], max(values.ranks))
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for h, g in enumerate(seen.owner):
        mine, rank = slice(h * group, (h + 1) * group), keys.ranks[h]
        visible = seen.of(g, keys.data.shape[1])[:, None]
        k, v = keys.head(h).to(dtype)[:, None], values.head(h).to(dtype)[:, None]
        # Rows that are not seen may be anything, NaN included.
        v = v.masked_fill(~visible.any(2)[..., None], 0)
        scores = q[:, mine, :, :rank].to(dtype) @ k.mT * scale
        total = scores.masked_fill(~visible, -torch.inf).logsumexp(-1, keepdim=True)
        weights = torch.where(visible, (scores - total).exp(), 0)
        out[:, mine, :, : values.ranks[h]] = (weights @ v).to(q.dtype)
        lse[:, mine] = (total[..., 0] * LOG2_E).float()
    return out, lse
