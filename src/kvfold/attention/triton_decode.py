"""Decode attention by Triton kernels that read pages in place, with their plans.

Shapes: B sequences, Hq query heads, d head dim, r widest key rank, W input width of W_O. Nothing
here waits for the device, so that a step can be captured as a CUDA graph.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvfold.attention.backend import RESIDUAL, AttentionBackend, Task, Weighed, why_not_uniform
from kvfold.attention.base import LayerAttention, LayerShape
from kvfold.attention.metadata import AttentionMetadata, CacheView
from kvfold.attention.observer import Observer
from kvfold.layout.pages import Group
from kvfold.ops import decode, latent_decode, observe
from kvfold.ops.common.recording import contiguous
from kvfold.ops.decode import Limits
from kvfold.ops.latent_decode import KeyMaps


@dataclass(frozen=True)
class LayerBatch:
    """Layers that are planned in one call, because they have equally many groups and latents, and
    are all `limited` or not. columns int64: numbers of these groups in the model."""

    layers: tuple[int, ...]
    groups: tuple[tuple[Group, ...], ...]
    columns: Tensor
    limited: bool

    def lengths(self, view: CacheView, part: AttentionMetadata) -> Tensor:
        """Rows int32 [B, groups of these layers], this step's included."""
        return view.lengths(part.slots, self.columns)


def plan_batches(view: CacheView, layers: Sequence[LayerAttention]) -> list[LayerBatch]:
    """Divide `layers` into batches that can be planned together."""
    by_kind = defaultdict(list)
    for layer in layers:
        counts = len(layer.spec.key_latents), len(layer.spec.value_latents)
        groups = len(view.layout.groups_of_layer(layer.index))
        by_kind[groups, counts, layer.limited].append(layer.index)
    layer_batches = []
    for (*_, limited), indices in by_kind.items():
        groups_of = tuple(view.layout.groups_of_layer(i) for i in indices)
        ranges = [view.layout.layer_groups[i] for i in indices]
        numbers = [number for x in ranges for number in range(x.start, x.stop)]
        columns = torch.tensor(numbers, device=view.device)
        layer_batches.append(LayerBatch(tuple(indices), groups_of, columns, limited))
    return layer_batches


class TritonDecode(AttentionBackend):
    """Decode attention for keys in the space of scores, by the kernels of `ops.decode`. An observer
    buffers observed queries if the kernel leaves no weights (one pass). A step has one decoding
    part."""

    supports_graphs: ClassVar[bool] = True

    def __init__(
        self, view: CacheView, layers: Sequence[LayerBatch], observer: Observer | None
    ) -> None:
        super().__init__(view)
        self.layers, self.observer = layers, observer
        self.plans: dict[int, Any] = {}
        self.observer_rows: Tensor | None = None  # buffer indices of the queries

    @classmethod
    def unsupported_reason(
        cls, layer: LayerShape, groups: Sequence[Group], task: Task
    ) -> str | None:
        if layer.reconstructs_keys:
            return "keys are stored before RoPE"
        if groups[0].layout.residual:
            return RESIDUAL
        if task.observed and layer.limited:
            return "no kernel observes capped scores, or rows that a window hides"
        return decode.why_not(groups, task.device_type, layer.limited)

    @classmethod
    def needs_observer(cls, groups: Sequence[Group], device_type: str) -> bool:
        """True for rows that `ops.observe` reads again, which are those that one pass decodes."""
        return observe.why_not(groups, device_type) is None

    @classmethod
    def replays(cls, layer: LayerAttention) -> bool:
        return layer.value_columns.uniform

    @classmethod
    def prepare(
        cls, view: CacheView, layers: Sequence[LayerAttention], observer: Observer | None
    ) -> Callable[[CacheView], AttentionBackend]:
        return partial(cls, layers=plan_batches(view, layers), observer=observer)

    def attend(
        self, layer: LayerAttention, part: AttentionMetadata, q: Tensor, into: Tensor | None = None
    ) -> Tensor:
        """q [B, Hq, 1, r] -> [B, 1, W]."""
        q = q[:, :, 0]
        out, lse = self._decode(layer, part, q)
        plan = self.plans[layer.index]
        out, lse = _with_sinks(layer, out, lse)
        if self.observer is None or layer.index not in self.observer.layers:
            _add_metrics(self.view, layer.index, part, lse, plan)
        elif part.prompt_lengths is not None:
            if self.observer_rows is None:
                self.observer_rows = self.observer.rows_of(part)
            self.observer.buffer(layer.index, self.observer_rows, q, lse)
        return layer.merge_heads(out[:, :, None], into=into)

    def weigh(self, layer: LayerAttention, part: AttentionMetadata, q: Tensor) -> Weighed:
        out, lse = self._decode(layer, part, contiguous(q[:, :, 0]))
        return out[:, :, None], lse[..., None]

    def _decode(
        self, layer: LayerAttention, part: AttentionMetadata, q: Tensor
    ) -> tuple[Tensor, Tensor]:
        """q [B, Hq, r] -> out [B, Hq, s], lse fp32 [B, Hq]."""
        if not self.plans:
            for x in self.layers:
                counts, queries = x.lengths(self.view, part), layer.geometry.queries_per_kv
                plans = decode.plan_layers(x.groups, counts, queries, part.rows, x.limited)
                self.plans.update(zip(x.layers, plans, strict=True))
        inputs = self.view.pages[layer.index], part.slots, layer.scale, self.plans[layer.index]
        return decode.decode(q, *inputs, score_limits(layer, part))


