"""Prefill attention by the kernel of `ops.prefill` over gathered rows, with metrics of observed
queries.

Shapes: B sequences of one attention call (a part of the step), T queries per sequence, S stored
rows (of the longest group), R numbers of a row, Hk KV heads, d head dim, W input width of W_O.
"""

from collections.abc import Sequence

from torch import Tensor

from kvfold.attention.backend import AttentionBackend, Task
from kvfold.attention.base import Columns, LayerAttention, LayerShape
from kvfold.attention.metadata import AttentionMetadata
from kvfold.attention.rows import rope_of
from kvfold.cache.eviction.scorers.attention import observed
from kvfold.layout.pages import Group
from kvfold.ops import observe
from kvfold.ops.common.attention import Tables
from kvfold.ops.common.pages import owner_of
from kvfold.ops.prefill import PREFILL, KVView, Seen, prefill, why_not
from kvfold.ops.store import gather


class TritonPrefill(AttentionBackend):
    """Serves chunks of 16-bit queries over any rows. Not used for decoding, where a tile would hold
    one query."""

    @classmethod
    def unsupported_reason(
        cls, layer: LayerShape, groups: Sequence[Group], task: Task
    ) -> str | None:
        if task.observed and layer.softcap is not None:
            return "no kernel observes capped scores"
        if task.observed and layer.reconstructs_keys:
            return "no kernel observes keys that are rebuilt"
        dtypes = frozenset((task.dtype,))
        widths = (layer.key_width,), (layer.value_width,)
        return PREFILL.why_not(task.device_type, dtypes, *widths) or (
            observe.why_not(groups, task.device_type) if task.observed else None
        )

    @classmethod
    def replays(cls, layer: LayerAttention) -> bool:
        return layer.value_columns.uniform and not layer.reconstructs_keys

    def attend(
        self, layer: LayerAttention, part: AttentionMetadata, q: Tensor, into: Tensor | None = None
    ) -> Tensor:
        pages, size = self.view.pages[layer.index], part.size(layer.index)
        groups = pages.groups
        counts = pages.lengths[part.slots]
        stored = gather(pages, part.slots, counts, self.view.dtype, size)
        rope = rope_of(layer, stored, groups, part.stop)
        keys, values, first = views_of(layer, q, stored.rows, rope)
        visible = Seen(
            counts=counts,
            owner=owner_of(groups),
            positions=stored.positions if groups[0].layout.tracked else None,
            queries=part.positions,
            window=layer.window,
        )
        out = self._attention(layer, part, q, keys, values, visible)
        return layer.merge_heads(out, first, into)

    def _attention(
        self, layer: LayerAttention, part: AttentionMetadata, q: Tensor, keys: KVView,
        values: KVView, visible: Seen,
    ) -> Tensor:  # fmt: skip
        """The attention output [B, Hq, T, dv] of queries q [B, Hq, T, dk]. Counts it if the policy
        observes it."""
        attended = prefill(q, keys, values, visible, layer.scale, layer.softcap)
        out, lse = layer.with_sinks(*attended)
        self._observe(layer, part, q, lse)
        return out

    def _observe(
        self, layer: LayerAttention, part: AttentionMetadata, q: Tensor, lse: Tensor
    ) -> None:
        """Add the attention of q [B, Hq, T, .] to the metrics. lse fp32 [B, Hq, T]."""
        observation = self.view.observing
        if observation is None or part.prompt_lengths is None:
            return
        counted = observed(part.positions, part.prompt_lengths, observation)
        positions = part.positions.masked_fill(~counted, -1)
        inputs = self.view.pages[layer.index], part.slots, layer.scale
        scorer = observation.scorer
        observe.observe(q, lse, positions, *inputs, power=scorer.power, exclude=scorer.exclude)


def views_of(
    layer: LayerAttention, q: Tensor, rows: Tensor, rope: Tables | None
) -> tuple[KVView, KVView, bool]:
    """Keys and values of rows [B, S, R] for queries q [B, Hq, T, .], and whether values are
    projected up first: if that is cheaper, or if latents are too wide for the kernel."""
    first = layer.projects_values_first(q.shape[2], rows.shape[1])
    keys, values = _keys(layer, rows, rope), _values(layer, rows, first)
    if layer.value_up is not None and not first and why_not(q, keys, values):
        return keys, _values(layer, rows, True), True
    return keys, values, first


def _keys(layer: LayerAttention, rows: Tensor, rope: Tables | None) -> KVView:
    """Keys as stored in rows [B, S, R], or reconstructed."""
    if not layer.reconstructs_keys:
        return _columns(layer.key_columns, rows)
    return _heads(layer.score_keys(rows, rope).transpose(1, 2))


def _values(layer: LayerAttention, rows: Tensor, mapped: bool) -> KVView:
    """Values as stored in rows [B, S, R], or projected up."""
    return _heads(layer.full_values(rows)) if mapped else _columns(layer.value_columns, rows)


def _columns(columns: Columns, rows: Tensor) -> KVView:
    return KVView(rows, *columns.head_columns)


def _heads(x: Tensor) -> KVView:
    """View x [B, S, Hk, d], whose last dimension has stride 1, by heads."""
    assert x.stride(-1) == 1, "a row's numbers follow one another"
    heads = range(x.shape[2])
    return KVView(x, tuple(h * x.stride(2) for h in heads), (x.shape[3],) * len(heads))
