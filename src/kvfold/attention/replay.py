"""Attention of a re-scoring pass: its tokens are not stored, and their attention gives scores to
the stored token entries.

Shapes: one sequence; n tokens of the pass, S token entries in pages (of the longest group),
T = S + n, G groups of a layer, R numbers of an entry, Hk KV heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvfold.attention.backend import Task
from kvfold.attention.base import AttentionContext, LayerAttention
from kvfold.attention.metadata import PoolView
from kvfold.attention.rows import group_of_head, rope_of
from kvfold.attention.selector import select
from kvfold.attention.triton_prefill import TritonPrefill, views_of
from kvfold.cache.eviction.scorers.rescoring import LEAST, Rescoring, max_attention
from kvfold.layout.pages import Group
from kvfold.ops.common.attention import Tables
from kvfold.ops.common.pages import owner_of
from kvfold.ops.prefill import Seen, peaks, prefill_among
from kvfold.ops.prefill.plan import NEVER
from kvfold.ops.store import StoredRows, add_metrics, gather


class RescoringContext(AttentionContext):
    """Attention context of a re-scoring pass. Its tokens see the stored entries of a sequence and
    each other, and are not stored; the entries of the tokens `piece` (a segment of the context)
    get metrics.

    slot: of the sequence.
    computed: tokens of the sequence that are stored.
    num_tokens: n.
    scorer: if `sees_suffix` is False, the tokens of the pass take the positions after the segment,
        as if nothing followed it.
    sinks: how many of the first tokens are in the softmax of each score.
    gradients: fp32 [1, n] per layer, if attention is weighted by them.
    """

    query_factors: Tensor | None = None  # fp32 [1, n], factor of the attention of each query

    def __init__(
        self,
        view: PoolView,
        slot: int,
        computed: int,
        num_tokens: int,
        piece: range,
        scorer: Rescoring,
        sinks: int,
        gradients: Sequence[Tensor] | None = None,
    ) -> None:
        self.view, self.piece, self.gradients = view, piece, gradients
        self.scorer, self.sinks = scorer, sinks
        self.slot = torch.tensor([slot], device=view.pool.device)
        self.start = computed if scorer.sees_suffix else piece.stop
        self.stop = self.start + num_tokens
        self.positions = torch.arange(self.start, self.stop, device=view.pool.device)
        lengths = view.pool.host_lengths[slot]
        # Without eviction entries are in order, so only the first `start` need to be read.
        in_order = bool((lengths == computed).all())
        self.size = self.start if in_order else int(lengths.max())

    def before_attention(self, layer: LayerAttention, x: Tensor) -> None:
        if self.gradients is not None:
            self.query_factors = self.gradients[layer.index]
        elif self.scorer.output_weighted:
            self.query_factors = 1 / torch.linalg.vector_norm(x.float(), dim=-1).clamp(min=LEAST)

    def attend(self, layer: LayerAttention, q: Tensor, entries: Tensor) -> Tensor:
        """Attend with q [1, Hq, n, .]; entries [1, n, R] of the pass are not stored. Returns the
        input of W_O [1, n, W]."""
        pages = self.view.pages[layer.index]
        inputs = self._inputs(layer, q, entries)
        out, worth = (_by_kernels if _served(inputs) else _in_pytorch)(inputs)
        scores = worth[:, _heads_of(pages.groups, worth.device), : self.size].amax(2)
        counted = inputs.counted[..., : self.size]
        add_metrics(pages, self.slot, scores.clamp(min=LEAST), counted)
        return out

    def _inputs(self, layer: LayerAttention, q: Tensor, entries: Tensor) -> "_Inputs":
        pages, size = self.view.pages[layer.index], self.size
        lengths, groups = pages.lengths[self.slot].clamp(max=size), pages.groups
        all_entries = self._with_replayed(
            gather(pages, self.slot, lengths, self.view.dtype, size), entries
        )
        counted = all_entries.valid & self._in_segment(all_entries.positions)
        is_sink = all_entries.valid & (all_entries.positions < self.sinks)
        return _Inputs(
            layer=layer,
            groups=groups,
            q=q,
            positions=self.positions,
            stored=all_entries,
            rope=rope_of(layer, all_entries, groups, self.stop),
            counted=counted,
            among=counted | is_sink | (all_entries.valid & (all_entries.positions >= self.start)),
            of_entries=None if self.query_factors is None else layer.output_norms(all_entries.rows),
            of_queries=self.query_factors,
        )

    def _with_replayed(self, stored: StoredRows, entries: Tensor) -> StoredRows:
        """The visible stored entries, followed by those of the pass."""
        valid = stored.valid & (stored.positions < self.start)
        positions = self.positions.int().expand(*stored.positions.shape[:2], -1)
        return StoredRows(
            rows=torch.cat((stored.rows, entries), 1),
            valid=torch.cat((valid, torch.ones_like(positions, dtype=torch.bool)), 2),
            positions=torch.cat((stored.positions, positions), 2),
        )

    def _in_segment(self, positions: Tensor) -> Tensor:
        """Whether entries at these positions belong to the segment that is re-scored."""
        return (positions >= self.piece.start) & (positions < self.piece.stop)


class ReplayWithGradients(RescoringContext):
    """The same attention with differentiable operations. It updates no metrics."""

    def before_attention(self, layer: LayerAttention, x: Tensor) -> None:
        pass

    def attend(self, layer: LayerAttention, q: Tensor, entries: Tensor) -> Tensor:
        inputs = self._inputs(layer, q, entries)
        return _attend(inputs, _visible(inputs))


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """The queries of one layer in a re-scoring pass, and the token entries that they attend to.

    q: [1, Hq, n, .], at positions int64 [n].
    stored: T entries, those of the pass last.
    counted: bool [1, G, T], entries that get a metric.
    among: bool [1, G, T], entries in the softmax of a score.
    of_entries fp32 [1, Hq, T], of_queries fp32 [1, n]: factors of attention weights.
    """

    layer: LayerAttention
    groups: tuple[Group, ...]
    q: Tensor
    positions: Tensor
    stored: StoredRows
    rope: Tables | None
    counted: Tensor
    among: Tensor
    of_entries: Tensor | None
    of_queries: Tensor | None


@lru_cache
def _heads_of(groups: tuple[Group, ...], device: torch.device) -> Tensor:
    """KV heads of each group [G, n], padded with the group's first head. A device tensor, because
    indexing with host numbers waits."""
    widest = max(len(x.heads) for x in groups)
    heads = [[*x.heads, *[x.heads[0]] * (widest - len(x.heads))] for x in groups]
    return torch.tensor(heads, device=device)


def _served(x: _Inputs) -> bool:
    """Whether kernels serve these queries."""
    task = Task(decode=False, observed=False, device_type=x.q.device.type, dtype=x.q.dtype)
    backend = select(x.layer, x.groups, task).backend
    return backend is TritonPrefill and x.layer.softcap is None


def _by_kernels(x: _Inputs) -> tuple[Tensor, Tensor]:
    """The input of W_O [1, n, W], and scores of the entries fp32 [1, Hk, T]. Stores no
    score matrix."""
    stored = x.stored
    keys, values, first = views_of(x.layer, x.q, stored.rows, x.rope)
    size, device = stored.positions.shape[-1], x.q.device
    visible = Seen(
        counts=torch.full((1, len(x.groups)), size, device=device),
        owner=owner_of(x.groups),
        positions=stored.positions.masked_fill(~stored.valid, NEVER),
        queries=x.positions[None],
    )
    out, full_lse, lse = prefill_among(x.q, keys, values, visible, x.layer.scale, x.among)
    out, _ = x.layer.with_sinks(out, full_lse)
    bias = -lse if x.of_queries is None else x.of_queries.log2()[:, None] - lse
    worth = peaks(x.q, keys, bias, x.counted, visible.owner, x.layer.scale, x.of_entries)
    return x.layer.merge_heads(out, mapped=first), worth


def _in_pytorch(x: _Inputs) -> tuple[Tensor, Tensor]:
    """The same in PyTorch, with explicit weights for one KV head at a time."""
    layer, stored, visible = x.layer, x.stored, _visible(x)
    scored = visible & x.among[:, group_of_head(x.groups, x.q.device), None]
    k, factors = layer.score_keys(stored.rows, x.rope), (x.of_entries, x.of_queries)
    worth = max_attention(x.q, k, scored, layer.scale, *factors, layer.softcap)
    return _attend(x, visible), worth


def _visible(x: _Inputs) -> Tensor:
    """Which entries queries see, bool [1, 1 or Hk, n, T]."""
    stored, member = x.stored, group_of_head(x.groups, x.q.device)
    before = stored.positions[:, member, None] <= x.positions[:, None]
    return stored.valid[:, member, None] & before


def _attend(x: _Inputs, visible: Tensor) -> Tensor:
    """Attention output as the input of W_O [1, n, W]."""
    if visible.shape[1] > 1:  # one mask per KV head; repeat it for each query head
        visible = visible.repeat_interleave(x.layer.geometry.queries_per_kv, dim=1)
    return x.layer.attend(x.q, x.stored.rows, x.rope, visible)[0]
