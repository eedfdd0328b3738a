"""The model side of the engine: a batch to logits, and sequences to fewer pages."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kvfold.cache.eviction.base import Policy
from kvfold.cache.pool import Pool
from kvfold.engine.compiled import Compiled, wanted
from kvfold.engine.eviction import Eviction
from kvfold.engine.graphs import DecodeGraphs
from kvfold.engine.observer import Turn
from kvfold.engine.paged import Attention, PagedStep
from kvfold.engine.parts import decodes, decoding, split
from kvfold.engine.request import Batch, CacheParams, Request
from kvfold.models.adapter import PagedRows
from kvfold.models.families import attention_windows
from kvfold.ops.store import Fill

# transformers makes no mask for an attention without a registered mask function.
PAGED = "kvfold_paged"


class ModelRunner:
    """Runs a folded model over a pool.

    policy: what is evicted (None: nothing is observed or evicted); cache: budget of requests that
    set none of their own.
    """

    def __init__(
        self,
        model: Any,
        pool: Pool,
        *,
        policy: Policy | None = None,
        cache: CacheParams | None = None,
        seed: int = 0,
    ) -> None:
        assert policy is None or pool.layout.tracked, "eviction needs positions and metrics"
        self.model, self.pool, self.policy = model.eval(), pool, policy
        layers = zip(pool.layout.layer_groups, attention_windows(model.config), strict=True)
        self.sliding = [(where, window) for where, window in layers if window is not None]
        tracked = all(pool.layout.groups[where.start].layout.tracked for where, _ in self.sliding)
        assert tracked, "layers with a sliding window need positions, to free what is behind it"
        self.device, self.attention = pool.device, Attention(self.model, pool, policy)
        self.eviction = Eviction(self.attention, policy, cache or CacheParams(), self.sliding, seed)
        self.compiled = Compiled(self.model) if wanted(self.device.type) else None
        if self.compiled is not None:
            self.compiled.warm_up(self._forward, self.device)
        captures = self.attention.captures
        self.graphs = DecodeGraphs(self._decode, self.device) if captures else None

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    @property
    def can_rewind(self) -> bool:
        """Whether `Pool.shrink` to earlier lengths takes a sequence back: not where pages were
        packed (a residual) or freed behind a window since."""
        return not (self.sliding or self.pool.layout.residual)

    # -- forward ------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Store every piece's rows; logits fp32 [pieces with logits, V], which the next call may
        overwrite."""
        if self.graphs is not None and self.graphs.fits(batch):
            graphs = self.graphs
            with self._observed(batch):
                return graphs.run(batch)
        hidden = self._hidden(batch)
        ends, end = [], 0
        for piece in batch.pieces:
            end += len(piece.tokens)
            if piece.wants_logits:
                ends.append(end - 1)
        return self._logits(hidden[self._tensor(ends)])

    @torch.inference_mode()
    def run_all(self, batch: Batch) -> Tensor:
        """The same with logits of every token, fp32 [N, V]."""
        return self._logits(self._hidden(batch))

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits.float()

    def _hidden(self, batch: Batch) -> Tensor:
        """Last hidden states [N, D]."""
        tokens = [token for piece in batch.pieces for token in piece.tokens]
        positions = self._tensor(
            [piece.start + i for piece in batch.pieces for i in range(len(piece.tokens))]
        )
        with self._observed(batch):
            hidden = self._forward(self._tensor(tokens), positions, self._step(batch, positions))
        for piece in batch.pieces if self.sliding else ():
            self.eviction.slide(piece.sequence.open_slot, piece.start + len(piece.tokens))
        return hidden

    @contextmanager
    def _observed(self, batch: Batch) -> Iterator[None]:
        """Around a step: its decoding queries are kept, or added to metrics."""
        if (observer := self.attention.observer) is None:
            yield
            return
        turns = [Turn(x.sequence.open_slot, x.sequence, x.start) for x in batch.pieces]
        with observer.around(turns, len(decodes(batch))):
            yield

    def _forward(self, tokens: Tensor, positions: Tensor, step: PagedRows) -> Tensor:
        """tokens, positions int64 [N] -> last hidden states [N, D]."""
        with self._paged_attention(), self.compiled.applied() if self.compiled else nullcontext():
            out = self.model.base_model(
                input_ids=tokens[None],
                position_ids=positions[None],
                past_key_values=step,
                use_cache=False,
            )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _decode(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """One token a sequence, with nothing from the host: logits fp32 [B, V]."""
        part, last = decoding(self.attention.setup, slots, positions), torch.full_like(slots, -1)
        step = PagedStep(self.attention, [part], slots, last, positions.int())
        return self._logits(self._forward(tokens, positions, step))

    @contextmanager
    def _paged_attention(self) -> Iterator[None]:
        config = self.model.config
        before, config._attn_implementation = config._attn_implementation, PAGED
        try:
            yield
        finally:
            config._attn_implementation = before

    def _step(self, batch: Batch, positions: Tensor) -> PagedStep:
        slots: list[int] = []
        index: list[int] = []
        for piece in batch.pieces:
            slots += [piece.sequence.open_slot] * len(piece.tokens)
            index += range(-len(piece.tokens), 0)
        fill = None
        if self.pool.layout.residual:
            rows = (self.pool.host_lengths[slots, 0] + index).tolist()
            fill = Fill.of(slots, rows, self.pool.layout.residual, self.device)
        parts = split(self.attention.setup, batch, positions)
        where = self._tensor(slots), self._tensor(index), positions.int()
        return PagedStep(self.attention, parts, *where, fill)

    # -- fewer rows ---------------------------------------------------------------------------

    def needs_compression(self, sequence: Request) -> bool:
        return self.eviction.is_over(sequence)

    @torch.inference_mode()
    def compress(self, sequences: list[Request]) -> None:
        """Evict to each one's budget and give the pages back to the pool."""
        self.eviction.compress(sequences)
