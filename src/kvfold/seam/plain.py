"""Maps that drop nothing, for caches of few bits: what is stored can be rotated, and a constant is
taken out of it.

Shapes: T tokens; Hk KV heads, d, dv head dims of keys and values.
"""

import torch
from torch import Tensor

from kvfold.seam.maps import Maps
from kvfold.spec import CacheSpec, Geometry, Latent, LayerSpec


def plain_maps(keys: Tensor, values: Tensor, *, shift_keys: bool, shift_values: bool) -> Maps:
    """Identity maps, fp32, of a layer whose keys [Hk, T, d] and values [Hk, T, dv] of some tokens
    are at hand: their means are not stored, for they would set the scale of all numbers where a
    model has large biases.

    shift_keys: whether a constant in keys leaves attention as it is (no cap of scores, no sink);
    shift_values: whether attention's weights add up to one (no sink).
    """
    identity = [torch.eye(x.shape[2]).expand(x.shape[0], -1, -1) for x in (keys, values)]
    means = [x.detach().float().cpu().mean(1) for x in (keys, values)]
    key_mean, value_mean = (
        x if shift else torch.zeros_like(x)
        for x, shift in zip(means, (shift_keys, shift_values), strict=True)
    )
    return Maps(
        key_down=identity[0],
        key_up=identity[0],
        key_shift=key_mean,
        value_down=identity[1],
        value_up=identity[1],
        value_shift=value_mean,
        value_mean=value_mean,
    )


def full_spec(geometry: Geometry, layers: int) -> CacheSpec:
    """What layers store with `plain_maps`: every head's keys and values in full."""
    latents = tuple(
        Latent(side=side, heads=(head,), rank=geometry.head_dim)
        for side in ("k", "v")
        for head in range(geometry.num_kv_heads)
    )
    layer = LayerSpec(keys="post_rope", values="rebuilt", latents=latents)
    return CacheSpec(geometry=geometry, layers=(layer,) * layers)
