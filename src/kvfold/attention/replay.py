"""Attention of tokens that are read again and not kept, and what it says of the rows in pages.

Shapes: one sequence; n replayed tokens, S rows in pages (of the longest group), T = S + n, G groups
of a layer, R numbers of a row, Hk KV heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvfold.attention.backend import Task
from kvfold.attention.base import AttentionContext, LayerMaps
from kvfold.attention.metadata import PoolView
from kvfold.attention.rows import member_of, rope_of
from kvfold.attention.selector import select
from kvfold.attention.triton_prefill import TritonPrefill, views_of
from kvfold.cache.eviction.replay import LEAST, ReplayPolicy, reconstruction
from kvfold.ops.common.attention import Tables
from kvfold.ops.common.pages import owner_of
from kvfold.ops.prefill import Seen, peaks, prefill_among
from kvfold.ops.prefill.plan import NEVER
from kvfold.ops.store import StoredRows, add_metrics, gather
from kvfold.spec.layout import Group


class ReplayContext(AttentionContext):
    """Replayed tokens see a sequence's rows and each other, and are stored nowhere; rows of the
    tokens `piece` get metrics.

    slot: of the sequence, which computed so many tokens; num_tokens: n; policy: whose first tokens
    (`sinks`) every score's softmax covers. Without its `whole` they stand behind the piece, as if
    nothing followed; gradients: of every layer, fp32 [1, n], where attention is weighed by them.
    """

    asks: Tensor | None = None  # fp32 [1, n], what tokens that ask multiply their attention with

    def __init__(
        self,
        view: PoolView,
        slot: int,
        computed: int,
        num_tokens: int,
        piece: range,
        policy: ReplayPolicy,
        gradients: Sequence[Tensor] | None = None,
    ) -> None:
        self.view, self.piece, self.policy, self.gradients = view, piece, policy, gradients
        self.slot = torch.tensor([slot], device=view.pool.device)
        self.start = computed if policy.whole else piece.stop
        self.stop = self.start + num_tokens
        self.positions = torch.arange(self.start, self.stop, device=view.pool.device)
        lengths = view.pool.host_lengths[slot]
        # Rows leave their order where others go, never before: none is read that is not seen.
        in_order = bool((lengths == computed).all())
        self.size = self.start if in_order else int(lengths.max())

    def enter(self, layer: LayerMaps, x: Tensor) -> None:
        if self.gradients is not None:
            self.asks = self.gradients[layer.index]
        elif self.policy.by_output:
            self.asks = 1 / torch.linalg.vector_norm(x.float(), dim=-1).clamp(min=LEAST)

    def attend(self, layer: LayerMaps, q: Tensor, rows: Tensor) -> Tensor:
        """q [1, Hq, n, .] and rows [1, n, R]: what W_O takes [1, n, W]."""
        pages = self.view.pages[layer.index]
        reading = self._reading(layer, q, rows)
        out, worth = (_by_kernels if _served(reading) else _in_pytorch)(reading)
        most = worth[:, _heads_of(pages.groups, worth.device), : self.size].amax(2)
        counted = reading.counted[..., : self.size]
        add_metrics(pages, self.slot, most.clamp(min=LEAST), counted)
        return out

    def _reading(self, layer: LayerMaps, q: Tensor, rows: Tensor) -> "_Reading":
        pages, size = self.view.pages[layer.index], self.size
        lengths, groups = pages.lengths[self.slot].clamp(max=size), pages.groups
        whole = self._with(gather(pages, self.slot, lengths, self.view.dtype, size), rows)
        counted = whole.valid & self._counted(whole.positions)
        first = whole.valid & (whole.positions < self.policy.sinks)
        return _Reading(
            layer=layer,
            groups=groups,
            q=q,
            positions=self.positions,
            stored=whole,
            rope=rope_of(layer, whole, groups, self.stop),
            counted=counted,
            among=counted | first | (whole.valid & (whole.positions >= self.start)),
            of_rows=None if self.asks is None else layer.output_norms(whole.rows),
            of_queries=self.asks,
        )

    def _with(self, stored: StoredRows, rows: Tensor) -> StoredRows:
        """The stored rows that are seen, and the replayed tokens' behind them."""
        valid = stored.valid & (stored.positions < self.start)
        own = self.positions.int().expand(*stored.positions.shape[:2], -1)
        return StoredRows(
            rows=torch.cat((stored.rows, rows), 1),
            valid=torch.cat((valid, torch.ones_like(own, dtype=torch.bool)), 2),
            positions=torch.cat((stored.positions, own), 2),
        )

    def _counted(self, positions: Tensor) -> Tensor:
        """Whether rows at these positions are those of the tokens that are replayed."""
        return (positions >= self.piece.start) & (positions < self.piece.stop)


