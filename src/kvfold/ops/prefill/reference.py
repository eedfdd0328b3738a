"""Attention of many new tokens over rows laid out in one tensor: a prompt's chunk.

Shapes: B sequences, Hq query heads, Hk KV heads, T queries, S rows, G groups of the layer; dk, dv
widest key and value rank. What the heads of a layer keep may differ from head to head.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.ops.backend import use_triton
from kvfold.ops.common.attention import LOG2_E

WIDEST = (256, 512)  # key and value rank


@dataclass(frozen=True)
class KVView:
    """Keys or values of every KV head inside one tensor.

    Row s of head h of sequence b begins at element b * data.stride(0) + s * data.stride(1) +
    starts[h] of `data` [B, S, ...] and has ranks[h] numbers. Heads may share rows.
    """

    data: Tensor
    starts: tuple[int, ...]
    ranks: tuple[int, ...]

    def head(self, number: int) -> Tensor:
        """Rows of one head, [B, S, rank]: a view."""
        size = (*self.data.shape[:2], self.ranks[number])
        first = self.data.storage_offset() + self.starts[number]
        return self.data.as_strided(size, (*self.data.stride()[:2], 1), first)


def supports(q: Tensor, keys: KVView, values: KVView) -> bool:
    """Whether `prefill` runs as a kernel: 16-bit numbers where Triton runs, keys of at most 256 and
    values of at most 512."""
    dtypes = {q.dtype, keys.data.dtype, values.data.dtype}
    return (
        use_triton(q.device.type)
        and len(dtypes) == 1
        and dtypes <= {torch.float16, torch.bfloat16}
        and max(keys.ranks) <= WIDEST[0]
        and max(values.ranks) <= WIDEST[1]
    )


def prefill(
    q: Tensor,
    keys: KVView,
    values: KVView,
    *,
    counts: Tensor,
    owner: tuple[int, ...],
    positions: Tensor | None,
    queries: Tensor,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v over what every query may see, by a kernel where `supports`.

    q [B, Hq, T, dk], any strides but 1 for the last, zeros beyond a head's own rank; counts int
    [B, G]: rows of every group; owner: group of every KV head; positions int32 [B, G, S] of the
    rows, or None: their index; queries int [B, T]: positions, ascending; window: sliding window.
    Row s of head h is seen where s < counts[b, owner[h]] and query - window < position <= query.
    Returns out [B, Hq, T, dv], 0 beyond a head's rank and where nothing is seen, and the
    log2-sum-exp2 of the scaled scores, fp32 [B, Hq, T], -inf where nothing is seen.
    """
    assert len(keys.ranks) == len(values.ranks) == len(owner), "keys, values and owner are by head"
    place: dict[str, Any] = {
        "counts": counts,
        "owner": owner,
        "positions": positions,
        "queries": queries,
    }
    if supports(q, keys, values):
        from kvfold.ops.prefill import triton as prefill_triton

        return prefill_triton.prefill(q, keys, values, **place, scale=scale, window=window)
    return prefill_reference(q, keys, values, **place, scale=scale, window=window)


def prefill_reference(
    q: Tensor,
    keys: KVView,
    values: KVView,
    *,
    counts: Tensor,
    owner: tuple[int, ...],
    positions: Tensor | None,
    queries: Tensor,
    scale: float,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`prefill` written out, head by head, in fp32 (fp64 for fp64 queries)."""
    group, dtype = q.shape[1] // len(owner), torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:3], max(values.ranks))
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for h, g in enumerate(owner):
        mine, rank = slice(h * group, (h + 1) * group), keys.ranks[h]
        at = None if positions is None else positions[:, g]
        seen = visible(counts[:, g], at, queries, keys.data.shape[1], window)[:, None]
        k, v = keys.head(h).to(dtype)[:, None], values.head(h).to(dtype)[:, None]
        # What is not seen may be anything, NaN included.
        v = v.masked_fill(~seen.any(2)[..., None], 0)
        scores = q[:, mine, :, :rank].to(dtype) @ k.mT * scale
        total = scores.masked_fill(~seen, -torch.inf).logsumexp(-1, keepdim=True)
        weights = torch.where(seen, (scores - total).exp(), 0)
        out[:, mine, :, : values.ranks[h]] = (weights @ v).to(q.dtype)
        lse[:, mine] = (total[..., 0] * LOG2_E).float()
    return out, lse


def visible(
    counts: Tensor, positions: Tensor | None, queries: Tensor, size: int, window: int | None
) -> Tensor:
    """Which of `size` rows every query sees, bool [B, T, S]: counts [B], positions [B, S] or None,
    queries [B, T]."""
    row = torch.arange(size, device=queries.device)
    position = (row if positions is None else positions)[..., None, :]
    seen = (row < counts[:, None])[:, None] & (position <= queries[..., None])
    return seen if window is None else seen & (position > queries[..., None] - window)
