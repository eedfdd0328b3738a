"""Full-rank maps for caches with few bits: they allow stored numbers to be rotated, and subtract a
constant from them.

Shapes: T tokens; Hk KV heads, d, dv head dims of keys and values.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.layout import CacheSpec, Geometry
from kvfold.layout.latents import plain_layer
from kvfold.maps.family import attention_family, check_alike
from kvfold.maps.layer_maps import Maps
from kvfold.maps.layers import AttentionLayer, attention_layers, check_layers
from kvfold.maps.sidecar import Sidecar
from kvfold.models.rotary import position_limit
from kvfold.utils.errors import SettingError

TOKENS, SPAN = 256, 8192  # tokens for which means are computed, and the range of their positions


class Means(NamedTuple):
    """Constants that are subtracted from a layer's keys [Hk, d] and values [Hk, dv] before they are
    stored; fp32 on the CPU.

    A constant in all keys of a head adds the same to all scores of a query. A constant in all
    values is added to the output, because attention weights add up to one. Without this, large
    biases (hundreds in Qwen2.5, in dimensions that RoPE hardly rotates) would set the scale of all
    numbers.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, *, capped: bool, sinks: bool) -> "Means":
        """Means over T tokens of keys [Hk, T, d] and values [Hk, T, dv]; zeros where subtracting
        them would change attention (capped: scores are capped; sinks: attention has sinks)."""
        k, v = (x.detach().float().cpu().mean(1) for x in (keys, values))
        k, v = (x.where(x.isfinite(), 0.0) for x in (k, v))  # where a model overflows by itself
        return cls(k * (not (capped or sinks)), v * (not sinks))


def mean_positions(limit: int) -> Tensor:
    """Positions int64 [T], sorted, drawn at random from the first `limit`, at most SPAN. With equal
    steps some RoPE pair would not rotate at all."""
    span = min(limit, SPAN)
    drawn = torch.randperm(span, generator=torch.Generator().manual_seed(0))
    return drawn[:TOKENS].sort().values


def measured_means(model: Any) -> list[Means]:
    """The means of a causal LM's attention layers, in order, by one short forward."""
    return [_means(x) for x in _probed_layers(model)]


def _probed_layers(model: Any) -> list[AttentionLayer]:
    return attention_layers(model, mean_positions(position_limit(model.config) or SPAN))


def _means(layer: AttentionLayer) -> Means:
    capped = layer.softcap is not None
    return Means.of(layer.keys, layer.values, capped=capped, sinks=layer.sinks is not None)


def plain_sidecar(model: Any) -> tuple[list[AttentionLayer], Sidecar]:
    """The attention layers of a causal LM of any type, and full-rank maps for it, by one short
    forward. The layers keep the keys and values of one token. The maps fit this model alone: no
    probes of it are stored. Raises SettingError for a model whose attention cannot have maps."""
    layers = _probed_layers(model)
    check_layers(model, layers)
    check_alike(layers)
    geometry = attention_family(layers).geometry(model.config)
    sidecar = Sidecar(
        maps={x.name: plain_maps(_means(x)) for x in layers},
        spec=full_spec(geometry, len(layers)),
        base={},
        provenance={"model": str(model.config.name_or_path)},
    )
    return [_one_token(x) for x in layers], sidecar


def _one_token(layer: AttentionLayer) -> AttentionLayer:
    """The layer with the keys and values of its first token only, to free the memory of the
    others."""
    keys, values = (x[:, :1].clone() for x in (layer.keys, layer.values))
    return replace(layer, keys=keys, values=values)


def with_plain_maps(sidecar: Sidecar, model: Any, layers: Sequence[AttentionLayer]) -> Sidecar:
    """The sidecar with full-rank maps added for the model's layers that have none. Raises
    SettingError for layers with different heads."""
    if len(sidecar.maps) != len(sidecar.spec.layers):
        raise SettingError(
            f"`maps` are of {len(sidecar.maps)} layers and their plan of"
            f" {len(sidecar.spec.layers)}: take maps and plan as they were made"
        )
    planned = dict(zip(sidecar.maps, sidecar.spec.layers, strict=True))
    if all(layer.name in planned for layer in layers):
        return sidecar
    check_alike(layers)
    geometry = replace(sidecar.spec.geometry, num_layers=len(layers))
    (full_layer,) = full_spec(geometry, 1).layers
    means = measured_means(model)
    maps = {
        x.name: sidecar.maps.get(x.name) or plain_maps(layer_means)
        for x, layer_means in zip(layers, means, strict=True)
    }
    specs = tuple(planned.get(layer.name, full_layer) for layer in layers)
    spec = replace(sidecar.spec, layers=specs, geometry=geometry)
    return replace(sidecar, maps=maps, spec=spec)


def plain_maps(means: Means) -> Maps:
    """Identity maps (fp32) of a layer with these means."""
    key, value = (torch.eye(x.shape[1]).expand(len(x), -1, -1) for x in means)
    return Maps(
        key_down=key,
        key_up=key,
        key_shift=means.keys,
        value_down=value,
        value_up=value,
        value_shift=means.values,
        value_mean=means.values,
    )


def full_spec(geometry: Geometry, layers: int) -> CacheSpec:
    """The spec of layers with `plain_maps`: full keys and values of each head."""
    layer = replace(plain_layer(geometry), keys="post_rope", values="rebuilt")
    return CacheSpec(geometry=geometry, layers=(layer,) * layers)
