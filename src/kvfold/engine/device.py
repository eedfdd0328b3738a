"""Decoding by kernels that read pages where they lie, and what they are given beside pages.

Shapes: B sequences, Hq query heads, Hk KV heads, d head dim, r widest key rank, D model width.
Nothing here waits for the device, so that a step can be captured as a CUDA graph.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.engine.backends import AttentionContext, AttentionMetadata
from kvfold.engine.observer import Observer
from kvfold.models.adapter import LONG_ROPE, HFAttention
from kvfold.ops import decode, latent_decode
from kvfold.ops.backend import use_triton
from kvfold.ops.latent_decode import KeyMaps
from kvfold.spec.layout import Group


@dataclass(frozen=True)
class LayerBatch:
    """Layers that are planned together, since they have equally many groups and latents; columns
    int64: the numbers of these groups."""

    layers: tuple[int, ...]
    groups: tuple[tuple[Group, ...], ...]
    columns: Tensor

    def lengths(self, setup: AttentionContext, part: AttentionMetadata) -> Tensor:
        """int32 [B, groups of these layers], the step's own rows included."""
        return setup.pool.lengths[part.slots[:, None], self.columns]


def bunches(setup: AttentionContext, layers: Iterable[int]) -> list[LayerBatch]:
    """`layers`, alike ones together."""
    spec, alike = setup.pool.layout.spec, defaultdict(list)
    for layer in layers:
        latents = spec.layers[layer]
        counts = len(latents.key_latents), len(latents.value_latents)
        alike[len(setup.pages[layer].groups), counts].append(layer)
    return [_bunch(setup, tuple(found)) for found in alike.values()]


def _bunch(setup: AttentionContext, layers: tuple[int, ...]) -> LayerBatch:
    places = [setup.pool.layout.layer_groups[i] for i in layers]
    columns = [number for x in places for number in range(x.start, x.stop)]
    groups = tuple(setup.pages[i].groups for i in layers)
    return LayerBatch(layers, groups, torch.tensor(columns, device=setup.pool.device))


class DirectDecode:
    """Rows in score space, a group a KV head, by `ops.decode`'s kernel. A step has one decoding
    part. observer: what keeps observed queries; None: those are for other ways."""

    def __init__(
        self, setup: AttentionContext, layers: list[LayerBatch], observer: Observer | None
    ) -> None:
        self.setup, self.layers, self.observer = setup, layers, observer
        self.plans: dict[int, Any] = {}
        self.kept: Tensor | None = None  # where the observer keeps the part's queries

    def takes(self, module: HFAttention, part: AttentionMetadata) -> bool:
        mine = any(module.layer_idx in x.layers for x in self.layers)
        watched = part.prompt_lengths is not None
        seen = self.observer is not None and module.layer_idx in self.observer.queries
        return part.decode and mine and (seen or not watched)

    def attend(self, module: HFAttention, part: AttentionMetadata, q: Tensor) -> Tensor:
        """q [B, Hq, 1, r] -> [B, 1, D]."""
        if not self.plans:
            for x in self.layers:
                counts, queries = x.lengths(self.setup, part), module.num_key_value_groups
                plans = decode.plan_layers(x.groups, counts, queries)
                self.plans.update(zip(x.layers, plans, strict=True))
        layer, q = module.layer_idx, q[:, :, 0]
        place = self.setup.pages[layer], part.slots
        out, lse = decode.decode(q, *place, module.scaling, self.plans[layer])
        if self.observer is not None and part.prompt_lengths is not None:
            if self.kept is None:
                self.kept = self.observer.rows_of(part)
            self.observer.keep(layer, self.kept, q, lse)
        return module.output(out[:, :, None])


@dataclass(frozen=True)
class Rebuilder:
    """What rebuilds the keys of layers, made once: their maps by layer."""

    layers: list[LayerBatch]
    maps: Mapping[int, KeyMaps]


class RebuiltDecode:
    """Keys rebuilt from latents before RoPE, by `ops.latent_decode`'s kernels, where they are not
    observed. A step has one decoding part."""

    def __init__(self, setup: AttentionContext, rebuilder: Rebuilder) -> None:
        self.setup, self.rebuilder = setup, rebuilder
        self.plans: dict[int, Any] = {}

    def takes(self, module: HFAttention, part: AttentionMetadata) -> bool:
        mine = module.layer_idx in self.rebuilder.maps
        return part.decode and mine and part.prompt_lengths is None

    def attend(self, module: HFAttention, part: AttentionMetadata, q: Tensor) -> Tensor:
        """q [B, Hq, 1, d], rotated -> [B, 1, D]."""
        q = q[:, :, 0].contiguous()
        if not self.plans:
            self._plan(part, q)
        layer = module.layer_idx
        place = self.setup.pages[layer], part.slots, module.scaling
        maps, plan = self.rebuilder.maps[layer], self.plans[layer]
        out, _ = latent_decode.latent_decode(q, *place, maps, plan)
        return module.output(out[:, :, None])

    def _plan(self, part: AttentionMetadata, q: Tensor) -> None:
        spec = self.setup.pool.layout.spec
        for x in self.rebuilder.layers:
            each, counts = zip(x.layers, x.groups, strict=True), x.lengths(self.setup, part)
            layers = [(spec.layers[i], groups) for i, groups in each]
            plans = latent_decode.plan_layers(q, layers, counts, part.rows)
            self.plans.update(zip(x.layers, plans, strict=True))


def direct_layers(setup: AttentionContext) -> list[int]:
    """Layers that `DirectDecode` does: a query sees all rows, which its kernel reads."""
    spec, device = setup.pool.layout.spec, setup.pool.device.type
    return [
        i
        for i in _unwindowed(setup)
        if spec.layers[i].keys != "pre" and not decode.why_not(setup.pages[i].groups, device)
    ]


def rebuilder_of(setup: AttentionContext, modules: Sequence[Any]) -> Rebuilder | None:
    """Of the layers whose keys kernels rebuild; None if there is none. Only angles that do not
    depend on the sequence's length will do, the same in all layers."""
    spec = setup.pool.layout.spec
    layers = [
        i
        for i in _unwindowed(setup)
        if not latent_decode.why_not(spec.layers[i], setup.pages[i].groups, setup.pool.device.type)
        and modules[i].rotary is not None
        and modules[i].rotary.rope_type not in LONG_ROPE
    ]
    if not layers:
        return None
    angles = modules[layers[0]].rotary.rotary.inv_freq.float()
    rope = latent_decode.rope_table(angles, setup.pool.max_tokens, spec.geometry.head_dim)
    maps = {i: _key_maps(modules[i], rope) for i in layers}
    return Rebuilder(bunches(setup, layers), maps)


def _key_maps(module: HFAttention, rope: Tensor) -> KeyMaps:
    assert module.rotary is not None
    rotary: Any = module.rotary.rotary
    up = module.key_columns.per_head(module.key_up, module.geometry.head_dim).detach()
    mean, angles = module.key_mean.detach(), rotary.inv_freq.float()
    return KeyMaps(module.spec, up, mean, angles, rope, rotary.attention_scaling)


def _unwindowed(setup: AttentionContext) -> list[int]:
    """Layers without a sliding window, where kernels run."""
    if not use_triton(setup.pool.device.type) or setup.pool.layout.residual:
        return []
    return [i for i, window in enumerate(setup.windows) if window is None]
