"""The model side of the engine: a batch to logits, and sequences to fewer pages."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvfold.cache import evict
from kvfold.cache.policies import Budget, Policy
from kvfold.cache.pool import Pool
from kvfold.cache.slabs import upload
from kvfold.engine.compiled import Compiled, wanted
from kvfold.engine.graphs import DecodeGraphs
from kvfold.engine.paged import Attention, PagedStep
from kvfold.engine.parts import decodes, decoding, split
from kvfold.engine.sequence import Batch, CacheParams, Sequence
from kvfold.models.adapter import PagedRows
from kvfold.models.families import attention_windows
from kvfold.ops import kivi

# transformers makes no mask for an attention without a registered mask function.
PAGED = "kvfold_paged"
ROWS = 10_000_000  # of all groups that are compressed at once, with some 40 B each of temporaries

Evicted = tuple[Sequence, Budget]


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
        self.cache = cache or CacheParams()
        self.windows = attention_windows(model.config)
        layers = zip(pool.layout.layer_groups, self.windows, strict=True)
        self.sliding = [(where, window) for where, window in layers if window is not None]
        tracked = all(pool.layout.groups[where.start].layout.tracked for where, _ in self.sliding)
        assert tracked, "layers with a sliding window need positions, to free what is behind it"
        self.device, self.attention = pool.device, Attention(self.model, pool, policy)
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        self.compiled = Compiled(self.model) if wanted(self.device.type) else None
        if self.compiled is not None:
            self.compiled.warm_up(self._forward, self.device)
        captures = self.attention.captures
        self.graphs = DecodeGraphs(self._decode, self.device) if captures else None
        groups = pool.layout.groups
        self.page_units = self._tensor([group.layout.page_units for group in groups])
        self.layer_of_group = self._tensor([group.layer for group in groups])

    def _tensor(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    @property
    def can_rewind(self) -> bool:
        """Whether `Pool.shrink` to earlier lengths takes a sequence back: not where pages were
        packed (KIVI) or freed behind a window since."""
        return not (self.sliding or self.pool.layout.kivi)

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
            self._slide(piece.sequence.open_slot, piece.start + len(piece.tokens))
        return hidden

    @contextmanager
    def _observed(self, batch: Batch) -> Iterator[None]:
        """Around a step: its decoding queries are kept, or added to metrics."""
        if (observer := self.attention.observer) is None:
            yield
            return
        observer.begin(batch.pieces)
        yield
        observer.end(decodes(batch))

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
        if self.pool.layout.kivi:
            rows = (self.pool.host_lengths[slots, 0] + index).tolist()
            fill = kivi.Fill.of(slots, rows, self.pool.layout.page, self.device)
        parts = split(self.attention.setup, batch, positions)
        where = self._tensor(slots), self._tensor(index), positions.int()
        return PagedStep(self.attention, parts, *where, fill)

    # -- eviction -----------------------------------------------------------------------------

    def budget(self, sequence: Sequence) -> Budget | None:
        """What a sequence may keep; None: everything."""
        own = sequence.cache
        limits = own if own.max_cache_tokens or own.keep_tokens else self.cache
        page, groups = self.pool.layout.page, len(self.pool.layout.groups)
        if self.policy is None:
            return None
        if limits.max_cache_tokens:
            return Budget.max_cache_tokens(limits.max_cache_tokens, page, groups)
        if limits.keep_tokens:
            one = Budget.keep_tokens(limits.keep_tokens, [sequence.num_computed], page)
            return Budget(pages=one.limit * groups)
        return None

    def needs_compression(self, sequence: Sequence) -> bool:
        budget = self.budget(sequence)
        if budget is None:
            return False
        lengths = self.pool.host_lengths[sequence.open_slot]
        return int((-(-lengths // self.pool.layout.page)).sum()) > budget.limit

    @torch.inference_mode()
    def compress(self, sequences: list[Sequence]) -> None:
        """Evict to each one's budget and give the pages back to the pool."""
        work = [(x, budget) for x in sequences if (budget := self.budget(x)) is not None]
        kept = [self._evict(chunk) for chunk in self._chunks(work)]
        if kept:
            self.pool.shrink([x.open_slot for x, _ in work], torch.cat(kept))

    def _chunks(self, work: list[Evicted]) -> Iterator[list[Evicted]]:
        """What is compressed at once: at most ROWS rows, padding included, or one sequence."""
        chunk: list[Evicted] = []
        widest = 0
        for item in work:
            rows = self.pool.host_lengths[item[0].open_slot]
            widest = max(widest, int(rows.max()) * len(rows))
            if chunk and widest * (len(chunk) + 1) > ROWS:
                yield chunk
                chunk, widest = [], int(rows.max()) * len(rows)
            chunk.append(item)
        if chunk:
            yield chunk

    def _evict(self, chunk: list[Evicted]) -> Tensor:
        """Move what is kept together; rows kept, int32 [B, G]."""
        pool, policy, sequences = self.pool, self.policy, [x for x, _ in chunk]
        assert policy is not None
        slots = upload(np.array([x.open_slot for x in sequences]), self.device)
        evicted, _ = evict.select(
            self._scores(sequences, policy),
            pool.lengths[slots],
            pool.layout.page,
            self.page_units,
            self.layer_of_group,
            policy,
            [budget for _, budget in chunk],
        )
        return self._move(slots, evicted)

    def _scores(self, sequences: list[Sequence], policy: Policy) -> Tensor:
        """What their rows are worth, fp32 [B, G, T]."""
        slots = [x.open_slot for x in sequences]
        lengths = self.pool.host_lengths[slots]
        computed = np.array([[x.num_computed] for x in sequences])
        recent = np.array([_recent(x, policy) for x in sequences])
        return evict.scores(
            *self._tracked(*slots),
            policy,
            upload(recent, self.device),
            lengths.max(1).tolist(),
            self.generator,
            # Rows leave their order where others go, never before.
            in_order=bool((lengths == computed).all()),
        )

    def _tracked(self, *slots: int) -> tuple[Tensor, Tensor, Tensor]:
        """Metrics, positions and validity of sequences' rows in all groups, [B, G, T]."""
        if self.attention.observer is not None:
            self.attention.observer.flush()
        index = upload(np.array(slots), self.device)
        size = int(self.pool.host_lengths[list(slots)].max())
        first, *others = (self._tracked_in(index, x, size) for x in self.attention.setup.spans)
        if not others:
            return first
        metrics, positions, valid = (torch.cat(x, 1) for x in zip(first, *others, strict=True))
        return metrics, positions, valid

    def _tracked_in(self, slots: Tensor, where: slice, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same of the groups `where` of slots [B]: [B, g, T]."""
        pool = self.pool
        place = pool.arena, pool.tables[:, where], pool.layout.groups[where], slots
        lengths = pool.lengths[slots, where]
        found: tuple[Tensor, Tensor, Tensor] = self.attention.setup.store.read_tracked(
            *place, lengths, size
        )
        return found

    def _slide(self, slot: int, position: int) -> None:
        """Free the pages of rows that no query from `position` on sees. Rows go P at a time, so
        that a layer is compacted once in P tokens at most."""
        pool, page = self.pool, self.pool.layout.page
        lengths = pool.host_lengths[slot]
        cuts = []
        for where, window in self.sliding:
            length = int(lengths[where.start])
            if behind := max(length - (window - 1), 0) // page * page:
                cuts.append((where, position - length + behind))
        if not cuts:
            return
        size, index = int(lengths.max()), upload(np.array([slot]), self.device)
        evicted = torch.zeros(1, len(lengths), size, dtype=torch.bool, device=self.device)
        for where, first in cuts:
            _, positions, valid = self._tracked_in(index, where, size)
            evicted[:, where] = valid & (positions < first)
        pool.shrink(slot, self._move(index, evicted))

    def _move(self, slots: Tensor, evicted: Tensor) -> Tensor:
        """Close the holes of the sequences slots [B]: evicted bool [B, G, T]; rows kept [B, G]."""
        pool, setup, kept = self.pool, self.attention.setup, []
        lengths = pool.lengths[slots]
        for where in setup.spans:
            moves, left = evict.compaction(evicted[:, where], lengths[:, where])
            sequence, *rows = moves
            place = pool.arena, pool.tables[:, where], pool.layout.groups[where]
            setup.store.move(*place, slots[sequence], *rows)
            kept.append(left)
        return torch.cat(kept, 1)


def _recent(sequence: Sequence, policy: Policy) -> int:
    """Last tokens of a sequence that are never evicted."""
    own = sequence.cache.protected
    return (policy if own is None else replace(policy, recent=own)).protected_recent
