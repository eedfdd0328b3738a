"""Decoding by kernels that read pages where they lie, and what they are given beside pages.

Shapes: B sequences, Hq query heads, d head dim, r widest key rank, W numbers that W_O takes.
Nothing here waits for the device, so that a step can be captured as a CUDA graph.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvfold.attention.base import AttentionBackend, LayerMaps, QueryKeeper, Task, reads_unevenly
from kvfold.attention.metadata import AttentionMetadata, PoolView
from kvfold.ops.decode import reference as decode
from kvfold.ops.latent_decode import reference as rebuild
from kvfold.ops.latent_decode.reference import KeyMaps
from kvfold.ops.observe.reference import supports as can_observe
from kvfold.spec.layout import Group

if TYPE_CHECKING:
    from kvfold.ops.decode.triton import DecodePlan
    from kvfold.ops.latent_decode.plan import RebuildPlan


ODD = "no kernel reads such rows"


@dataclass(frozen=True)
class LayerBatch:
    """Layers that are planned together, since they have equally many groups and latents; columns
    int64: the numbers of these groups."""

    layers: tuple[int, ...]
    groups: tuple[tuple[Group, ...], ...]
    columns: Tensor

    def lengths(self, view: PoolView, part: AttentionMetadata) -> Tensor:
        """int32 [B, groups of these layers], the step's own rows included."""
        return view.pool.lengths[part.slots[:, None], self.columns]


def batches(view: PoolView, layers: Sequence[LayerMaps]) -> list[LayerBatch]:
    """`layers`, alike ones together."""
    alike = defaultdict(list)
    for layer in layers:
        counts = len(layer.spec.key_latents), len(layer.spec.value_latents)
        alike[len(view.pages[layer.index].groups), counts].append(layer.index)
    return [_batch(view, tuple(found)) for found in alike.values()]


def _batch(view: PoolView, layers: tuple[int, ...]) -> LayerBatch:
    places = [view.pool.layout.layer_groups[i] for i in layers]
    columns = [number for x in places for number in range(x.start, x.stop)]
    groups = tuple(view.pages[i].groups for i in layers)
    return LayerBatch(layers, groups, torch.tensor(columns, device=view.pool.device))


class TritonDecode(AttentionBackend):
    """Rows in score space, a group a KV head, by `ops.decode`'s kernel; observed queries go to a
    keeper. A step has one decoding part."""

    captures: ClassVar[bool] = True
    observes: ClassVar[bool] = True
    keeps: ClassVar[bool] = True

    def __init__(
        self, view: PoolView, layers: Sequence[LayerBatch], keeper: QueryKeeper | None
    ) -> None:
        super().__init__(view)
        self.layers, self.keeper = layers, keeper
        self.plans: dict[int, DecodePlan] = {}
        self.kept: Tensor | None = None  # where the keeper has the part's queries

    @classmethod
    def supports(cls, layer: LayerMaps, groups: Sequence[Group], task: Task) -> str | None:
        if layer.rebuilds_keys:
            return "keys are rebuilt before RoPE"
        if reason := _unserved(layer, groups, task):
            return reason
        if not decode.supports(groups):
            return ODD
        if task.observed and not can_observe(groups):
            return "no kernel observes such rows"
        return None

    @classmethod
    def prepare(
        cls, view: PoolView, layers: Sequence[LayerMaps], keeper: QueryKeeper | None
    ) -> Callable[[], AttentionBackend]:
        return partial(cls, view, batches(view, layers), keeper)

    def attend(self, layer: LayerMaps, part: AttentionMetadata, q: Tensor) -> Tensor:
        """q [B, Hq, 1, r] -> [B, 1, W]."""
        from kvfold.ops.decode import triton as decode_triton

        if not self.plans:
            for x in self.layers:
                counts, queries = x.lengths(self.view, part), layer.geometry.queries_per_kv
                plans = decode_triton.plan_layers(x.groups, counts, queries)
                self.plans.update(zip(x.layers, plans, strict=True))
        q, place = q[:, :, 0], (*self.view.pages[layer.index], part.slots)
        out, lse = decode_triton.decode(q, *place, layer.scale, self.plans[layer.index])
        if self.keeper is not None and part.prompt_lengths is not None:
            if self.kept is None:
                self.kept = self.keeper.rows_of(part)
            self.keeper.keep(layer.index, self.kept, q, lse)
        return layer.joined(out[:, :, None])


