"""Norms, and RoPE with the maps of queries and keys, in fp32 on CPUs. Numba kernels.

Shapes: T tokens, Hq / Hk query / KV heads, d head dim, w rotary dims, n key latents, c numbers of
the keys of a latent, r rank. The batch size is 1.
"""

import numpy as np
import torch
from torch import Tensor

from kvfold.ops.common.attention import Tables
from kvfold.ops.common.codes_numba import kernel
from kvfold.ops.common.products_numba import mix


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide x [.., D] by its root mean square and multiply it by weight [D]."""
    rows = x.detach().reshape(-1, x.shape[-1]).contiguous().numpy()
    out = np.empty_like(rows)
    _rms_norm(rows, weight.detach().numpy(), eps, out)
    return torch.from_numpy(out).view(x.shape)


def queries(q: Tensor, tables: Tables | None, up: Tensor) -> Tensor:
    """Rotate q [1, T, Hq, d] by cos, sin [1, T, w] and multiply it by up [Hk, d, r]: [1, Hq, T,
    r]."""
    x, maps = q[0].detach().contiguous().numpy(), up.detach().contiguous().numpy()
    out = np.zeros((x.shape[1], len(x), maps.shape[-1]), dtype=np.float32)
    _queries(x, *_angles(tables, len(x)), maps, out)
    return torch.from_numpy(out)[None]


def keys(k: Tensor, tables: Tables | None, down: Tensor) -> Tensor:
    """Rotate k [1, T, Hk, d] by cos, sin [1, T, w] and multiply it by down [n, c, r]: [1, T, n,
    r]."""
    x, maps = k[0].detach().contiguous().numpy(), down.detach().contiguous().numpy()
    out = np.empty((len(x), len(maps), maps.shape[-1]), dtype=np.float32)
    _keys(x, *_angles(tables, len(x)), maps, out)
    return torch.from_numpy(out)[None]


def _angles(tables: Tables | None, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """cos, sin [T, w]; w is 0 without RoPE."""
    if tables is None:
        none = np.empty((tokens, 0), dtype=np.float32)
        return none, none
    cos, sin = (x[0].detach().contiguous().numpy() for x in tables)
    return cos, sin


@kernel("void(float32[:,::1], float32[::1], float64, float32[:,::1])", fast=True)
def _rms_norm(x, weight, eps, out):
    for t in range(len(x)):
        row, target = x[t], out[t]
        squares = np.float32(0)
        for i in range(len(row)):
            squares += row[i] * row[i]
        factor = np.float32(1 / np.sqrt(squares / len(row) + eps))
        for i in range(len(row)):
            target[i] = row[i] * factor * weight[i]


@kernel(fast=True)
def rotate(x, cos, sin, out):
    """Rotate x [d] by RoPE: its first w numbers, in pairs (i, i + w / 2)."""
    width = len(cos)
    half = width // 2
    for i in range(half):
        out[i] = x[i] * cos[i] - x[half + i] * sin[i]
    for i in range(half, width):
        out[i] = x[i] * cos[i] + x[i - half] * sin[i]
    for i in range(width, len(x)):
        out[i] = x[i]


@kernel(
    "void(float32[:,:,::1], float32[:,::1], float32[:,::1], float32[:,:,::1], float32[:,:,::1])",
    fast=True,
)
def _queries(q, cos, sin, up, out):
    tokens, heads, dim = q.shape
    group, rank = heads // len(up), up.shape[2]
    rotated = np.empty((group * tokens, dim), dtype=np.float32)
    for h in range(len(up)):
        for g in range(group):
            for t in range(tokens):
                rotate(q[t, h * group + g], cos[t], sin[t], rotated[g * tokens + t])
        head_out = out[h * group : (h + 1) * group].reshape(group * tokens, rank)
        mix(rotated, up[h].reshape(-1), rank, dim, head_out)


@kernel(
    "void(float32[:,:,::1], float32[:,::1], float32[:,::1], float32[:,:,::1], float32[:,:,::1])",
    fast=True,
)
def _keys(k, cos, sin, down, out):
    tokens, heads, dim = k.shape
    group, rank = heads // len(down), down.shape[2]
    rotated = np.empty((tokens, group * dim), dtype=np.float32)
    latents = np.empty((tokens, rank), dtype=np.float32)
    for n in range(len(down)):
        for t in range(tokens):
            for g in range(group):
                target = rotated[t, g * dim : (g + 1) * dim]
                rotate(k[t, n * group + g], cos[t], sin[t], target)
        latents[:] = 0
        mix(rotated, down[n].reshape(-1), rank, group * dim, latents)
        out[:, n] = latents
