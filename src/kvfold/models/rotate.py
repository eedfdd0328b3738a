"""Rotate what a folded model stores, at load: the maps absorb it, so it costs nothing to run.

Numbers that share a quantiser's scale should be alike; an orthogonal Q makes them so (Palu §3.4).
Stored z becomes Q^T z and every map that reads it gains Q. Shapes: r rank of a latent.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvfold.models.folded import FoldedAttention
from kvfold.spec import Latent


@torch.no_grad()
def rotate_rows(attention: FoldedAttention, rotations: Mapping[Latent, Tensor]) -> None:
    """Rotate the latents of one layer in place. rotations: orthogonal [r, r], fp64, by latent.

    Full rotated keys (`plain`) have no map to absorb a rotation: fold them as `post` keys instead.
    """
    spec = attention.spec
    assert spec.keys != "plain", "plain keys cannot absorb a rotation"
    if attention.query_folded:
        _each(attention.q_proj, _spans(attention, spec.key_latents), rotations, dim=0)
    if hasattr(attention, "down_proj"):
        linear = [(latent, 1) for latent in attention.linear_latents]
        _each(attention.down_proj, linear, rotations, dim=0)
    for name, latents in (
        ("key_up", spec.key_latents),
        ("key_down", spec.key_latents),
        ("value_up", spec.value_latents),
    ):
        stack = getattr(attention, name, None)
        if stack is not None:
            for i, latent in enumerate(latents):
                if latent in rotations:
                    part = stack[i, :, : latent.rank]
                    part.copy_(part.double() @ rotations[latent].to(part.device))
    if hasattr(attention, "key_shift"):
        shifts = attention.key_shift.split([latent.rank for latent in spec.key_latents])
        for latent, shift in zip(spec.key_latents, shifts, strict=True):
            if latent in rotations:
                shift.copy_(shift.double() @ rotations[latent].to(shift.device))
    if spec.values == "fused":
        _each(attention.o_proj, _spans(attention, spec.value_latents), rotations, dim=1)


def _spans(attention: FoldedAttention, latents: tuple[Latent, ...]) -> list[tuple[Latent, int]]:
    """The latent that serves each KV head, in head order, and how many query heads repeat it."""
    owner = sorted((head, i) for i, latent in enumerate(latents) for head in latent.heads)
    return [(latents[i], attention.geometry.queries_per_kv) for _, i in owner]


def _each(
    linear: Any, blocks: list[tuple[Latent, int]], rotations: Mapping[Latent, Tensor], dim: int
) -> None:
    """Rotate consecutive blocks of a linear layer's outputs (dim 0) or inputs (dim 1)."""
    start = 0
    for latent, repeats in blocks:
        for _ in range(repeats):
            if latent in rotations and latent.rank:
                q = rotations[latent].to(linear.weight.device)
                part = linear.weight.narrow(dim, start, latent.rank)
                part.copy_(q.T @ part.double() if dim == 0 else part.double() @ q)
                if dim == 0 and linear.bias is not None:
                    bias = linear.bias.narrow(0, start, latent.rank)
                    bias.copy_(bias.double() @ q)
            start += latent.rank