@dataclass(frozen=True)
class Rebuilder:
    """Maps that rebuild keys, by layer, and one table of angles: made once."""

    layers: list[LayerBatch]
    maps: Mapping[int, KeyMaps]
    rope: Tensor

    @classmethod
    def of(cls, view: PoolView, layers: Sequence[LayerMaps]) -> "Rebuilder":
        from kvfold.ops.latent_decode.plan import rope_table

        maps = {layer.index: _key_maps(layer) for layer in layers}
        angles, geometry = maps[layers[0].index].inv_freq, layers[0].geometry
        rope = rope_table(angles, view.pool.max_tokens, geometry.head_dim)
        return cls(batches(view, layers), maps, rope)


class LatentDecode(AttentionBackend):
    """Keys rebuilt from latents before RoPE, by `ops.latent_decode`'s kernels, where they are not
    observed. A step has one decoding part."""

    captures: ClassVar[bool] = True

    def __init__(self, view: PoolView, rebuilder: Rebuilder) -> None:
        super().__init__(view)
        self.rebuilder = rebuilder
        self.plans: dict[int, RebuildPlan] = {}

    @classmethod
    def supports(cls, layer: LayerMaps, groups: Sequence[Group], task: Task) -> str | None:
        if not layer.rebuilds_keys:
            return "keys are stored in score space"
        if reason := _unserved(layer, groups, task):
            return reason
        if layer.rope is None or not layer.rope.fixed:
            return "angles of RoPE depend on the length of sequences"
        return None if rebuild.supports(layer.spec, groups) else ODD

    @classmethod
    def prepare(
        cls, view: PoolView, layers: Sequence[LayerMaps], keeper: QueryKeeper | None
    ) -> Callable[[], AttentionBackend]:
        return partial(cls, view, Rebuilder.of(view, layers))

    def attend(self, layer: LayerMaps, part: AttentionMetadata, q: Tensor) -> Tensor:
        """q [B, Hq, 1, d], rotated -> [B, 1, W]."""
        from kvfold.ops.latent_decode import triton as rebuild_triton

        if not self.plans:
            self._plan(layer, part, q.dtype)
        arena, tables, lengths, groups = self.view.pages[layer.index]
        out, _ = rebuild_triton.decode(
            q[:, :, 0].contiguous(),
            arena,
            tables,
            lengths,
            layer.spec,
            groups,
            part.slots,
            layer.scale,
            self.rebuilder.maps[layer.index],
            self.rebuilder.rope,
            self.plans[layer.index],
        )
        return layer.joined(out[:, :, None])

    def _plan(self, layer: LayerMaps, part: AttentionMetadata, dtype: torch.dtype) -> None:
        from kvfold.ops.latent_decode.plan import plan_layers

        spec, geometry = self.view.pool.layout.spec, layer.geometry
        for x in self.rebuilder.layers:
            layers, counts = [spec.layers[i] for i in x.layers], x.lengths(self.view, part)
            size = geometry.queries_per_kv, geometry.head_dim, dtype, part.rows
            plans = plan_layers(layers, x.groups, counts, *size)
            self.plans.update(zip(x.layers, plans, strict=True))


def _key_maps(layer: LayerMaps) -> KeyMaps:
    rope = layer.rope
    assert rope is not None and layer.key_up is not None and layer.key_mean is not None
    up = layer.key_columns.per_head(layer.key_up, layer.geometry.head_dim).detach()
    return KeyMaps(up, layer.key_mean.detach(), rope.inv_freq, rope.scaling)


def _unserved(layer: LayerMaps, groups: Sequence[Group], task: Task) -> str | None:
    """Why no kernel decodes a layer, whatever numbers its rows have."""
    if not task.kernels:
        return f"no kernels run on {task.device_type}"
    return reads_unevenly(layer, groups)
