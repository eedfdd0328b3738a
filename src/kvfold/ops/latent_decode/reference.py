"""Decode attention with reconstructed keys in plain PyTorch, for layouts without a kernel.

Gathers all entries and reconstructs all keys first. Shapes as in `latent_decode`; T entries of the
longest group, R numbers of an entry.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.layout import Latent, LayerSpec
from kvfold.ops.common.attention import attend_rows, rotate
from kvfold.ops.common.pages import LayerPages, owner_of
from kvfold.ops.latent_decode.groups import Layer
from kvfold.ops.latent_decode.maps import KeyMaps
from kvfold.ops.store.reference import gather


def plan_layers(
    q: Tensor, layers: Sequence[Layer], lengths: Tensor, rows: int, maps: Sequence[KeyMaps] = ()
) -> list[None]:
    """Return None for every layer: nothing is planned."""
    return [None] * len(layers)


def latent_decode(
    q: Tensor, pages: LayerPages, slots: Tensor, scale: float, maps: KeyMaps, plan: None = None,
    *, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `ops.latent_decode.latent_decode`. dtype: to compute in, q's by default."""
    layer, compute_dtype = maps.layer, dtype or q.dtype
    stored = gather(pages, slots, pages.lengths[slots], q.dtype)
    owner = torch.tensor(owner_of(pages.groups), device=q.device)
    rows, up, mean = (
        stored.rows.to(compute_dtype),
        maps.up.to(compute_dtype),
        maps.mean.to(compute_dtype),
    )
    z = _per_head(rows, layer, layer.key_latents, up.shape[-1])
    k = torch.einsum("bhtr,hdr->bhtd", z, up) + mean[:, None]
    cos, sin = (x.to(compute_dtype) for x in maps.tables(stored.positions[:, owner]))
    v = _per_head(rows, layer, layer.value_latents, max(x.rank for x in layer.value_latents))
    out, lse = attend_rows(
        q.to(compute_dtype), rotate(k, cos, sin), v, stored.valid[:, owner], scale
    )
    return out.to(q.dtype), lse


def _per_head(rows: Tensor, layer: LayerSpec, latents: Sequence[Latent], width: int) -> Tensor:
    """Copy latents of entries [B, T, R] to every KV head that reads them: [B, Hk, T, width]."""
    num_heads = sum(len(latent.heads) for latent in latents)
    out = rows.new_zeros(rows.shape[0], num_heads, rows.shape[1], width)
    for latent in latents:
        out[:, list(latent.heads), :, : latent.rank] = rows[:, None, :, layer.columns(latent)]
    return out
