"""What tests of maps share with others."""

import torch
from transformers import DynamicCache

from kvfold.maps.layer_maps import Maps
from kvfold.maps.layers import AttentionLayer
from kvfold.models.fold import LatentMaps
from kvfold.utils.versions import cache_argument
from model_types import INDIRECT

CHUNKS = (17, 1, 19, 3)


# Rounding of float32 in mixtures of experts, whose products are not made in float64: the sum of
# some hundred terms in four layers.
NEAR = 4e-5


# Of maps that calibration makes, whose numbers fp16 holds: 2^-12 of a direction, through layers
# with large random weights.
ROUNDED = 4e-3


def orthogonal(count: int, size: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(count, size, size, dtype=torch.float64))[0]


def random_maps(layer: AttentionLayer, keep: float = 1.0) -> Maps:
    """Maps of a key latent a head, no rotations, and of one value latent, about other points."""
    heads, d, dv = layer.num_kv_heads, layer.head_dim, layer.value_dim
    turned = orthogonal(heads, d) * (torch.rand(heads, 1, d, dtype=torch.float64) + 0.5)
    back = torch.linalg.inv(turned).mT
    about = torch.randn(heads, d, dtype=torch.float64)
    if layer.softcap is not None or layer.sinks is not None:
        about = about * 0
    values, mean = orthogonal(1, heads * dv)[0], torch.randn(heads * dv, dtype=torch.float64)
    r, s = int(d * keep), int(heads * dv * keep)
    keys = [LatentMaps(x[:, :r], y[:, :r], z) for x, y, z in zip(turned, back, about, strict=True)]
    mean = mean * (layer.sinks is None)
    return Maps.of(keys, [LatentMaps(values[:, :s], values[:, :s], mean)])


def in_chunks(model, ids: torch.Tensor, **more) -> torch.Tensor:
    """Logits [B, T, V] through a cache, whose keys and values come in chunks."""
    cache, found, start = cache_of(model), [], 0
    for size in CHUNKS:
        part = ids[:, start : start + size]
        seen = {name: x[:, : start + size] for name, x in more.items()}
        found.append(model(part, **seen, **cache_argument(cache), use_cache=True).logits)
        start += size
    return torch.cat(found, 1)


def cache_of(model):
    if model.config.model_type == "minimax":  # whose attention takes no other
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        return MiniMaxCache()
    return DynamicCache(config=model.config)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


# minimax: k and v are what its cache stores, which is of a class of its own.
EXPANDED = [x for x in INDIRECT if x != "minimax"]


EXPANDED += ["minimax_m3_vl_text"]  # where its index chooses blocks, which the tiny one has not
