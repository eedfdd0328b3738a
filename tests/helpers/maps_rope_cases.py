"""What tests of maps rope share with others."""

from typing import Any

import torch

from kvfold.layout import Latent, LayerSpec, Side
from kvfold.maps.layers import AttentionLayer, attention_layers
from kvfold.maps.rope_maps import RopeMaps
from kvfold.maps.rotation import Rotation, find_rotations
from kvfold.maps.sidecar import Sidecar, probes_of
from kvfold.models.fold import LatentMaps
from maps_cases import orthogonal

PAIRS = "does not rotate its keys in pairs"


UNTOLD = "does not tell attention at which positions"


REFUSED = {
    "codegen": PAIRS,  # its angles are in a table that is no buffer of frequencies
    "gptj": PAIRS,
    "hunyuan_v1_dense": PAIRS,  # a norm with weights follows
    "hunyuan_v1_moe": PAIRS,
    "llama4_text": UNTOLD,
    "persimmon": UNTOLD,
    "qwen2_5_vl": UNTOLD,
    "qwen2_vl": UNTOLD,
    "recurrent_gemma": UNTOLD,
    "zaya": UNTOLD,
}

NO_SPEC: Any = None  # maps alone decide


def random_maps(
    layer: AttentionLayer, rotation: Rotation, keep: float = 1.0, joint=False
) -> RopeMaps:
    """A key latent a head, no rotations, and one value latent, about other points; joint: one
    latent of both."""
    heads, d, dv = layer.num_kv_heads, layer.head_dim, layer.value_dim
    sizes = [heads * (d + dv)] if joint else [d] * heads + [heads * dv]
    latents, maps = [], []
    for i, size in enumerate(sizes):
        side: Side = "kv" if joint else "k" if i < heads else "v"
        own = (i,) if side == "k" else tuple(range(heads))
        down = orthogonal(1, size)[0] * (torch.rand(size, dtype=torch.float64) + 0.5)
        up, rank = torch.linalg.inv(down).mT, int(size * keep)
        mean = torch.randn(size, dtype=torch.float64)
        if layer.sinks is not None and side == "v":
            mean = mean * 0
        if layer.sinks is not None and joint:
            mean[heads * d :] = 0
        latents.append(Latent(side=side, heads=own, rank=rank))
        maps.append(LatentMaps(down[:, :rank], up[:, :rank], mean))
    spec = LayerSpec(keys="pre_rope", values="rebuilt", latents=tuple(latents))
    return RopeMaps.before_rope(spec, maps, rotation)


def maps_of(model, layers, keep: float = 1.0, joint: bool = False) -> dict[str, RopeMaps]:
    rotations = find_rotations(model, layers)
    own = [x for x in layers if x.source == x.name]
    return {x.name: random_maps(x, rotations[x.name], keep, joint) for x in own}


def sidecar(model, keep: float = 1.0, joint: bool = False) -> Sidecar:
    layers = attention_layers(model)
    maps = maps_of(model, layers, keep, joint)
    return Sidecar(maps=maps, spec=NO_SPEC, base=probes_of(layers), provenance={})
