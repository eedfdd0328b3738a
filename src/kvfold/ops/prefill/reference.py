"""Attention of many new tokens in plain PyTorch, one head after another. Shapes as in `prefill`."""

import torch
from torch import Tensor

from kvfold.ops.common.attention import LOG2_E, capped
from kvfold.ops.prefill.rows import KVView, Seen


def prefill(
    q: Tensor, keys: KVView, values: KVView, seen: Seen, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Like `ops.prefill.prefill`, in fp32 (fp64 for fp64 queries)."""
    out, lse, _ = _prefill(q, keys, values, seen, scale, None, softcap)
    return out, lse


def prefill_among(
    q: Tensor, keys: KVView, values: KVView, seen: Seen, scale: float, among: Tensor,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Like `ops.prefill.prefill_among`, in fp32 (fp64 for fp64 queries)."""
    return _prefill(q, keys, values, seen, scale, among, softcap)


def _prefill(
    q: Tensor, keys: KVView, values: KVView, seen: Seen, scale: float, among: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `prefill_among`; without `among` its log-sum-exps are left empty."""
    group, dtype = q.shape[1] // len(seen.owner), torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:3], max(values.ranks))
    lse, lse_among = torch.empty(2, *q.shape[:3], dtype=torch.float32, device=q.device)
    for h, g in enumerate(seen.owner):
        query_heads, rank = slice(h * group, (h + 1) * group), keys.ranks[h]
        visible = seen.of(g, keys.data.shape[1])[:, None]
        k, v = keys.head(h).to(dtype)[:, None], values.head(h).to(dtype)[:, None]
        # Tokens that no query sees may hold any values, NaN included.
        v = v.masked_fill(~visible.any(2)[..., None], 0)
        scores = capped(q[:, query_heads, :, :rank].to(dtype) @ k.mT * scale, softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        total = scores.logsumexp(-1, keepdim=True)
        weights = torch.where(visible, (scores - total).exp(), 0)
        out[:, query_heads, :, : values.ranks[h]] = (weights @ v).to(q.dtype)
        lse[:, query_heads] = (total[..., 0] * LOG2_E).float()
        if among is not None:
            selected = scores.masked_fill(~among[:, g, None, None], -torch.inf).logsumexp(-1)
            lse_among[:, query_heads] = (selected * LOG2_E).float()
    return out, lse, lse_among


def peaks(
    q: Tensor, keys: KVView, bias: Tensor, counted: Tensor, owner: tuple[int, ...], scale: float,
    of_rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Like `ops.prefill.peaks`, in fp32 (fp64 for fp64 queries)."""
    heads, dtype = len(owner), torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(len(q), heads, keys.data.shape[1], dtype=torch.float32, device=q.device)
    group = q.shape[1] // heads
    for h, g in enumerate(owner):
        query_heads = slice(h * group, (h + 1) * group)
        tokens = counted[:, g].any(0).nonzero()[:, 0]
        k = keys.head(h)[:, tokens].to(dtype)[:, None]
        scores = q[:, query_heads, :, : keys.ranks[h]].to(dtype) @ k.mT * (scale * LOG2_E)
        worth = (scores + bias[:, query_heads, :, None]).amax(2).exp2()
        if of_rows is not None:
            worth = worth * of_rows[:, query_heads][..., tokens]
        out[:, h, tokens] = worth.amax(1).float().where(counted[:, g, tokens], 0.0)
    return out
