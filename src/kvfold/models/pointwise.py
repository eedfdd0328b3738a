"""The work of a folded attention between its products: functions of tensors alone, so that an
engine can have each as one kernel (see `engine.compiled`).

Shapes: B batch, T new tokens, Hq / Hk query / KV heads, d head dim, r rank, n latents of keys,
v other numbers of a row, R numbers of a row.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.ops.common.attention import Tables, rotate


def apply_rope(x: Tensor, tables: Tables | None) -> Tensor:
    """RoPE of x [B, T, H, d] by cos, sin [B or 1, T, rotary dims]; None: x as it is."""
    return x if tables is None else rotate(x, tables[0][:, :, None], tables[1][:, :, None])


def queries(q: Tensor, tables: Tables | None, up: Tensor | None) -> Tensor:
    """q [B, T, Hq, d] to the space of scores, [B, Hq, T, d], or by up [Hk, d, r] [B, Hq, T, r]."""
    q = apply_rope(q, tables).transpose(1, 2)
    if up is None:
        return q
    return torch.einsum("bhgtd,hdr->bhgtr", q.unflatten(1, (len(up), -1)), up).flatten(1, 2)


def keys(k: Tensor, tables: Tables | None, down: Tensor) -> Tensor:
    """k [B, T, Hk, d], turned, by down [n, Hk d / n, r] to latents [B, T, n, r]."""
    k = apply_rope(k, tables).flatten(2).unflatten(-1, (len(down), -1))
    return torch.einsum("btnc,ncr->btnr", k, down)


def rows(k: Tensor, tables: Tables | None, shift: Tensor | None, rest: Tensor) -> Tensor:
    """Rows [B, T, R]: keys [B, T, Hk, d], turned, or mapped ones [B, T, n, r] or [B, T, .], to
    which shift is added; then rest [B, T, v]."""
    k = apply_rope(k, tables).flatten(2)
    return torch.cat((k if shift is None else k + shift, rest), dim=-1)


class PointwiseOps(NamedTuple):
    """These functions, or others that compute the same."""

    queries: Callable[[Tensor, Tables | None, Tensor | None], Tensor] = queries
    keys: Callable[[Tensor, Tables | None, Tensor], Tensor] = keys
    rows: Callable[[Tensor, Tables | None, Tensor | None, Tensor], Tensor] = rows
