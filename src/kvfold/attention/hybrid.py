"""Attention over entries of two ranks (ZDC §5.2): full-rank entries of important tokens, and
low-rank entries (`PoolView.coarse`) of unimportant ones, which keep the first numbers of each
latent.

Low-rank entries are scored with the first numbers of the same queries, and both outputs are merged
by their log-sum-exps. Shapes: B sequences of one attention call (a part of the step), T queries per
sequence; Hq query heads, r / s widest key / value rank, G groups of a layer, W input width of W_O.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kvfold.attention.backend import AttentionBackend, Task, Weighed
from kvfold.attention.base import Columns, LayerAttention, LayerShape
from kvfold.attention.coarse import PlannedDecode
from kvfold.attention.metadata import AttentionMetadata, CacheView, PoolView
from kvfold.attention.observer import Observer
from kvfold.attention.triton_decode import LayerBatch, plan_batches
from kvfold.layout import LayerSpec
from kvfold.layout.pages import Group
from kvfold.ops import decode, observe
from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.pages import owner_of
from kvfold.ops.merge import merged
from kvfold.ops.prefill import PREFILL, KVView, Seen, prefill
from kvfold.ops.store import gather, set_metrics


class MixedRankAttention(AttentionBackend):
    """Serves any layer with two ranks, by whatever serves `ops.decode` and `ops.prefill`. The
    metrics of full-rank entries are the importance of their tokens. A step has one decoding
    part."""

    def __init__(
        self, view: CacheView, wide: Sequence[LayerBatch], narrow: Sequence[LayerBatch]
    ) -> None:
        assert isinstance(view, PoolView) and view.coarse is not None, "entries have one rank"
        super().__init__(view)
        self.pool_view, self.narrow_view = view, view.coarse
        self.decodes = {
            True: PlannedDecode(view, wide),
            False: PlannedDecode(view.coarse, narrow),
        }

    @classmethod
    def unsupported_reason(
        cls, layer: LayerShape, groups: Sequence[Group], task: Task
    ) -> str | None:
        return None

    @classmethod
    def prepare(
        cls, view: CacheView, layers: Sequence[LayerAttention], observer: Observer | None
    ) -> Callable[[CacheView], AttentionBackend]:
        assert isinstance(view, PoolView) and view.coarse is not None, "entries have one rank"
        return partial(
            cls, wide=plan_batches(view, layers), narrow=plan_batches(view.coarse, layers)
        )

    def attend(
        self, layer: LayerAttention, part: AttentionMetadata, q: Tensor, into: Tensor | None = None
    ) -> Tensor:
        """q [B, Hq, T, r] -> [B, T, W]."""
        assert part.coarse is not None
        out, lse = self._weigh(True, layer, part, q)
        # A CUDA graph cannot know whether there are low-rank entries: it always attends to them.
        if not part.coarse.lengths.size or part.coarse.size(layer.index):
            narrow_out = self._weigh(False, layer, part.coarse, self._first(layer, q))
            out, lse = merged(out, lse, *narrow_out)
        out, lse = layer.with_sinks(out, lse)
        self._rank(layer, part, q, lse)
        return layer.merge_heads(out)

    def _weigh(
        self, wide: bool, layer: LayerAttention, part: AttentionMetadata, q: Tensor
    ) -> Weighed:
        """Attention to the full-rank (`wide`) or the low-rank entries."""
        if not part.decode:
            return self._prefill(wide, layer, part, q)
        return self.decodes[wide](layer, part, q)

    def _prefill(
        self, wide: bool, layer: LayerAttention, part: AttentionMetadata, q: Tensor
    ) -> Weighed:
        """Attention of a prefill chunk to the full-rank (`wide`) or the low-rank entries."""
        view = self.pool_view if wide else self.narrow_view
        pages, spec = view.pages[layer.index], view.layout.spec.layers[layer.index]
        counts = pages.lengths[part.slots]
        stored = gather(pages, part.slots, counts, view.dtype, part.size(layer.index))
        visible = Seen(
            counts=counts,
            owner=owner_of(pages.groups),
            positions=stored.positions if pages.groups[0].layout.tracked else None,
            queries=part.positions,
        )
        keys, values = (KVView(stored.rows, *columns) for columns in _places(spec))
        return prefill(q, keys, values, visible, layer.scale)

    def _first(self, layer: LayerAttention, q: Tensor) -> Tensor:
        """Queries for low-rank keys: their first numbers, with zeros beyond each head's low
        rank."""
        ranks = _ranks(self.narrow_view.layout.spec.layers[layer.index], q.device)
        q = q[..., : int(ranks.shape[1])]
        query_ranks = ranks.repeat_interleave(layer.geometry.queries_per_kv, 0)
        return q.where(query_ranks[:, None], 0.0)

    def _rank(self, layer: LayerAttention, part: AttentionMetadata, q: Tensor, lse: Tensor) -> None:
        """Update the importance of tokens, in layers by which tokens are ranked: write that of the
        querying tokens, or add to that of the tokens they attend to. lse [B, Hq, T]."""
        hybrid = self.view.layout.spec.hybrid
        assert hybrid is not None
        if hybrid.leaders[layer.index] != layer.index:
            return
        pages, positions = self.view.pages[layer.index], part.positions
        if hybrid.by == "attention":
            is_padding = F.pad(positions.diff(dim=1) == 0, (0, 1))  # padding to the longest chunk
            positions = positions.masked_fill(is_padding, -1)
            observe.observe(q, lse, positions, pages, part.slots, layer.scale, power=1, exclude=0)
            return
        worth = denominators(lse)
        distance = positions[:, -1:] - positions  # the last query's entry is the last
        index = pages.lengths[part.slots][:, None].long() - 1 - distance[..., None]
        slots = part.slots[:, None].expand_as(positions).flatten()
        values = worth.flatten()[:, None].expand(-1, len(pages.groups))
        set_metrics(pages, slots, index.flatten(0, 1), values)


class MixedRankKernels(MixedRankAttention):
    """MixedRankAttention by kernels, for both ranks."""

    supports_graphs: ClassVar[bool] = True

    @classmethod
    def unsupported_reason(
        cls, layer: LayerShape, groups: Sequence[Group], task: Task
    ) -> str | None:
        """As in AttentionBackend. groups: of both ranks."""
        if task.decode:
            kind, ranked = task.device_type, [x for x in groups if x.layout.tracked]
            return decode.why_not(groups, kind) or observe.why_not(ranked, kind)
        widths = (layer.key_width,), (layer.value_width,)
        return PREFILL.why_not(task.device_type, frozenset((task.dtype,)), *widths)


def denominators(lse: Tensor) -> Tensor:
    """log2 of the softmax denominators of tokens, summed over heads: lse [B, Hq, T] -> [B, T] (ZDC
    §5.2)."""
    return (lse / LOG2_E).logsumexp(1) * LOG2_E


@lru_cache(maxsize=4096)
def _places(spec: LayerSpec) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """First column and rank of each KV head's keys, and of its values, in a layer's entry."""
    return [Columns(spec, x).head_columns for x in (spec.key_latents, spec.value_latents)]


@lru_cache(maxsize=4096)
def _ranks(spec: LayerSpec, device: torch.device) -> Tensor:
    """Which numbers of a query are within its KV head's key rank: bool [Hk, widest]."""
    _, ranks = _places(spec)[0]
    number = torch.arange(max(ranks), device=device)
    return number < torch.tensor(ranks, device=device)[:, None]