class ReplayWithGradients(ReplayContext):
    """The same attention by differentiable operations, of which no row gets a metric."""

    def enter(self, layer: LayerMaps, x: Tensor) -> None:
        pass

    def attend(self, layer: LayerMaps, q: Tensor, rows: Tensor) -> Tensor:
        reading = self._reading(layer, q, rows)
        return _attend(reading, _seen(reading))


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """Queries q [1, Hq, n, .] at positions int64 [n] of a layer, and the rows that they read.

    stored: T rows; counted bool [1, G, T]: those that get a metric; among: those that a score's
    softmax covers; of_rows fp32 [1, Hq, T], of_queries fp32 [1, n]: what multiplies weights first.
    """

    layer: LayerMaps
    groups: tuple[Group, ...]
    q: Tensor
    positions: Tensor
    stored: StoredRows
    rope: Tables | None
    counted: Tensor
    among: Tensor
    of_rows: Tensor | None
    of_queries: Tensor | None


@lru_cache
def _heads_of(groups: tuple[Group, ...], device: torch.device) -> Tensor:
    """Heads of every group [G, n], the first again where others have more. A tensor of the device,
    since indexing by numbers of the host waits for it."""
    most = max(len(x.heads) for x in groups)
    heads = [[*x.heads, *[x.heads[0]] * (most - len(x.heads))] for x in groups]
    return torch.tensor(heads, device=device)


def _served(x: _Reading) -> bool:
    """Whether kernels take these queries."""
    task = Task(decode=False, observed=False, device_type=x.q.device.type, dtype=x.q.dtype)
    chosen = select(x.layer, x.groups, task).backend
    return chosen is TritonPrefill and x.layer.softcap is None


def _by_kernels(x: _Reading) -> tuple[Tensor, Tensor]:
    """What W_O takes [1, n, W], and what rows are worth, fp32 [1, Hk, T]. No score is stored."""
    rows = x.stored
    keys, values, first = views_of(x.layer, x.q, rows.rows, x.rope)
    size, device = rows.positions.shape[-1], x.q.device
    seen = Seen(
        counts=torch.full((1, len(x.groups)), size, device=device),
        owner=owner_of(x.groups),
        positions=rows.positions.masked_fill(~rows.valid, NEVER),
        queries=x.positions[None],
    )
    out, whole, lse = prefill_among(x.q, keys, values, seen, x.layer.scale, x.among)
    out, _ = x.layer.beside_sinks(out, whole)
    bias = -lse if x.of_queries is None else x.of_queries.log2()[:, None] - lse
    worth = peaks(x.q, keys, bias, x.counted, seen.owner, x.layer.scale, x.of_rows)
    return x.layer.joined(out, mapped=first), worth


def _in_pytorch(x: _Reading) -> tuple[Tensor, Tensor]:
    """The same, with weights written out a KV head at a time."""
    layer, rows, seen = x.layer, x.stored, _seen(x)
    scored = seen & x.among[:, member_of(x.groups, x.q.device), None]
    k, weighed = layer.score_keys(rows.rows, x.rope), (x.of_rows, x.of_queries)
    worth = reconstruction(x.q, k, scored, layer.scale, *weighed, layer.softcap)
    return _attend(x, seen), worth


def _seen(x: _Reading) -> Tensor:
    """Rows that queries see, bool [1, 1 or Hk, n, T]."""
    rows, member = x.stored, member_of(x.groups, x.q.device)
    before = rows.positions[:, member, None] <= x.positions[:, None]
    return rows.valid[:, member, None] & before


def _attend(x: _Reading, seen: Tensor) -> Tensor:
    """What W_O takes [1, n, W]."""
    if seen.shape[1] > 1:  # a KV head; now a query head
        seen = seen.repeat_interleave(x.layer.geometry.queries_per_kv, dim=1)
    return x.layer.attend(x.q, x.stored.rows, x.rope, seen)[0]
