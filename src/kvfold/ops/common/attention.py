"""Attention over transient keys and values. Reference implementation, plain PyTorch.

Shapes: B batch, Hq query heads, Hk KV heads, G = Hq / Hk, T queries, S cached tokens; d numbers a
row.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

LOG2_E = 1.4426950408889634  # kernels take powers of 2
# Numbers of one sequence beyond which PyTorch's fused attention was wrong on CUDA (2.11, H200).
MOST_NUMBERS = 2**32
Tables = tuple[Tensor, Tensor]  # RoPE cos, sin


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    need_weights: bool = False,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """softmax(capped(q k^T * scale) + mask) v with grouped heads and d_qk != d_v.

    q [B, Hq, T, dk], k [B, Hk, S, dk], v [B, 1 or Hk, S, dv]; mask None (causal if T > 1), bool or
    additive [B or 1, 1 or Hq, T, S]; sinks [Hq]: a score of nothing that stands beside every
    query's, or None. Returns [B, Hq, T, dv] and, if asked, weights [B, Hq, T, S].
    """
    v = v.expand(-1, k.shape[1], -1, -1)
    if need_weights:
        return _explicit(q, k, v, mask, scale, softcap, sinks)
    causal = mask is None
    if q.shape[2] == 1:  # a branch, as sdpa takes no symbol while torch.compile traces
        causal = False
    if softcap is not None or sinks is not None or 0 in (q.shape[-1], v.shape[-1]):
        return _explicit(q, k, v, mask, scale, softcap, sinks)[0], None
    width = v.shape[-1]
    if q.is_cuda:
        q, k, v = map(aligned, (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[..., :width], None


def attend_rows(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of one query a sequence to the rows that are valid.

    q [B, Hq, dk]; k [B, Hk, S, dk]; v [B, Hk, S, dv]; valid bool [B, Hk, S]. Returns [B, Hq, dv],
    and the log2-sum-exp2 of the scaled scores, fp32 [B, Hq]. A head without a valid row attends to
    all, which is 0 where these are, and has -inf.
    """
    group, empty = q.shape[1] // k.shape[1], ~valid.any(-1, keepdim=True)
    if not valid.shape[-1]:
        nothing = torch.full(q.shape[:2], -torch.inf, device=q.device)
        return q.new_zeros(*q.shape[:2], v.shape[-1]), nothing
    if k.shape[1] > 1 and max(k[0].numel(), v[0].numel()) > MOST_NUMBERS:
        per_head = zip(
            q.split(group, 1), k.split(1, 1), v.split(1, 1), valid.split(1, 1), strict=True
        )
        outs, sums = zip(*(attend_rows(*x, scale, softcap) for x in per_head), strict=True)
        return torch.cat(outs, 1), torch.cat(sums, 1)
    mask = (valid | empty)[:, :, None].repeat_interleave(group, 1)
    out, _ = attention(q[:, :, None], k, v, mask, scale, softcap=softcap)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = capped(q.to(wide).unflatten(1, (-1, group)) @ k.to(wide).mT * scale, softcap)
    lse = scores.masked_fill(~valid[:, :, None], -torch.inf).logsumexp(-1).flatten(1)
    return out[:, :, 0], (lse * LOG2_E).float()


def attention_in_place(
    q: Tensor, table: Tensor, index: Tensor, valid: Tensor, shift: int, scale: float
) -> Tensor:
    """softmax(q k^T * scale) v of one query a sequence, reading rows where they lie. CPU, fp32.

    q [B, Hk, G, d]; table [N, d]; index int32 [B, Hk, c, s]: rows of the keys, c chunks of s, whose
    values are `shift` rows on; valid bool, of the same shape: what may be attended to, at least one
    a head; the rest names finite rows too. Returns [B, Hk, G, d]. Copying rows first would cost
    twice the traffic of reading them, so both products are sparse ones over the table, a chunk for
    one query head after another: those of a group find it in the core's cache.
    """
    (batch, heads, chunks, _), (group, d) = index.shape, q.shape[2:]
    shape = (batch, heads, chunks, group, -1)
    rows = index[..., None, :].expand(shape).flatten()
    unseen = torch.zeros_like(valid, dtype=q.dtype).masked_fill_(~valid, -torch.inf)
    first = torch.arange(0, len(rows) + 1, index.shape[-1], dtype=torch.int32)
    queries = (q * scale)[:, :, None].expand(shape).reshape(-1, d)
    scores = _dots(queries, table, rows, first, unseen[..., None, :].expand(shape)).view(shape)
    weights = scores.sub_(scores.amax((2, 4), keepdim=True)).exp_()
    parts = F.embedding_bag(
        rows, table[shift:], first[:-1], per_sample_weights=weights.flatten(), mode="sum"
    )
    return parts.view(*shape[:-1], d).sum(2) / weights.sum((2, 4))[..., None]


def _dots(x: Tensor, table: Tensor, rows: Tensor, first: Tensor, bias: Tensor) -> Tensor:
    """bias + x[i] . table[rows[j]] for first[i] <= j < first[i + 1]: x [M, d], rows [n] -> [n]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls all of its CSR tensors beta
        where = torch.sparse_csr_tensor(
            first, rows, bias.flatten(), (len(x), len(table)), check_invariants=False
        )
    return torch.sparse.sampled_addmm(where, x, table.mT).values()


def aligned(x: Tensor) -> Tensor:
    """x [..., n] zero-padded to a multiple of 8 numbers, every row at one: CUDA's fused attention
    reads 16 bytes at a time and faults on anything else."""
    missing = -x.shape[-1] % 8
    if missing == 0 and all(n % 8 == 0 for n in (*x.stride()[:-1], x.storage_offset())):
        return x
    return F.pad(x, (0, missing)) if missing else x.clone(memory_format=torch.contiguous_format)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scaled scores within -softcap..softcap (Gemma 2); None: as they are."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = capped(q @ k.transpose(-1, -2) * scale, softcap)
    if mask is None and q.shape[2] > 1:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        least = torch.finfo(scores.dtype).min  # finite, so that padding that sees nothing is no NaN
        scores = scores.masked_fill(~mask, least) if mask.dtype is torch.bool else scores + mask
    if sinks is not None:
        beside = sinks.to(scores)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, beside), -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : k.shape[2]]
    return weights @ v, weights


def rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int = 1) -> Tensor:
    """RoPE on the first cos.shape[-1] dims of x; sign=-1 applies the transposed rotation.

    x [..., d]; cos, sin broadcastable to [..., <= d].
    """
    width = cos.shape[-1]
    head, tail = x[..., :width], x[..., width:]
    rotated = head * cos + sign * rotate_half(head) * sin
    return torch.cat((rotated, tail), dim=-1) if tail.shape[-1] else rotated
