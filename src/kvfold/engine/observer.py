"""What decoding sequences attend to, added to the metrics of their rows every few steps.

A decode kernel gives no attention weights, so the last queries and their log-sum-exps are kept, and
pages are read once for WINDOW of them. Rows stored after a query have larger positions than it, so
that a late reading sees what the query saw, as long as no row was moved or dropped in between.
Shapes: B sequences, Hq query heads, S slots, W = WINDOW; dk widest key rank of a layer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvfold.cache.slabs import upload
from kvfold.engine.backends import AttentionContext, AttentionMetadata
from kvfold.engine.request import Request, ScheduledChunk
from kvfold.models.adapter import HFAttention
from kvfold.ops.observe import observe

WINDOW = 8  # queries of a sequence that are kept: reading keys then costs a decode step 6 %


@dataclass
class _Pending:
    """Queries at `positions` of a sequence are kept and not yet added."""

    sequence: Request
    positions: range


class Observer:
    """Queries of `modules`, by layer, that are kept until `flush`.

    The query at position p lies in row slot * W + p % W of the buffers, which a step finds without
    the host; which rows count is known on the host alone, by `begin` and `end` around every step.
    """

    def __init__(self, setup: AttentionContext, modules: Mapping[int, HFAttention]) -> None:
        self.setup, self.modules = setup, modules
        self.pending: dict[int, _Pending] = {}  # by slot
        device, rows = setup.pool.device, setup.pool.num_slots * WINDOW
        self.queries: dict[int, Tensor] = {}
        self.lse: dict[int, Tensor] = {}
        for layer, module in modules.items():
            like, heads = module.o_proj.weight, module.geometry.num_query_heads
            self.queries[layer] = like.new_zeros(rows, heads, module.key_columns.widest)
            self.lse[layer] = torch.zeros(rows, heads, device=device)

    def rows_of(self, part: AttentionMetadata) -> Tensor:
        """Where the queries of a decoding part go, int64 [B]."""
        return part.slots * WINDOW + part.positions[:, 0] % WINDOW

    def keep(self, layer: int, rows: Tensor, q: Tensor, lse: Tensor) -> None:
        """Keep q [B, Hq, dk] and log2-sum-exp2s fp32 [B, Hq] of a decode step in a layer."""
        self.queries[layer].index_copy_(0, rows, q)
        self.lse[layer].index_copy_(0, rows, lse)

    def begin(self, pieces: Iterable[ScheduledChunk]) -> None:
        """Before a step: forget what belongs to others who had the slots, and add what is kept of
        sequences that do not simply go on. The step's rows may have pages, but nothing in them:
        what is added to them is overwritten."""
        late = False
        for piece in pieces:
            slot = piece.sequence.open_slot
            if (kept := self.pending.get(slot)) is None:
                continue
            if kept.sequence is not piece.sequence or piece.start == 0:
                del self.pending[slot]
            elif piece.start != kept.positions.stop:
                late = True
        if late:
            self.flush()

    def end(self, decodes: Iterable[ScheduledChunk]) -> None:
        """After a step: its decoding sequences have one more query each."""
        full = False
        for piece in decodes:
            slot, start = piece.sequence.open_slot, piece.start
            kept = self.pending.get(slot)
            first = start if kept is None else kept.positions.start
            self.pending[slot] = _Pending(piece.sequence, range(first, start + 1))
            full |= start + 1 - first == WINDOW
        if full:
            self.flush()

    def flush(self) -> None:
        """Add all that is kept to the metrics; a sequence that gave its slot back has no rows."""
        kept = [(slot, x) for slot, x in self.pending.items() if x.sequence.slot == slot]
        self.pending = {}
        policy = self.setup.policy
        if not kept or policy is None:
            return
        slots = upload(np.array([slot for slot, _ in kept]), self.setup.pool.device)
        positions = self._positions([x.positions for _, x in kept])
        for layer, module in self.modules.items():
            q, lse = (
                x[layer].unflatten(0, (-1, WINDOW))[slots].transpose(1, 2).contiguous()
                for x in (self.queries, self.lse)
            )
            observe(
                q,
                lse,
                positions,
                self.setup.pages[layer],
                slots,
                module.scaling,
                power=policy.power,
                exclude=policy.exclude,
            )

    def _positions(self, kept: list[range]) -> Tensor:
        """Of the buffers' rows of sequences, int32 [B, W]; -1 where none is kept."""
        start = np.array([x.start for x in kept])[:, None]
        stop = np.array([x.stop for x in kept])[:, None]
        found = start + (np.arange(WINDOW) - start) % WINDOW
        found = np.where(found < stop, found, -1).astype(np.int32)
        return upload(found, self.setup.pool.device)
