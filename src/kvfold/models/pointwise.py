"""Elementwise and small operations of a folded attention between its matrix products, as functions
of tensors, so that an engine can compile each to one kernel (`engine.runner.compiled`).

Shapes: B batch, T new tokens, Hq / Hk query / KV heads, d head dim, r rank, n key latents, v other
numbers of an entry, R numbers of an entry.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.ops.common.attention import Tables, rotate


def apply_rope(x: Tensor, tables: Tables | None) -> Tensor:
    """Apply RoPE to x [B, T, H, d] with cos, sin [B or 1, T, rotary dims]; None: return x."""
    return x if tables is None else rotate(x, tables[0][:, :, None], tables[1][:, :, None])


def queries(q: Tensor, tables: Tables | None, up: Tensor | None) -> Tensor:
    """Queries q [B, T, Hq, d] in the space of scores: [B, Hq, T, d], or [B, Hq, T, r] projected by
    up [Hk, d, r]."""
    q = apply_rope(q, tables).transpose(1, 2)
    if up is None:
        return q
    return torch.einsum("bhgtd,hdr->bhgtr", q.unflatten(1, (len(up), -1)), up).flatten(1, 2)


def keys(k: Tensor, tables: Tables | None, down: Tensor) -> Tensor:
    """Keys k [B, T, Hk, d], rotated, and projected by down [n, Hk d / n, r] to latents
    [B, T, n, r]."""
    k = apply_rope(k, tables).flatten(2).unflatten(-1, (len(down), -1))
    return torch.einsum("btnc,ncr->btnr", k, down)


def rows(k: Tensor, tables: Tables | None, shift: Tensor | None, rest: Tensor) -> Tensor:
    """Cache entries [B, T, R]: keys [B, T, Hk, d], rotated, or projected keys [B, T, n, r] or
    [B, T, .] plus shift; followed by rest [B, T, v]."""
    k = apply_rope(k, tables).flatten(2)
    return torch.cat((k if shift is None else k + shift, rest), dim=-1)


class PointwiseOps(NamedTuple):
    """The functions above, or others that compute the same."""

    queries: Callable[[Tensor, Tables | None, Tensor | None], Tensor] = queries
    keys: Callable[[Tensor, Tables | None, Tensor], Tensor] = keys
    rows: Callable[[Tensor, Tables | None, Tensor | None, Tensor], Tensor] = rows
