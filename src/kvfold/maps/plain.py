"""Maps that drop nothing, for caches of few bits: what is stored can be rotated, and a constant is
taken out of it.

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

TOKENS, SPAN = 256, 8192  # of which means are taken, and the positions over which they lie


class Means(NamedTuple):
    """What is not stored of a layer's keys [Hk, d] and values [Hk, dv], fp32 on the CPU.

    A constant in all keys of a head adds the same to all scores of a query, and one in all values
    comes back as it is, where attention's weights add up to one. Biases of hundreds, such as
    Qwen2.5's in pairs that RoPE hardly rotates, would otherwise set the scale of all numbers.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, *, capped: bool, sinks: bool) -> "Means":
        """Of keys [Hk, T, d] and values [Hk, T, dv] of some tokens; zeros where attention would
        change (capped: scores are; sinks: a score without a value stands beside them)."""
        k, v = (x.detach().float().cpu().mean(1) for x in (keys, values))
        k, v = (x.where(x.isfinite(), 0.0) for x in (k, v))  # where a model overflows by itself
        return cls(k * (not (capped or sinks)), v * (not sinks))


def mean_positions(limit: int) -> Tensor:
    """Positions int64 [T] that differ, drawn from the first `limit`, at most SPAN: at equal steps
    some pair of RoPE's would not rotate at all."""
    span = min(limit, SPAN)
    drawn = torch.randperm(span, generator=torch.Generator().manual_seed(0))
    return drawn[:TOKENS].sort().values


def measured_means(model: Any) -> list[Means]:
    """Of a causal LM's layers that call attention, in order, by one short forward."""
    return [_means(x) for x in _probed_layers(model)]


def _probed_layers(model: Any) -> list[AttentionLayer]:
    return attention_layers(model, mean_positions(position_limit(model.config) or SPAN))


def _means(layer: AttentionLayer) -> Means:
    capped = layer.softcap is not None
    return Means.of(layer.keys, layer.values, capped=capped, sinks=layer.sinks is not None)


def plain_sidecar(model: Any) -> tuple[list[AttentionLayer], Sidecar]:
    """The layers of a causal LM of any type, with one token's keys and values, and maps that drop
    nothing, by one short forward. The maps are of this model alone: no probes of it are kept.
    Raises SettingError for one whose attention cannot have maps."""
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
    """Without the keys and values of all others, which would stay in memory."""
    keys, values = (x[:, :1].clone() for x in (layer.keys, layer.values))
    return replace(layer, keys=keys, values=values)


def with_plain_maps(sidecar: Sidecar, model: Any, layers: Sequence[AttentionLayer]) -> Sidecar:
    """With maps that drop nothing for the layers of a model that have none. Raises SettingError for
    layers with unlike heads."""
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
    (whole,) = full_spec(geometry, 1).layers
    means = measured_means(model)
    maps = {
        x.name: sidecar.maps.get(x.name) or plain_maps(y)
        for x, y in zip(layers, means, strict=True)
    }
    specs = tuple(planned.get(layer.name, whole) for layer in layers)
    spec = replace(sidecar.spec, layers=specs, geometry=geometry)
    return replace(sidecar, maps=maps, spec=spec)


def plain_maps(means: Means) -> Maps:
    """Identity maps, fp32, of a layer with these means."""
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
    """What layers store with `plain_maps`: every head's keys and values in full."""
    layer = replace(plain_layer(geometry), keys="post_rope", values="rebuilt")
    return CacheSpec(geometry=geometry, layers=(layer,) * layers)
