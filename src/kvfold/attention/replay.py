"""Attention of tokens that are read again and not kept, and what it says of the rows in pages.

Shapes: one sequence; n replayed tokens, S rows in pages (of the longest group), T = S + n, G groups
of a layer, R numbers of a row, Hk KV heads.
"""

import torch
from torch import Tensor

from kvfold.attention.base import AttentionContext, LayerMaps
from kvfold.attention.metadata import PoolView
from kvfold.attention.rows import gather_rows, member_of, rope_of
from kvfold.cache.eviction.replay import LEAST, ReplayPolicy, reconstruction
from kvfold.ops.store import StoredRows, add_metrics


class ReplayContext(AttentionContext):
    """Replayed tokens see all of a sequence's pages and each other, and are stored nowhere; rows of
    the tokens `piece` get metrics.

    slot: of the sequence, which computed `start` tokens; num_tokens: n; policy: whose first tokens
    (`sinks`) every score's softmax covers.
    """

    norms: Tensor | None = None  # of hidden states fp32 [1, n], where attention is weighed by them

    def __init__(
        self,
        view: PoolView,
        slot: int,
        start: int,
        num_tokens: int,
        piece: range,
        policy: ReplayPolicy,
    ) -> None:
        self.view, self.piece, self.policy = view, piece, policy
        self.slot = torch.tensor([slot], device=view.pool.device)
        self.size = int(view.pool.host_lengths[slot].max())
        self.start, self.stop = start, start + num_tokens
        self.positions = torch.arange(start, self.stop, device=view.pool.device)

    def enter(self, layer: LayerMaps, x: Tensor) -> None:
        if self.policy.by_output:
            self.norms = torch.linalg.vector_norm(x.float(), dim=-1)

    def attend(self, layer: LayerMaps, q: Tensor, rows: Tensor) -> Tensor:
        """q [1, Hq, n, .] and rows [1, n, R]: what W_O takes [1, n, W]."""
        pages = self.view.pages[layer.index]
        stored = gather_rows(self.view, layer, self.slot, self.size)
        whole = self._with(stored, rows)
        rope = rope_of(layer, whole, pages.groups, self.stop)
        member = member_of(pages.groups, q.device)
        positions = whole.positions[:, member, None]  # [1, 1 or Hk, 1, T]
        seen = whole.valid[:, member, None] & (positions <= self.positions[:, None])
        scored = seen & (self._counted(positions) | (positions < self.policy.sinks))
        scored |= seen & (positions >= self.start)
        of_rows, of_queries = None, None
        if self.norms is not None:
            of_rows, of_queries = layer.output_norms(whole.rows), 1 / self.norms.clamp(min=LEAST)
        k = layer.score_keys(whole.rows, rope)
        worth = reconstruction(q, k, scored, layer.scale, of_rows, of_queries)
        groups = [worth[:, list(x.heads), : self.size].amax(1) for x in pages.groups]
        counted = stored.valid & self._counted(stored.positions)
        add_metrics(pages, self.slot, torch.stack(groups, 1).clamp(min=LEAST), counted)
        if seen.shape[1] > 1:  # a KV head; now a query head
            seen = seen.repeat_interleave(layer.geometry.queries_per_kv, dim=1)
        return layer.attend(q, whole.rows, rope, seen)[0]

    def _with(self, stored: StoredRows, rows: Tensor) -> StoredRows:
        """The stored rows, and the replayed tokens' behind them."""
        own = self.positions.int().expand(*stored.positions.shape[:2], -1)
        return StoredRows(
            rows=torch.cat((stored.rows, rows), 1),
            valid=torch.cat((stored.valid, torch.ones_like(own, dtype=torch.bool)), 2),
            positions=torch.cat((stored.positions, own), 2),
        )

    def _counted(self, positions: Tensor) -> Tensor:
        """Whether rows at these positions are those of the tokens that are replayed."""
        return (positions >= self.piece.start) & (positions < self.piece.stop)
