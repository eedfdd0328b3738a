"""Attention with an exact window over an engine's blocks: every query sees its last N tokens as the
model computed them, and all tokens before these as compressed entries.

The engine keeps blocks of two kinds, each with tables of its own: compressed entries of all tokens
of a request, and exact keys and values of those tokens that a query may still see. The engine frees
exact blocks as all their tokens leave the window; their numbers in the tables are then 0.

Shapes: B requests of a part, T queries per request, N tokens of a window, p tokens of an exact
block, n blocks in which a window lies at most, M tokens of a step, G groups of a layer, Hk KV
heads.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfold.attention.backend import AttentionBackend, Weighed
from kvfold.attention.base import LayerAttention
from kvfold.attention.metadata import AttentionMetadata
from kvfold.attention.selector import Backends, choose_backends
from kvfold.attention.window import (
    Chunk,
    ExactTokens,
    attended,
    uncompressed,
    weigh_older,
)
from kvfold.cache.window import entries_of
from kvfold.layout.pages import CacheLayout
from kvfold.ops import store
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.common.plan import cdiv
from kvfold.ops.common.recording import copy
from kvfold.vllm_plugin.flash_window import FlashChunk

if TYPE_CHECKING:
    from kvfold.vllm_plugin.blocks import BlockContext, BlockLocation, BlockStep, BlockView


class BlockWindow:
    """What all steps share.

    tokens: N. layout: of exact blocks.
    layers: descriptions of the layers for their exact tokens, by number.
    blocks: n. exact_view: of exact blocks, outside of a step.
    older, recent: decode backends of compressed entries and of exact tokens.
    chunk_kind: attention of parts that prefill.
    """

    def __init__(
        self, layers: Sequence[LayerAttention], view: "BlockView", older: Backends
    ) -> None:
        assert view.layout.exact is not None, "the layout has a window"
        self.tokens, self.layout, self.older = view.layout.window, view.layout.exact, older
        plain = [exact_layer(x, view.layout) for x in layers]
        self.layers = {x.index: x for x in plain}
        self.blocks = cdiv(self.tokens - 1, self.layout.page) + 1
        size = self.blocks * self.layout.page
        self.exact_view = replace(view, layout=self.layout, max_tokens=size)
        self.recent = Backends(self.exact_view, plain)
        serves = FlashChunk.serves(plain, self.exact_view)
        self.chunk_kind: type[Chunk] = FlashChunk if serves else Chunk

    def replays(self, layer: LayerAttention) -> bool:
        """Whether all that a layer launches can be recorded, if `replays_chunks` or there are
        none."""
        return layer.output_maps is not None and self.recent.kinds[layer.index].replays(
            self.layers[layer.index]
        )

    @property
    def replays_chunks(self) -> bool:
        return self.chunk_kind is FlashChunk


def exact_layer(layer: LayerAttention, layout: CacheLayout) -> LayerAttention:
    """The description of a layer for its exact tokens, in a layout with a window. The first block
    of a window begins before the window, which therefore hides tokens."""
    assert layout.exact is not None
    return replace(uncompressed(layer, layout.exact), window=layout.window)


def decoders_of(
    layer: LayerAttention, layout: CacheLayout, device_type: str, dtype: torch.dtype
) -> set[type[AttentionBackend]]:
    """The backends that decode a layer's entries and, with a window, its exact tokens."""
    sides = [(layer, layout)]
    if layout.exact is not None:
        sides.append((exact_layer(layer, layout), layout.exact))
    return {choose_backends([x], y, device_type, dtype)[x.index] for x, y in sides}


