"""The message with a rank's tokens for the heads of another rank, and attention of a rank's heads
over all tokens.

Shapes: n tokens of a rank, N of all; H query heads of a share, K KV heads, W numbers of a message;
d head dim, R numbers of a cache entry.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.attention.base import Columns, LayerAttention
from kvfold.ops.common.attention import attention, rotate
from kvfold.ops.prefill import KVView, Seen, prefill, why_not
from kvfold.parallel.shares import ColumnRange, HeadShare, column_ranges

SCORES = 2**19  # of a query head that plain PyTorch computes at once


def message(
    layer: LayerAttention, share: HeadShare, q: Tensor, entries: Tensor, tokens: range
) -> Tensor:
    """The message [n, W] for one share: queries q [1, Hq, n, .] and cache entries [n, R] of
    this rank's tokens."""
    if not share.heads:
        return entries[:, :0]
    stored = layer.spec.latents
    parts = [_side_by_side([q[0, head] for head in share.heads], share.query_ranks)]
    parts += [entries[:, layer.spec.columns(latent)] for latent in share.latents]
    if share.sends_full_keys:
        parts.append(
            _keys(layer, share, entries, column_ranges(stored, "k", share.kv), tokens).flatten(1)
        )
    if share.sends_full_values:
        parts.append(
            _values(layer, share, entries, column_ranges(stored, "v", share.kv)).flatten(1)
        )
    return torch.cat(parts, 1)


def attend(
    layer: LayerAttention, share: HeadShare, received: Tensor, need_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Causal attention of a share's heads over the messages [N, W] of all tokens, in order. Returns
    the input of the output projection [N, sum of ranks] and, if asked, the log2-sum-exp2 of the
    scores, fp32 [H, N]."""
    if not share.heads:
        size = len(received)
        lse = torch.empty(0, size, device=received.device) if need_lse else None
        return received.new_empty(size, 0), lse
    q = _spread(received[:, : sum(share.query_ranks)], share.query_ranks)
    keys, values = (_view(received, ranges, share) for ranges in (share.keys, share.values))
    if layer.reconstructs_keys and not share.sends_full_keys:
        all_tokens = range(len(received))
        keys = _whole(_keys(layer, share, received, share.keys, all_tokens), share)
    if layer.value_up is not None and not share.sends_full_values:
        values = _whole(_values(layer, share, received, share.values), share)
    has_kernel = layer.softcap is None and why_not(q, keys, values) is None
    if has_kernel or need_lse:
        tile_tokens = len(received) if has_kernel else max(SCORES // len(received), 1)
        out, lse = _by_prefill(layer, q, keys, values, tile_tokens)
    else:
        out, lse = _by_torch(layer, q, keys, values), None
    lse = lse[0] if lse is not None and need_lse else None
    return _side_by_side(out[0].unbind(), share.output_ranks), lse


def _by_prefill(
    layer: LayerAttention, q: Tensor, keys: KVView, values: KVView, tile_tokens: int
) -> tuple[Tensor, Tensor]:
    """Attention by `ops.prefill`, of `tile_tokens` queries at a time: [1, H, N, widest value], and
    the log-sum-exps [1, H, N]."""
    positions = torch.arange(q.shape[2], dtype=torch.int32, device=q.device)[None]
    tiles, end = [], 0
    for tile, queries in zip(q.split(tile_tokens, 2), positions.split(tile_tokens, 1), strict=True):
        end += tile.shape[2]
        seen = Seen(
            counts=torch.full((1, 1), end, dtype=torch.int32, device=q.device),
            owner=(0,) * len(keys.ranks),
            positions=None,
            queries=queries,
            window=layer.window,
        )
        k, v = (replace(x, data=x.data[:, :end]) for x in (keys, values))
        tiles.append(prefill(tile, k, v, seen, layer.scale, layer.softcap))
    if len(tiles) == 1:
        return tiles[0]
    outs, lses = zip(*tiles, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _by_torch(layer: LayerAttention, q: Tensor, keys: KVView, values: KVView) -> Tensor:
    """Attention in PyTorch: [1, H, N, .]. Queries, keys and values are padded to one width, which
    flash attention on a CPU requires."""
    width, mask = max(*keys.ranks, *values.ranks), None
    k, v = (
        torch.stack([F.pad(x.head(i)[0], (0, width - r)) for i, r in enumerate(x.ranks)])[None]
        for x in (keys, values)
    )
    if layer.window is not None:
        ones = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)
        mask = ones.tril() & ones.triu(1 - layer.window)
    q = F.pad(q, (0, width - q.shape[-1]))
    return attention(q, k, v, mask, layer.scale, softcap=layer.softcap)[0]


def _keys(
    layer: LayerAttention, share: HeadShare, x: Tensor, ranges: Sequence[ColumnRange], tokens: range
) -> Tensor:
    """The share's keys [n, K, d] of `tokens`, reconstructed from column ranges of x [n, .]."""
    assert layer.key_up is not None and layer.key_mean is not None, "keys are reconstructed"
    k = _up_projected(share, x, ranges, layer.key_columns, layer.key_up)
    k = k + torch.stack([layer.key_mean[head] for head in share.kv])
    if layer.rope is None:
        return k
    positions = torch.arange(tokens.start, tokens.stop, device=x.device)
    cos, sin = layer.rope.tables(k, positions, tokens.stop)
    return rotate(k, cos[:, None], sin[:, None])


def _values(
    layer: LayerAttention, share: HeadShare, x: Tensor, ranges: Sequence[ColumnRange]
) -> Tensor:
    """The share's values [n, K, d], reconstructed from column ranges of x [n, .]."""
    assert layer.value_up is not None, "values are reconstructed"
    return _up_projected(share, x, ranges, layer.value_columns, layer.value_up)


def _up_projected(
    share: HeadShare, x: Tensor, ranges: Sequence[ColumnRange], columns: Columns, stack: Tensor
) -> Tensor:
    """Apply the up-projections of the share's KV heads to column ranges of x [n, .]: [n, K, d]."""
    ups = columns.per_head(stack, share.geometry.head_dim)
    pairs = zip(ranges, share.kv, strict=True)
    return torch.stack(
        [x[:, first : first + rank] @ ups[head, :, :rank].mT for (first, rank), head in pairs], 1
    )


def _view(x: Tensor, ranges: Sequence[ColumnRange], share: HeadShare) -> KVView:
    """Keys or values of the share's units in messages [N, W]."""
    units = [ranges[i] for i in share.units]
    return KVView(x[None], tuple(first for first, _ in units), tuple(rank for _, rank in units))


def _whole(x: Tensor, share: HeadShare) -> KVView:
    """A view of reconstructed keys or values [N, K, d]."""
    d = x.shape[-1]
    return _view(x.flatten(1), [(i * d, d) for i in range(x.shape[1])], share)


def _side_by_side(heads: Sequence[Tensor], ranks: Sequence[int]) -> Tensor:
    """Concatenate heads, each [n, at least its rank], to [n, sum of ranks]."""
    return torch.cat([x[:, :rank] for x, rank in zip(heads, ranks, strict=True)], 1)


def _spread(x: Tensor, ranks: Sequence[int]) -> Tensor:
    """Split x [N, sum of ranks] into heads [1, H, N, widest rank], padded with zeros."""
    widest = max(ranks)
    if min(ranks) == widest:
        return x.unflatten(1, (len(ranks), widest)).transpose(0, 1)[None]
    parts = [F.pad(head, (0, widest - head.shape[1])) for head in x.split(list(ranks), 1)]
    return torch.stack(parts)[None]
