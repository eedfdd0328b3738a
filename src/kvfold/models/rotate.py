"""Rotate the stored latents of a folded model when it is loaded. The projections absorb the
rotation, so it costs nothing at run time.

Numbers that share a quantisation scale should have similar magnitudes; an orthogonal Q achieves
that (Palu §3.4). A stored z becomes Q^T z, and every projection that reads it is multiplied by Q.
Shapes: r rank of a latent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.layout import CacheSpec, KeyKind, Latent
from kvfold.layout.formats.base import Format
from kvfold.layout.pages import tiers
from kvfold.models.families import family_of
from kvfold.models.folded import FoldedAttention
from kvfold.ops.common.rotation import rotation


def with_full_rank_latents(spec: CacheSpec) -> CacheSpec:
    """The spec with full keys and values as full-rank latents, whose projections can absorb a
    rotation."""
    keys: KeyKind = "post_rope" if spec.geometry.rope else "absorbed"
    layers = tuple(replace(x, keys=keys, values="fused") for x in spec.layers)
    return replace(spec, layers=layers)


def rotate_model(model: Any, spec: CacheSpec, bits: int | None, chosen: type[Format]) -> None:
    """Rotate all latents of a folded model. bits: of stored numbers (None: as planned); chosen:
    their format."""
    attentions = family_of(model.config).attentions(model)
    for attention, layer in zip(attentions, spec.layers, strict=True):
        if isinstance(attention, FoldedAttention) and layer.keys != "plain":
            rotate_layer(attention, bits, chosen)


def rotate_layer(attention: FoldedAttention, bits: int | None, chosen: type[Format]) -> None:
    """Rotate all latents of one layer."""
    latents = attention.spec.latents
    rotate_latents(attention, {x: tier_rotation(tiers(x, bits, chosen)) for x in latents})


def tier_rotation(widths: Sequence[tuple[int, int]]) -> Tensor:
    """A rotation of a latent that does not mix its tiers; 16-bit tiers are not rotated."""
    blocks = [
        rotation(width) if bits < 16 else torch.eye(width, dtype=torch.float64)
        for width, bits in widths
    ]
    return torch.block_diag(*blocks) if blocks else torch.zeros(0, 0, dtype=torch.float64)


@torch.no_grad()
def rotate_latents(attention: FoldedAttention, rotations: Mapping[Latent, Tensor]) -> None:
    """Rotate the latents of one layer.

    rotations: orthogonal [r, r], fp64, by latent.

    Parameters that change are replaced, so that another model that shares them keeps its own. Full
    keys after RoPE (`plain`) have no projection that could absorb a rotation: fold them as
    `post_rope` keys instead.
    """
    spec = attention.spec
    assert spec.keys != "plain", "plain keys cannot absorb a rotation"
    if attention.query_folded:
        _rotate_blocks(attention.q_proj, _spans(attention, spec.key_latents), rotations, dim=0)
    if attention.linear_width:
        linear = [(latent, 1) for latent in attention.linear_latents]
        _rotate_blocks(attention.down_proj, linear, rotations, dim=0)
    for name, latents, used in (
        ("key_up", spec.key_latents, attention.query_mapped or attention.keys_reconstructed),
        ("key_down", spec.key_latents, attention.keys_mapped),
        ("value_up", spec.value_latents, spec.has_value_up),
    ):
        if used:
            stack = _copy_parameter(attention, name)
            for i, latent in enumerate(latents):
                if latent in rotations:
                    part = stack[i, :, : latent.rank]
                    part.copy_(part.double() @ rotations[latent].to(part.device))
    if attention.keys_mapped:
        shifts = _copy_parameter(attention, "key_shift").split(
            [latent.rank for latent in spec.key_latents]
        )
        for latent, shift in zip(spec.key_latents, shifts, strict=True):
            if latent in rotations:
                shift.copy_(shift.double() @ rotations[latent].to(shift.device))
    if spec.values == "fused":
        _rotate_blocks(attention.o_proj, _spans(attention, spec.value_latents), rotations, dim=1)


def _copy_parameter(module: nn.Module, name: str) -> Tensor:
    """Replace a parameter by a copy, and return the copy."""
    old = module.get_parameter(name)
    new = nn.Parameter(old.clone(), requires_grad=old.requires_grad)
    setattr(module, name, new)
    return new


def _spans(attention: FoldedAttention, latents: tuple[Latent, ...]) -> list[tuple[Latent, int]]:
    """The latent of each KV head, in head order, and how many query heads use it."""
    owner = sorted((head, i) for i, latent in enumerate(latents) for head in latent.heads)
    return [(latents[i], attention.geometry.queries_per_kv) for _, i in owner]


def _rotate_blocks(
    linear: nn.Linear,
    blocks: list[tuple[Latent, int]],
    rotations: Mapping[Latent, Tensor],
    dim: int,
) -> None:
    """Rotate consecutive blocks of a linear layer's outputs (dim 0) or inputs (dim 1)."""
    weight = _copy_parameter(linear, "weight")
    linear_bias = _copy_parameter(linear, "bias") if dim == 0 and linear.bias is not None else None
    start = 0
    for latent, repeats in blocks:
        for _ in range(repeats):
            if latent in rotations and latent.rank:
                q = rotations[latent].to(weight.device)
                part = weight.narrow(dim, start, latent.rank)
                part.copy_(q.T @ part.double() if dim == 0 else part.double() @ q)
                if linear_bias is not None:
                    bias = linear_bias.narrow(0, start, latent.rank)
                    bias.copy_(bias.double() @ q)
            start += latent.rank
