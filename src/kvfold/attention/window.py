"""Attention with an exact window: every query sees its last N tokens as the model computed them,
and all tokens before these as compressed entries.

Every token is stored twice: as a compressed entry in the pool, and with its keys and values in a
ring of its slot (`cache.window`). Attention to entries and attention to the ring are merged by
their log-sum-exps. Shapes: B sequences of one attention call (a part of the step), T queries per
sequence, N tokens of a window, S = N + T; M tokens of a step; Hq / Hk query / KV heads, d / dv head
dims of keys / values, R numbers of an entry of the ring, W input width of W_O.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from kvfold.attention.backend import AttentionBackend, Weighed
from kvfold.attention.base import Columns, LayerAttention
from kvfold.attention.metadata import AttentionMetadata, CacheView, PoolView
from kvfold.attention.rows import rope_of
from kvfold.attention.selector import Backends
from kvfold.attention.triton_prefill import views_of
from kvfold.cache.window import WindowPages, entries_of
from kvfold.layout.pages import CacheLayout
from kvfold.ops import store
from kvfold.ops.common.pages import LayerPages, owner_of
from kvfold.ops.common.recording import compute, copy
from kvfold.ops.merge import merged
from kvfold.ops.prefill import KVView, Seen, prefill
from kvfold.ops.prefill.plan import LAST, NEVER

BLOCK = 128  # least queries that are attended to together in a prefill


@dataclass(frozen=True)
class _View:
    """Entries of one of the two places. all_lengths: int32 [slots, all groups]."""

    pool_view: PoolView
    layout: CacheLayout
    pages: Mapping[int, LayerPages]
    all_lengths: Tensor
    observing: None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.pool_view.dtype

    @property
    def device(self) -> torch.device:
        return self.pool_view.device

    @property
    def max_tokens(self) -> int:
        return self.pool_view.max_tokens

    def lengths(self, slots: Tensor, groups: Tensor) -> Tensor:
        """As in `CacheView`."""
        return self.all_lengths[slots[:, None], groups]


@dataclass(frozen=True)
class ExactTokens:
    """Queries [Hq, M, d], keys [Hk, M, d] and values [Hk, M, dv] of a step's tokens in one layer,
    as in `AttentionContext.keep_exact`."""

    queries: Tensor
    keys: Tensor
    values: Tensor


class WindowAttention:
    """What all steps share.

    older: the compressed entries before each sequence's window.
    recent: the window.
    layers: descriptions of the layers for the window.
    decoders: of older entries and of recent ones.
    """

    def __init__(self, layers: Sequence[LayerAttention], view: PoolView, ring: WindowPages) -> None:
        self.view, self.ring, self.tokens = view, ring, ring.tokens
        lengths, groups_of = torch.zeros_like(view.pool.lengths), view.layout.layer_groups
        older = {
            i: pages._replace(lengths=lengths[:, groups_of[i]]) for i, pages in view.pages.items()
        }
        recent = {i: ring.pages(i) for i in older}
        self.older = _View(view, view.layout, older, lengths)
        self.recent = _View(view, ring.layout, recent, ring.lengths)
        self.layers = [uncompressed(x, ring.layout) for x in layers]
        self.decoders = [Backends(self.older, layers), Backends(self.recent, self.layers)]

    @property
    def supports_graphs(self) -> bool:
        """Whether a CUDA graph can capture a decode step."""
        return all(side.supports_graphs for side in self.decoders)

    def begin(
        self, parts: Sequence[AttentionMetadata], slots: Tensor, positions: Tensor
    ) -> "WindowStep":
        """Begin a step of M tokens: slots int64 [M], positions int32 [M]. Never waits for the
        device."""
        lengths = self.view.pool.lengths
        count = (lengths[:, :1] - self.ring.first[:, None]).clamp(0, self.tokens).int()
        torch.sub(lengths, count, out=self.older.all_lengths)
        self.ring.lengths.copy_(count.expand_as(self.ring.lengths))
        return WindowStep(self, parts, slots, positions)


def uncompressed(layer: LayerAttention, layout: CacheLayout) -> LayerAttention:
    """The description of a layer that stores keys and values as they are."""
    spec = layout.spec.layers[layer.index]
    keys, values = (Columns(spec, x) for x in (spec.key_latents, spec.value_latents))
    return replace(
        layer, spec=spec, key_columns=keys, value_columns=values, key_up=None, key_mean=None,
        value_up=None, output_maps=None, rope=None,
    )  # fmt: skip


def weigh_older(
    layer: LayerAttention,
    part: AttentionMetadata,
    q: Tensor,
    view: CacheView,
    decoder: AttentionBackend | None,
    chunk: "Chunk | None",
) -> Weighed:
    """Attention of q [B, Hq, T, .] in the space of scores to compressed entries, with values
    projected up: [B, Hq, T, dv].

    decoder: reads the entries of a part that decodes. chunk: of a part that prefills.
    """
    mapped = False
    if part.decode:
        assert decoder is not None
        out, lse = decoder.weigh(layer, part, q)
    else:
        assert chunk is not None, "a prefill's queries see different entries"
        out, lse, mapped = chunk.weigh_older(layer, q, view)
    if out.dtype is not q.dtype:
        out = copy(torch.empty_like(out, dtype=q.dtype), out)
    heads = layer.merge_heads(out, mapped)
    return heads.unflatten(2, (out.shape[1], -1)).transpose(1, 2), lse


def attended(layer: LayerAttention, recent: Weighed, older: Weighed) -> Tensor:
    """Attention to recent and to older tokens, by head [B, T, Hq, dv]."""
    out, _ = layer.with_sinks(*merged(*recent, *older))
    return out.transpose(1, 2)


class WindowStep:
    """Attention of one step.

    last_tokens: int64 [m], the last N tokens of every part in the packed row; None: all tokens.
    """

    def __init__(
        self,
        attention: WindowAttention,
        parts: Sequence[AttentionMetadata],
        slots: Tensor,
        positions: Tensor,
    ) -> None:
        self.attention, self.tokens = attention, attention.tokens
        self.older, self.recent = (side.begin() for side in attention.decoders)
        self.last_tokens: Tensor | None = None
        if any(part.positions.shape[1] > self.tokens for part in parts):
            sizes = [part.positions.shape for part in parts]
            last = [
                x.packed.view(size)[:, -self.tokens :] for x, size in zip(parts, sizes, strict=True)
            ]
            self.last_tokens = torch.cat([x.flatten() for x in last])
            slots, positions = slots[self.last_tokens], positions[self.last_tokens]
        self.slots, self.index = slots, (positions % self.tokens).long()
        self.chunks = {id(x): Chunk.of_ring(x, attention.ring) for x in parts if not x.decode}
        self.current: ExactTokens | None = None
        self.before: dict[int, Tensor] = {}

    def keep(self, layer: LayerAttention, exact: ExactTokens) -> None:
        """Store a layer's keys and values of the step's tokens in the rings, after reading what
        they overwrite."""
        pages = self.attention.recent.pages[layer.index]
        self.current = exact
        entries = entries_of(exact.keys, exact.values)
        self.before = {
            name: chunk.entries(pages, chunk.part.slots, entries, self.attention.view.dtype)
            for name, chunk in self.chunks.items()
        }
        if self.last_tokens is not None:
            entries = entries[self.last_tokens]
        index = self.index[:, None].expand(-1, len(pages.groups))
        store.append(pages, entries, self.slots, index)

    def attend(self, layer: LayerAttention, part: AttentionMetadata, q: Tensor) -> Tensor:
        """Attention of q [B, Hq, T, .] in the space of scores, after `keep`: [B, T, W]."""
        assert self.current is not None, "the layer's exact tokens come first"
        exact_q = part.slice_of(self.current.queries[None])
        recent, older = self._recent(layer, part, exact_q), self._older(layer, part, q)
        return attended(layer, recent, older).to(q.dtype).flatten(2)

    def _recent(self, layer: LayerAttention, part: AttentionMetadata, q: Tensor) -> Weighed:
        """Attention of q [B, Hq, T, d] to the window: [B, Hq, T, dv]."""
        plain = self.attention.layers[layer.index]
        if part.decode:
            groups = len(self.attention.recent.pages[layer.index].groups)
            rows = len(part.slots) * self.tokens * groups
            window = replace(part, rows=rows, lengths=part.lengths.clip(max=self.tokens))
            return self.recent[layer.index].weigh(plain, window, q)
        return self.chunks[id(part)].weigh(plain, q, self.before[id(part)])

    def _older(self, layer: LayerAttention, part: AttentionMetadata, q: Tensor) -> Weighed:
        """Attention of q [B, Hq, T, .] to the compressed entries before the window, with values
        projected up: [B, Hq, T, dv]."""
        chunk = None if part.decode else self.chunks[id(part)]
        view, decoder = self.attention.view, self.older[layer.index]
        return weigh_older(layer, part, q, view, decoder, chunk)


class Chunk:
    """The tokens that a prefill part sees exactly: those of its window's pages, then its own.

    size: entries of the pages.
    index: int64 [B, S], where entry s is in the pages and the part's entries behind them, in the
        order of positions.
    is_visible: bool [B, S]; False for padding and for tokens that were not stored exactly.
    last_older: int32 [B, T], position of the last token that each query sees compressed.
    """

    def __init__(
        self,
        part: AttentionMetadata,
        tokens: int,
        first: Tensor,
        size: int,
        place: Callable[[Tensor], Tensor],
        heads: int,
    ) -> None:
        """tokens: N. first: int64 [B, 1], position of the first token that is stored exactly.
        place: from positions of tokens before the part to their entries in the pages. heads: Hk."""
        self.part, self.tokens, self.size = part, tokens, size
        queries = part.positions.long()
        self.last_older = torch.maximum(queries - tokens, first - 1).int()
        self._arrange(queries, first, place, heads)

    def _arrange(
        self, queries: Tensor, first: Tensor, place: Callable[[Tensor], Tensor], heads: int
    ) -> None:
        """Find the exact tokens. queries: int64 [B, T], positions; the others as in `__init__`."""
        tokens, size, start = self.tokens, self.size, queries[:, :1]
        row = torch.arange(tokens + queries.shape[1], device=queries.device)
        # Shorter parts of a call are padded with their first token, which counts once.
        padding = (queries.diff(dim=1) == 0).sum(1, keepdim=True)
        positions = start - tokens - padding + row
        self.index = torch.where(positions < start, place(positions), row + (size - tokens))
        self.is_visible = positions >= torch.maximum(first, start - tokens)
        self.blocks = blocks = _Blocks(tokens, queries.shape[1])
        positions = positions.masked_fill(~self.is_visible, NEVER).int()
        positions = blocks.keys(positions[..., None], NEVER)[..., 0]
        self.seen = Seen(
            counts=torch.full_like(positions[:, :1], positions.shape[1]),
            owner=(0,) * heads, positions=positions[:, None].contiguous(),
            queries=blocks.queries(self.part.positions[:, None, :, None], LAST).flatten(1),
            window=tokens,
        )  # fmt: skip

    @classmethod
    def of_ring(cls, part: AttentionMetadata, ring: WindowPages) -> "Chunk":
        first, heads = ring.first[part.slots][:, None], ring.layout.spec.geometry.num_kv_heads
        tokens = ring.tokens
        return cls(part, tokens, first, tokens, lambda positions: positions % tokens, heads)

    def entries(
        self, pages: LayerPages, slots: Tensor, packed: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Entries [B * blocks, ., R] of the pages of `slots` [B], before they are written to, and
        of the part's own tokens. packed [M, R]: of the step's."""
        entries = self.stored_and_own(pages, slots, packed, dtype)
        entries = entries.gather(1, self.index[..., None].expand(-1, -1, entries.shape[-1]))
        return self.blocks.keys(entries.masked_fill(~self.is_visible[..., None], 0))

    def stored_and_own(
        self, pages: LayerPages, slots: Tensor, packed: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Entries [B, size + T, R] as `index` counts them; arguments as in `entries`."""
        counts = slots.new_full((len(slots), len(pages.groups)), self.size)
        held = store.gather(pages, slots, counts, dtype, self.size).rows
        return compute(_joined, held, self.part.slice_of(packed[None, None])[:, 0])

    def weigh(self, plain: LayerAttention, q: Tensor, entries: Tensor) -> Weighed:
        """Attention of q [B, Hq, T, d] to `entries`: [B, Hq, T, dv]."""
        keys, values = exact_views(plain, entries)
        out, lse = prefill(self.blocks.queries(q), keys, values, self.seen, plain.scale)
        return self.blocks.joined(out), self.blocks.joined(lse[..., None])[..., 0]

    def weigh_older(
        self, layer: LayerAttention, q: Tensor, view: CacheView
    ) -> tuple[Tensor, Tensor, bool]:
        """Attention of q [B, Hq, T, .] in the space of scores to compressed entries, and whether
        their values are projected up."""
        pages, part = view.pages[layer.index], self.part
        counts = pages.lengths[part.slots]
        stored = store.gather(pages, part.slots, counts, view.dtype, part.size(layer.index))
        rope = rope_of(layer, stored, pages.groups, part.stop)
        keys, values, mapped = views_of(layer, q, stored.rows, rope)
        owner = owner_of(pages.groups)
        visible = Seen(counts=counts, owner=owner, positions=None, queries=self.last_older)
        return *self.attend_older(q, keys, values, visible, layer.scale), mapped

    def attend_older(
        self, q: Tensor, keys: KVView, values: KVView, visible: Seen, scale: float
    ) -> Weighed:
        """Attention of q [B, Hq, T, dk] to compressed entries."""
        return prefill(q, keys, values, visible, scale)


def _joined(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """[B, s + t, R] of [B, s, R] and [B, t, R]."""
    return torch.cat((a, b), 1, out=out)


def exact_views(plain: LayerAttention, entries: Tensor) -> tuple[KVView, KVView]:
    """Keys and values in exact entries [.., R] of a layer."""
    return (
        KVView(entries, *plain.key_columns.head_columns),
        KVView(entries, *plain.value_columns.head_columns),
    )


class _Blocks:
    """T queries in blocks, each with the tokens that its queries may see: `tokens` before the
    block, and the block's own. Scores grow with T, not with its square."""

    def __init__(self, tokens: int, queries: int) -> None:
        self.tokens, self.total = tokens, queries
        self.size = min(queries, max(tokens, BLOCK))
        self.count = -(-queries // self.size)
        self.padding = self.count * self.size - queries

    def keys(self, rows: Tensor, fill: int = 0) -> Tensor:
        """Rows [B, tokens + T, R] as [B * blocks, tokens + size, R]. fill: of rows that do not
        exist."""
        rows = F.pad(rows, (0, 0, 0, self.padding), value=fill)
        return rows.unfold(1, self.tokens + self.size, self.size).mT.flatten(0, 1)

    def queries(self, q: Tensor, fill: int = 0) -> Tensor:
        """Queries [B, H, T, d] as [B * blocks, H, size, d]."""
        q = F.pad(q, (0, 0, 0, self.padding), value=fill)
        return q.unflatten(2, (self.count, self.size)).transpose(1, 2).flatten(0, 1)

    def joined(self, out: Tensor) -> Tensor:
        """Undo `queries`."""
        out = out.unflatten(0, (-1, self.count)).transpose(1, 2).flatten(2, 3)
        return out[:, :, : self.total]
