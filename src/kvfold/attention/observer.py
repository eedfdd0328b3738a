"""Attention of decoding sequences, added to the metrics of their rows every few steps.

A decode kernel gives no attention weights, so the last queries and their log-sum-exps are kept, and
pages are read once for WINDOW of them. Rows stored after a query have larger positions than it, so
that a late reading sees what the query saw, as long as no row was moved or dropped in between.
Shapes: B sequences, Hq query heads, S slots, W = WINDOW; dk widest key rank of a layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvfold.attention.base import LayerMaps
from kvfold.attention.metadata import AttentionMetadata, PoolView
from kvfold.attention.queries import QueryRing
from kvfold.cache.eviction.attention import AttentionPolicy
from kvfold.ops.common.launch import upload
from kvfold.ops.observe import observe

WINDOW = 8  # queries of a sequence that are kept: reading keys then costs a decode step 6 %


class Turn(NamedTuple):
    """A sequence's part of a step: its slot, whose that is, its first token's position, and whether
    its queries count."""

    slot: int
    owner: object
    start: int
    counts: bool = True


@dataclass
class _Pending:
    """Queries of `owner` at `positions` are kept and not yet added."""

    owner: object
    positions: range


class Observer(QueryRing):
    """Queries of layers, that are kept until `flush`, and what to add them by.

    Which rows of the ring count is known on the host alone, by `around` every step.
    """

    def __init__(
        self, view: PoolView, policy: AttentionPolicy, layers: Mapping[int, LayerMaps]
    ) -> None:
        super().__init__(WINDOW, view, layers)
        self.view, self.policy = view, policy
        self.pending: dict[int, _Pending] = {}  # by slot
        self.lse = {
            layer: torch.zeros(q.shape[:2], device=self.device) for layer, q in self.queries.items()
        }

    def rows_of(self, part: AttentionMetadata) -> Tensor:
        """Where the queries of a decoding part go, int64 [B]."""
        return self._rows(part.slots, part.positions[:, 0])

    def keep(self, layer: int, rows: Tensor, q: Tensor, lse: Tensor) -> None:
        """Keep q [B, Hq, dk] and log2-sum-exp2s fp32 [B, Hq] of a decode step in a layer."""
        self.queries[layer].index_copy_(0, rows, q)
        self.lse[layer].index_copy_(0, rows, lse)

    @contextmanager
    def around(self, turns: Sequence[Turn], num_decode: int) -> Iterator[None]:
        """A step, of which the first `num_decode` turns are a decoding sequence's one token."""
        self._begin(turns)
        yield
        self._end(turns[:num_decode])

    def _begin(self, turns: Sequence[Turn]) -> None:
        """Forget what belongs to others who had the slots, and add what is kept of sequences that
        do not simply go on. The step's rows may have pages, but nothing in them: what is added to
        them is overwritten."""
        late = False
        for slot, owner, start, _ in turns:
            if (kept := self.pending.get(slot)) is None:
                continue
            if kept.owner is not owner or start == 0:
                del self.pending[slot]
            elif start != kept.positions.stop:
                late = True
        if late:
            self.flush()

    def _end(self, decodes: Sequence[Turn]) -> None:
        """Decoding sequences have one more query each."""
        full = False
        for slot, owner, start, counts in decodes:
            if not counts:
                continue
            kept = self.pending.get(slot)
            first = start if kept is None else kept.positions.start
            self.pending[slot] = _Pending(owner, range(first, start + 1))
            full |= start + 1 - first == self.width
        if full:
            self.flush()

    def flush(self) -> None:
        """Add all that is kept to the metrics; a sequence that gave its slot back has no rows."""
        rows = self.view.pool.host_lengths
        kept = [(slot, x.positions) for slot, x in self.pending.items() if rows[slot].any()]
        self.pending = {}
        if not kept:
            return
        slots = upload(np.array([slot for slot, _ in kept]), self.device)
        positions = self._positions([x for _, x in kept])
        for index, layer in self.layers.items():
            q, lse = (
                x[index].unflatten(0, (-1, self.width))[slots].transpose(1, 2).contiguous()
                for x in (self.queries, self.lse)
            )
            place, policy = (self.view.pages[index], slots, layer.scale), self.policy
            observe(q, lse, positions, *place, power=policy.power, exclude=policy.exclude)

    def _positions(self, kept: list[range]) -> Tensor:
        """Of the ring's rows of sequences, int32 [B, W]; -1 where none is kept."""
        start = np.array([x.start for x in kept])[:, None]
        stop = np.array([x.stop for x in kept])[:, None]
        found = start + (np.arange(self.width) - start) % self.width
        found = np.where(found < stop, found, -1).astype(np.int32)
        return upload(found, self.device)
