"""Multiply every head's vectors with its KV head's matrix, as launches that can be recorded.

Shapes: B sequences, T tokens, H query heads, Hk KV heads of G = H / Hk query heads; r numbers
before, d after.
"""

import torch
from torch import Tensor

from kvfold.ops.common.recording import compute, contiguous, copy, recording


def up_project(x: Tensor, weight: Tensor, into: Tensor | None = None) -> Tensor:
    """x [B, H, T, r] times weight [Hk, d, r] of each head's KV head: [B, T, Hk, G, d].

    into [B, T, H * d]: memory that the result may be written to.
    """
    grouped = x.unflatten(1, (len(weight), -1))
    if recording() is None:
        return torch.einsum("bhgtr,hdr->bthgd", grouped, weight)
    batch, heads, queries, tokens, _ = grouped.shape
    vectors = contiguous(grouped.transpose(0, 1)).flatten(1, 3)
    products = x.new_empty(heads, vectors.shape[1], weight.shape[1])
    compute(torch.bmm, vectors, weight.mT, out=products)
    shape = batch, tokens, heads, queries, weight.shape[1]
    out = x.new_empty(shape) if into is None else into.view(shape)
    return copy(out, products.unflatten(1, (batch, queries, tokens)).permute(1, 3, 0, 2, 4))


def map_latents(z: Tensor, stack: Tensor) -> Tensor:
    """Latents z [B, S, n, r] times stack [n, c, r]: [B, S, n, c]."""
    if recording() is None:
        return torch.einsum("bsnr,ncr->bsnc", z, stack)
    batch, rows, latents, _ = z.shape
    out = z.new_empty(batch, rows, latents, stack.shape[1])
    for b in range(batch):
        for n in range(latents):
            compute(torch.mm, z[b, :, n], stack[n].mT, out=out[b, :, n])
    return out
