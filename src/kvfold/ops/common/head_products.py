"""Multiply the vectors of heads with a matrix each, in PyTorch operations that can be recorded.

Shapes: B sequences, T tokens; H query heads, Hk KV heads of G = H / Hk query heads; n latents, each
of some heads; r numbers before, d or c after.
"""

import torch
from torch import Tensor

from kvfold.ops.common.recording import compute, contiguous


def up_project(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, H, T, r] times weight [Hk, d, r] of each head's KV head: [B, T, Hk, G, d], of any
    strides."""
    grouped = x.unflatten(1, (len(weight), -1))
    batch, _, queries, tokens, _ = grouped.shape
    if batch == 1 and tokens > 1:  # copies the weights for every query head, not the vectors
        return compute(torch.matmul, grouped, weight.mT[:, None]).permute(0, 3, 1, 2, 4)
    # One product a KV head for all sequences: with a token each, products by sequence are slow.
    vectors = contiguous(grouped.transpose(0, 1)).flatten(1, 3)
    products = compute(torch.bmm, vectors, weight.mT)
    return products.unflatten(1, (batch, queries, tokens)).permute(1, 3, 0, 2, 4)


def map_latents(z: Tensor, stack: Tensor) -> Tensor:
    """Latents z [B, T, n, r] times stack [n, c, r]: [B, T, n, c], contiguous."""
    batch, tokens = z.shape[:2]
    if len(stack) == 1:
        return compute(torch.matmul, z[:, :, 0], stack[0].mT)[:, :, None]
    products = compute(torch.bmm, contiguous(z.permute(2, 0, 1, 3)).flatten(1, 2), stack.mT)
    return contiguous(products.unflatten(1, (batch, tokens)).permute(1, 2, 0, 3))
