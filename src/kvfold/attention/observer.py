"""Add the attention of decode queries to eviction metrics, every few steps.

Decode kernels return no attention weights. So the last queries and their log-sum-exps are buffered,
and the keys are read once for WINDOW queries. Token entries stored after a query have larger
positions, so a later read sees what the query saw, as long as no entry was moved or evicted in
between. Shapes: B sequences of one attention call (a part of the step), Hq query heads, S slots, W
= WINDOW; dk widest key rank of a layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvfold.attention.base import LayerAttention
from kvfold.attention.metadata import AttentionMetadata, PoolView
from kvfold.attention.queries import QueryRing
from kvfold.cache.eviction.scorers.attention import Attention
from kvfold.ops.common.launch import upload
from kvfold.ops.observe import observe

WINDOW = 8  # buffered queries per sequence; reading keys again then costs 6 % of a decode step


class SequenceChunk(NamedTuple):
    """A sequence's tokens in a step: its slot, the sequence that owns the slot, the position of its
    first token, and whether its queries are observed."""

    slot: int
    owner: object
    start: int
    counts: bool = True


@dataclass
class _Pending:
    """Queries of `owner` at `positions` are buffered and not yet added to metrics."""

    owner: object
    positions: range


class Observer(QueryRing):
    """Buffers decode queries of layers until `flush` adds their attention to the metrics.

    Which buffer entries are valid is known on the host alone; `step` must enclose each step.
    """

    def __init__(
        self, view: PoolView, scorer: Attention, layers: Mapping[int, LayerAttention]
    ) -> None:
        super().__init__(WINDOW, view, layers)
        self.view, self.scorer = view, scorer
        self.pending: dict[int, _Pending] = {}  # by slot
        self.lse = {
            layer: torch.zeros(q.shape[:2], device=self.device) for layer, q in self.queries.items()
        }

    def rows_of(self, part: AttentionMetadata) -> Tensor:
        """Buffer indices for the queries of a decoding part, int64 [B]."""
        return self._rows(part.slots, part.positions[:, 0])

    def buffer(self, layer: int, rows: Tensor, q: Tensor, lse: Tensor) -> None:
        """Buffer q [B, Hq, dk] and log2-sum-exp2s fp32 [B, Hq] of a decode step in a layer."""
        self.queries[layer].index_copy_(0, rows, q)
        self.lse[layer].index_copy_(0, rows, lse)

    @contextmanager
    def step(self, chunks: Sequence[SequenceChunk], num_decode: int) -> Iterator[None]:
        """Encloses a step, whose first `num_decode` chunks are single tokens of decoding
        sequences."""
        self._begin(chunks)
        yield
        self._end(chunks[:num_decode])

    def _begin(self, chunks: Sequence[SequenceChunk]) -> None:
        """Drop buffered queries of sequences that gave up their slots, and flush if a sequence does
        not continue where it ended. The step's token entries may have pages but no content yet;
        what is added to their metrics is overwritten."""
        must_flush = False
        for slot, owner, start, _ in chunks:
            if (pending := self.pending.get(slot)) is None:
                continue
            if pending.owner is not owner or start == 0:
                del self.pending[slot]
            elif start != pending.positions.stop:
                must_flush = True
        if must_flush:
            self.flush()

    def _end(self, decodes: Sequence[SequenceChunk]) -> None:
        """Record one more buffered query per decoding sequence; flush if a buffer is full."""
        must_flush = False
        for slot, owner, start, counts in decodes:
            if not counts:
                continue
            pending = self.pending.get(slot)
            first = start if pending is None else pending.positions.start
            self.pending[slot] = _Pending(owner, range(first, start + 1))
            must_flush |= start + 1 - first == self.width
        if must_flush:
            self.flush()

    def flush(self) -> None:
        """Add the attention of all buffered queries to the metrics. Sequences that gave up their
        slots have no token entries and are skipped."""
        lengths = self.view.pool.host_lengths
        pending = [(slot, x.positions) for slot, x in self.pending.items() if lengths[slot].any()]
        self.pending = {}
        if not pending:
            return
        slots = upload(np.array([slot for slot, _ in pending]), self.device)
        positions = self._positions([x for _, x in pending])
        for index, layer in self.layers.items():
            q, lse = (
                buffer[index].unflatten(0, (-1, self.width))[slots].transpose(1, 2).contiguous()
                for buffer in (self.queries, self.lse)
            )
            inputs, scorer = (self.view.pages[index], slots, layer.scale), self.scorer
            observe(q, lse, positions, *inputs, power=scorer.power, exclude=scorer.exclude)

    def _positions(self, ranges: list[range]) -> Tensor:
        """Positions of the buffer entries of sequences, int32 [B, W]; -1 for empty ones."""
        start = np.array([x.start for x in ranges])[:, None]
        stop = np.array([x.stop for x in ranges])[:, None]
        positions = start + (np.arange(self.width) - start) % self.width
        positions = np.where(positions < stop, positions, -1).astype(np.int32)
        return upload(positions, self.device)