class LatentDecode(AttentionBackend):
    """Decode attention with keys that are reconstructed from latents before RoPE, by the kernels of
    `ops.latent_decode`. maps: by layer. A step has one decoding part."""

    supports_graphs: ClassVar[bool] = True

    def __init__(
        self, view: CacheView, layers: Sequence[LayerBatch], maps: Mapping[int, KeyMaps]
    ) -> None:
        super().__init__(view)
        self.layers, self.maps = layers, maps
        self.plans: dict[int, Any] = {}

    @classmethod
    def unsupported_reason(
        cls, layer: LayerShape, groups: Sequence[Group], task: Task
    ) -> str | None:
        if not layer.reconstructs_keys:
            return "keys are stored in score space"
        if not layer.fixed_rope:
            return "angles of RoPE depend on the length of sequences"
        return why_not_uniform(layer, groups) or latent_decode.why_not(
            layer.spec, groups, task.device_type
        )

    @classmethod
    def prepare(
        cls, view: CacheView, layers: Sequence[LayerAttention], observer: Observer | None
    ) -> Callable[[CacheView], AttentionBackend]:
        tables: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the RoPE, which layers may share
        maps = {}
        for layer in layers:
            rope = layer.rope
            assert rope is not None
            if id(rope) not in tables:
                settings = rope.inv_freq, view.max_tokens, layer.geometry.head_dim
                rope_tables = (
                    latent_decode.rope_table(*settings),
                    latent_decode.exact_table(*settings),
                )
                tables[id(rope)] = rope_tables
            maps[layer.index] = _key_maps(layer, *tables[id(rope)])
        return partial(cls, layers=plan_batches(view, layers), maps=maps)

    def attend(
        self, layer: LayerAttention, part: AttentionMetadata, q: Tensor, into: Tensor | None = None
    ) -> Tensor:
        """q [B, Hq, 1, d], rotated -> [B, 1, W]."""
        out, lse = layer.with_sinks(*self.weigh(layer, part, q))
        _add_metrics(self.view, layer.index, part, lse[..., 0], self.plans[layer.index])
        return layer.merge_heads(out, into=into)

    def weigh(self, layer: LayerAttention, part: AttentionMetadata, q: Tensor) -> Weighed:
        q = q[:, :, 0].contiguous()
        if not self.plans:
            self._plan(part, q)
        inputs = self.view.pages[layer.index], part.slots, layer.scale
        maps, plan = self.maps[layer.index], self.plans[layer.index]
        out, lse = latent_decode.latent_decode(q, *inputs, maps, plan)
        return out[:, :, None], lse[..., None]

    def _plan(self, part: AttentionMetadata, q: Tensor) -> None:
        spec = self.view.layout.spec
        for x in self.layers:
            pairs, counts = zip(x.layers, x.groups, strict=True), x.lengths(self.view, part)
            layers = [(spec.layers[i], groups) for i, groups in pairs]
            plans = latent_decode.plan_layers(
                q, layers, counts, part.rows, [self.maps[i] for i in x.layers]
            )
            self.plans.update(zip(x.layers, plans, strict=True))


def score_limits(layer: LayerShape, part: AttentionMetadata) -> Limits | None:
    """Soft cap and sliding window of the scores of a decoding part; None if there are neither."""
    if not layer.limited:
        return None
    positions = part.positions[:, 0]
    return Limits(softcap=layer.softcap, window=layer.window, positions=positions)


def _with_sinks(layer: LayerAttention, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Add the layer's sinks to a kernel's out [B, Hq, .] and lse fp32 [B, Hq]."""
    out, lse = layer.with_sinks(out[:, :, None], lse[..., None])
    return out[:, :, 0], lse[..., 0]


def _add_metrics(
    view: CacheView, layer: int, part: AttentionMetadata, lse: Tensor, plan: Any
) -> None:
    """Add the attention weights of a two-pass decode to the metrics, if it is observed: then all
    queries of decoding sequences are (see `scorers.attention.observed`). lse fp32 [B, Hq]."""
    observation = view.observing
    if observation is None or part.prompt_lengths is None:
        return
    observe.observe_weights(
        plan, lse, part.positions[:, 0], view.pages[layer], part.slots,
        power=observation.scorer.power, exclude=observation.scorer.exclude,
    )  # fmt: skip


def _key_maps(layer: LayerAttention, table: Tensor, exact: Tensor) -> KeyMaps:
    rope = layer.rope
    assert rope is not None and layer.key_up is not None and layer.key_mean is not None
    up = layer.key_columns.per_head(layer.key_up, layer.geometry.head_dim).detach()
    mean = layer.key_mean.detach()
    return KeyMaps(layer.spec, up, mean, rope.inv_freq, table, rope.scaling, exact)
