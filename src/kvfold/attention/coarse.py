"""Attention over the entries of two pools: one call for each, and both results merged by their
log-sum-exps.

`CoarseDecode` serves sequences whose oldest entries were demoted to fewer bits; the other entries
are the *fine* ones. `attention.hybrid` serves entries of two ranks. Shapes: B sequences of one
attention call (a part of the step), T queries per sequence; Hq query heads, r / s widest key /
value rank, W input width of W_O.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from kvfold.attention.backend import AttentionBackend, Task, Weighed
from kvfold.attention.base import LayerAttention, LayerShape
from kvfold.attention.metadata import AttentionMetadata, CacheView, PoolView
from kvfold.attention.numba_decode import NumbaDecode
from kvfold.attention.observer import Observer
from kvfold.attention.triton_decode import LayerBatch, plan_batches
from kvfold.layout.pages import Group
from kvfold.ops import decode
from kvfold.ops.common.parts import plan_parts
from kvfold.ops.merge import merged

Decode = Callable[[LayerAttention, AttentionMetadata, Tensor], Weighed]


class PlannedDecode:
    """Decode attention over the entries of one pool by whatever serves `ops.decode`. All layers are
    planned when the first one of a step attends."""

    def __init__(self, view: PoolView, batches: Sequence[LayerBatch]) -> None:
        self.view, self.batches = view, batches
        self.plans: dict[int, Any] = {}

    def __call__(self, layer: LayerAttention, part: AttentionMetadata, q: Tensor) -> Weighed:
        """q [B, Hq, 1, r]."""
        if not self.plans:
            for x in self.batches:
                counts, queries = x.lengths(self.view, part), layer.geometry.queries_per_kv
                plans = decode.plan_layers(x.groups, counts, queries, part.rows)
                self.plans.update(zip(x.layers, plans, strict=True))
        pages, plan = self.view.pages[layer.index], self.plans[layer.index]
        out, lse = decode.decode(q[:, :, 0].contiguous(), pages, part.slots, layer.scale, plan)
        return out[:, :, None], lse[..., None]


class CoarseDecode(AttentionBackend):
    """Serves decoding sequences with demoted entries, for keys in the space of scores. A step has
    one decoding part. fine, coarse: make the decode attention over one pool's entries."""

    def __init__(
        self, view: CacheView, fine: Callable[[], Decode], coarse: Callable[[], Decode]
    ) -> None:
        super().__init__(view)
        self.fine, self.coarse = fine(), coarse()

    @classmethod
    def unsupported_reason(
        cls, layer: LayerShape, groups: Sequence[Group], task: Task
    ) -> str | None:
        return None

    @classmethod
    def prepare(
        cls, view: CacheView, layers: Sequence[LayerAttention], observer: Observer | None
    ) -> Callable[[CacheView], AttentionBackend]:
        assert isinstance(view, PoolView) and view.coarse is not None, "there is no coarse pool"
        fine, coarse = (
            partial(PlannedDecode, x, plan_batches(x, layers)) for x in (view, view.coarse)
        )
        return partial(cls, fine=fine, coarse=coarse)

    def attend(
        self, layer: LayerAttention, part: AttentionMetadata, q: Tensor, into: Tensor | None = None
    ) -> Tensor:
        """q [B, Hq, 1, r] -> [B, 1, W]."""
        assert part.decode and part.coarse is not None, "no sequence has demoted entries"
        coarse = self.coarse(layer, part.coarse, q)
        out, _ = layer.with_sinks(*merged(*self.fine(layer, part, q), *coarse))
        return layer.merge_heads(out.to(q.dtype), into=into)


class NumbaCoarseDecode(CoarseDecode):
    """CoarseDecode by Numba kernels."""

    @classmethod
    def unsupported_reason(
        cls, layer: LayerShape, groups: Sequence[Group], task: Task
    ) -> str | None:
        return NumbaDecode.unsupported_reason(layer, groups, task)

    @classmethod
    def prepare(
        cls, view: CacheView, layers: Sequence[LayerAttention], observer: Observer | None
    ) -> Callable[[CacheView], AttentionBackend]:
        assert isinstance(view, PoolView) and view.coarse is not None, "there is no coarse pool"
        fine, coarse = (NumbaDecodeOf(x, layers) for x in (view, view.coarse))
        return partial(cls, fine=lambda: fine, coarse=lambda: coarse)


class NumbaDecodeOf:
    """Decode attention over the entries of one pool by Numba kernels."""

    def __init__(self, view: PoolView, layers: Sequence[LayerAttention]) -> None:
        self.view, groups_of = view, view.layout.groups_of_layer
        self.plans = {
            x.index: plan_parts(x.spec, groups_of(x.index), x.geometry.queries_per_kv, view.dtype)
            for x in layers
        }

    def __call__(self, layer: LayerAttention, part: AttentionMetadata, q: Tensor) -> Weighed:
        """q [B, Hq, 1, r]."""
        from kvfold.ops.decode import numba

        inputs = self.view.pages[layer.index], part.slots, layer.scale, self.plans[layer.index]
        out, lse = numba.decode(q[:, :, 0].detach(), *inputs, None)
        return out[:, :, None], lse[..., None]