class BlockWindowStep:
    """Attention of one step. A step that only decodes never waits for the device.

    older: view of the compressed entries before each request's last window.
    """

    def __init__(self, window: BlockWindow, context: "BlockContext") -> None:
        step, self.exact = context.step, context.step.exact
        assert self.exact is not None, "a step with a window has exact blocks"
        self.window, self.context = window, context
        older = (step.lengths - window.tokens).clamp(min=0)
        self.older_lengths = older
        self.older_pages: dict[int, LayerPages] = {}
        self.older = replace(
            context.view, step=replace(step, lengths=older), pages=self.older_pages
        )
        decodes = any(part.decode for part in context.parts)
        self.older_decoders = window.older.begin(self.older) if decodes else {}
        self.parts = [_WindowPart(window, part, self.exact) for part in context.parts]
        # Tokens to be stored nowhere go to block 0, as in `BlockContext`.
        self.slots = self.exact.slots.clamp(min=0)
        self.zeros = torch.zeros_like(self.slots)
        self.lengths: dict[int, Tensor] = {}  # by number of groups

    def attend(
        self,
        layer: LayerAttention,
        location: "BlockLocation",
        exact_location: "BlockLocation",
        exact: ExactTokens,
        q: Tensor,
        entries: Tensor,
        out: Tensor,
    ) -> None:
        """Store a layer's entries and exact tokens, and attend, into out [M, W].

        q [Hq, M, .]: queries in score space. entries [M, R]: of the step's tokens.
        """
        self.context.store(layer, location, entries)
        pages = self.context.pages[layer.index]
        groups = len(pages.groups)
        if groups not in self.lengths:
            self.lengths[groups] = self.older_lengths[:, None].expand(-1, groups).contiguous()
        self.older_pages[layer.index] = pages._replace(lengths=self.lengths[groups])
        exact_entries = entries_of(exact.keys, exact.values)
        self._store(layer, exact_location, exact_entries)
        for part in self.parts:
            metadata = part.part
            part_out = out[metadata.first_token : metadata.first_token + metadata.positions.numel()]
            queries = metadata.slice_of(exact.queries[None])
            recent = part.weigh(layer, exact_location, queries, exact_entries)
            packed = metadata.slice_of(q[None])
            decoder = self.older_decoders.get(layer.index)
            older = weigh_older(layer, metadata, packed, self.older, decoder, part.chunk)
            outputs = attended(layer, recent, older)
            copy(part_out.view(outputs.shape), outputs)

    def _store(self, layer: LayerAttention, location: "BlockLocation", entries: Tensor) -> None:
        groups = self.window.layout.groups_of_layer(layer.index)
        lengths = self.zeros[:1, None].int()  # not read
        pages = LayerPages(location.arena, location.tables, lengths, groups)
        store.append(pages, entries, self.zeros, self.slots[:, None].expand(-1, len(groups)))


class _WindowPart:
    """The exact tokens of a part, before its own if it prefills.

    part: of the step.
    tables int32 [B, n], lengths int32 [B]: blocks from the first one that the window needs, and
        tokens in them.
    chunk: of a part that prefills.
    """

    def __init__(self, window: BlockWindow, part: AttentionMetadata, exact: "BlockStep") -> None:
        self.window, self.part = window, part
        page, device, count = window.layout.page, part.positions.device, len(part.slots)
        ends = part.positions[:, -1] + 1 if part.decode else part.positions[:, 0]
        first = (ends - window.tokens).clamp(min=0) // page
        columns = first[:, None] + torch.arange(window.blocks, device=device)
        tables = exact.tables[part.slots]
        tables = tables.gather(1, columns.clamp(max=tables.shape[1] - 1))
        lengths = (ends - first * page).int()
        size = window.blocks * page
        slots = torch.arange(count, device=device)
        self.tables, self.lengths, self.slots = tables, lengths, slots
        self.pages: dict[int, LayerPages] = {}
        self.offsets: dict[tuple[int, ...], Tensor] = {}
        step = replace(exact, lengths=lengths)
        self.view = replace(window.exact_view, step=step, pages=self.pages)
        self.chunk: Chunk | None = None
        heads = window.layout.spec.geometry.num_kv_heads
        if part.decode:
            self.decoders = window.recent.begin(self.view)
            self.metadata = replace(
                part,
                slots=slots,
                positions=lengths[:, None] - 1,
                lengths=part.lengths.clip(max=size),
                rows=count * size * heads,
                stop=size,
            )
        else:
            start = (part.positions[:, :1] - window.tokens + 1).clamp(min=0)
            before = first[:, None] * page
            self.chunk = window.chunk_kind(
                part, window.tokens, start, size, lambda x: (x - before).clamp(min=0), heads
            )

    def weigh(
        self, layer: LayerAttention, location: "BlockLocation", q: Tensor, entries: Tensor
    ) -> Weighed:
        """Attention of q [B, Hq, T, d] to the window. entries [M, R]: exact ones of the step."""
        plain = self.window.layers[layer.index]
        pages = self._pages_of(plain, location)
        if self.chunk is None:
            self.pages[layer.index] = pages
            return self.decoders[layer.index].weigh(plain, self.metadata, q)
        entries = self.chunk.entries(pages, self.slots, entries, self.view.dtype)
        return self.chunk.weigh(plain, q, entries)

    def _pages_of(self, layer: LayerAttention, location: "BlockLocation") -> LayerPages:
        groups = self.window.layout.groups_of_layer(layer.index)
        key = location.stride, *location.units
        if key not in self.offsets:
            self.offsets[key] = location.offsets(self.tables[:, None])
        lengths = self.lengths[:, None].expand(-1, len(groups)).contiguous()
        return LayerPages(location.arena, self.offsets[key], lengths, groups)
