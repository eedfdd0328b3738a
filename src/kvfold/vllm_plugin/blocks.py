"""Another engine's blocks as kvfold's pages: what its block tables say, in the words of `ops`.

A block of an engine holds `page` tokens of a layer. Here it is the pages of the layer's groups, one
after another, so that the engine's buffer is an arena as it is, and a group's page is found from
the engine's block number alone:

    buffer: .. [block b of layer i: page of group 0 | page of group 1 | ..] .. [block b + 1: ..] ..

Shapes: B requests of a step, N its tokens, n blocks of the longest request, G groups of a layer, R
numbers of a row, Hq query heads, W numbers that W_O takes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvfold.attention.backend import AttentionBackend, Task
from kvfold.attention.base import LayerAttention
from kvfold.attention.fallback import Fallback
from kvfold.attention.metadata import AttentionMetadata
from kvfold.attention.numba_decode import NumbaDecode
from kvfold.attention.selector import select, warn_of_fallback
from kvfold.attention.triton_decode import LatentDecode, TritonDecode
from kvfold.attention.triton_prefill import TritonPrefill
from kvfold.layout.pages import UNIT, CacheLayout, Group
from kvfold.ops import store
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.common.plan import cdiv

# In order of preference, as in `attention.selector`, which says why one does not serve a layer.
DECODE: tuple[type[AttentionBackend], ...] = (TritonDecode, LatentDecode, NumbaDecode, Fallback)
PREFILL: tuple[type[AttentionBackend], ...] = (TritonPrefill, Fallback)
LONG = 1024  # tokens of a chunk whose tiles fill a GPU


@dataclass(frozen=True, eq=False)
class Step:
    """What an engine says of a step, in which the first `decodes` requests have one token each.

    tables int32 [B, n] block numbers; lengths int32 [B] rows, the step's own included; slots int64
    [N] where each token's row goes, block * page + row (negative: nowhere). On the host: starts
    [B + 1] first tokens of requests; most [B]: lengths, or more; None in a graph.
    """

    tables: Tensor
    lengths: Tensor
    slots: Tensor
    decodes: int
    starts: Sequence[int]
    most: Sequence[int] | None


@dataclass(eq=False)
class BlockView:
    """Blocks as backends see a cache: a `CacheView`, of one step where there is one."""

    layout: CacheLayout
    dtype: torch.dtype
    device: torch.device
    max_tokens: int
    step: Step | None = None
    pages: Mapping[int, LayerPages] = field(default_factory=dict)

    observing = None

    def lengths(self, slots: Tensor, groups: Tensor) -> Tensor:
        """Equal for all groups."""
        assert self.step is not None
        return self.step.lengths[slots][:, None].expand(-1, len(groups)).contiguous()


class BlockAttention:
    """Attention of some of a model's layers over an engine's blocks: what all steps share."""

    def __init__(self, layers: Sequence[LayerAttention], view: BlockView) -> None:
        self.layers, self.view = {layer.index: layer for layer in layers}, view
        self.places: dict[int, Place] = {}
        self.decode = choose(layers, view.layout, view.device.type, view.dtype, decode=True)
        self.prefill = choose(layers, view.layout, view.device.type, view.dtype, decode=False)
        self.backend_factories: dict[type[AttentionBackend], Callable[..., AttentionBackend]] = {}
        for backend in {*self.decode.values(), *self.prefill.values()}:
            decoded = [x for x in layers if self.decode[x.index] is backend]
            self.backend_factories[backend] = backend.prepare(view, decoded, None)

    def begin(self, step: Step) -> "BlockContext":
        return BlockContext(self, step)

    def place(self, layer: int, cache: Tensor) -> "Place":
        """Of a layer's blocks, which are an engine's for good."""
        found = self.places.get(layer)
        if found is None or found.begins != cache.data_ptr() or found.blocks != cache.shape[0]:
            found = self.places[layer] = Place.of(cache, self.view.layout.groups_of_layer(layer))
        return found

    @torch.inference_mode()
    def warm_up(self, most: int) -> None:
        """Compile what runs in steps that decode up to `most` requests beside a prompt's chunk, a
        short one or a long one, of which an engine has no graphs; on blocks of its own."""
        groups = self.view.layout.groups_of_layer
        alike = {tuple(y.layout for y in groups(i)): x for i, x in self.layers.items()}
        for layer in alike.values():
            for i in range(most.bit_length()):
                self._try(layer, 1 << i, 2)
            self._try(layer, 1, min(LONG, self.view.max_tokens - 1))
        self.places.clear()

    def _try(self, layer: LayerAttention, decodes: int, chunk: int) -> None:
        """A step of a layer: so many requests of one token, and a chunk of tokens behind one."""
        view, count = self.view, decodes + chunk
        shape = layer.geometry.num_query_heads, count, layer.key_width
        q = torch.zeros(shape, dtype=view.dtype, device=view.device)
        rows = torch.zeros(count, layer.spec.row_width, dtype=view.dtype, device=view.device)
        self.attend_alone(layer, self.step_of([1] * decodes, chunk, before=1), q, rows)

    def step_of(self, lengths: Sequence[int], chunk: int, before: int = 0) -> Step:
        """A step of one request for each of `lengths`, which decodes its last row, and of a chunk
        of a prompt behind `before` rows. All read the same blocks, whose rows the chunk stores;
        those of the others go nowhere."""
        page, on = self.view.layout.page, self.view.device
        every = [*lengths, before + chunk]
        blocks = cdiv(max(every), page)
        nowhere = torch.full((len(lengths),), -1)
        slots = torch.cat((nowhere, page + torch.arange(before, before + chunk)))
        return Step(
            tables=torch.arange(1, blocks + 1, dtype=torch.int32, device=on).repeat(len(every), 1),
            lengths=torch.tensor(every, dtype=torch.int32, device=on),
            slots=slots.to(on),
            decodes=len(lengths),
            starts=[*range(len(every)), len(lengths) + chunk],
            most=every,
        )

    def attend_alone(self, layer: LayerAttention, step: Step, q: Tensor, rows: Tensor) -> Tensor:
        """What W_O takes [N, W] of a layer in a step of `step_of`, on blocks made for it; q and
        rows as of `BlockContext.attend`."""
        groups = self.view.layout.groups_of_layer(layer.index)
        size = sum(group.layout.page_bytes for group in groups)
        blocks = 1 + step.tables.shape[1]
        cache = torch.zeros(blocks, size, dtype=torch.uint8, device=self.view.device)
        out = rows.new_empty(len(rows), layer.output_width)
        self.begin(step).attend(layer, cache, q, rows, out)
        return out


class Place(NamedTuple):
    """Where a layer's blocks lie: their number and first byte, all bytes from it on, units from
    block to block and of every group's page, and offsets of every block's pages as of one sequence,
    int32 [1, G, blocks]."""

    blocks: int
    begins: int
    arena: Tensor
    stride: int
    units: tuple[int, ...]
    tables: Tensor

    @classmethod
    def of(cls, cache: Tensor, groups: tuple[Group, ...]) -> "Place":
        arena, stride = arena_of(cache)
        units = tuple(group.layout.page_units for group in groups)
        tables = _offsets(torch.arange(len(cache), device=arena.device)[None, None], units, stride)
        return cls(len(cache), cache.data_ptr(), arena, stride, units, tables)


def choose(
    layers: Sequence[LayerAttention],
    layout: CacheLayout,
    device_type: str,
    dtype: torch.dtype,
    *,
    decode: bool,
) -> dict[int, type[AttentionBackend]]:
    """The backend of every layer. Touches no device."""
    task = Task(decode=decode, observed=False, device_type=device_type, dtype=dtype)
    groups = [layout.groups_of_layer(x.index) for x in layers]
    among = DECODE if decode else PREFILL
    choices = [select(x, own, task, among) for x, own in zip(layers, groups, strict=True)]
    if decode:
        warn_of_fallback(layers, groups, choices, task)
    return {x.index: y.backend for x, y in zip(layers, choices, strict=True)}


class BlockContext:
    """All layers' attention in one step. Nothing here waits for the device in a step that decodes
    alone, so that a graph can hold it."""

    def __init__(self, attention: BlockAttention, step: Step) -> None:
        view = attention.view
        self.attention, self.step, device = attention, step, view.device
        self.pages: dict[int, LayerPages] = {}
        self.view = BlockView(
            view.layout, view.dtype, device, view.max_tokens, step=step, pages=self.pages
        )
        # The engine's block 0 is nobody's: rows that go nowhere go there.
        self.rows = step.slots.clamp(min=0)
        self.zeros = torch.zeros_like(self.rows)
        self.parts = self._parts()
        self.backends = {x: make(self.view) for x, make in attention.backend_factories.items()}
        self.tables: dict[tuple[int, ...], Tensor] = {}
        self.counts: dict[int, tuple[Tensor, Tensor]] = {}

    @cached_property
    def positions(self) -> Tensor:
        """Of the step's tokens in their sequences, int64 [N]."""
        return torch.cat([part.positions.flatten() for part in self.parts])

    def attend(
        self, layer: LayerAttention, cache: Tensor, q: Tensor, rows: Tensor | None, out: Tensor
    ) -> None:
        """Store rows [N, R] of a layer, None where another layer stored them, whose blocks are
        cache [blocks, ..] of any dtype, and attend with q [Hq, N, .] in score space, into out
        [N, W]."""
        self._store(layer, cache, rows)
        chosen, packed = self.attention, q[None]
        for part in self.parts:
            kind = (chosen.decode if part.decode else chosen.prefill)[layer.index]
            into = out[part.first_token : part.first_token + part.positions.numel()]
            into = into.view(*part.positions.shape, -1)
            outputs = self.backends[kind].attend(layer, part, part.slice_of(packed), into)
            if outputs is not into:
                into.copy_(outputs)

    def _store(self, layer: LayerAttention, cache: Tensor, rows: Tensor | None) -> None:
        groups = self.view.layout.groups_of_layer(layer.index)
        place = self.attention.place(layer.index, cache)
        index, lengths = self._counts(len(groups))
        if rows is not None:
            store.append(
                LayerPages(place.arena, place.tables, lengths, groups), rows, self.zeros, index
            )
        tables = self._tables(place)
        self.pages[layer.index] = LayerPages(place.arena, tables, lengths, groups)

    def _counts(self, groups: int) -> tuple[Tensor, Tensor]:
        """Of every group alike, where new rows go int64 [N, G], and lengths int32 [B, G]; made once
        for all layers with as many."""
        if groups not in self.counts:
            lengths = self.step.lengths[:, None].expand(-1, groups).contiguous()
            self.counts[groups] = self.rows[:, None].expand(-1, groups), lengths
        return self.counts[groups]

    def _tables(self, place: Place) -> Tensor:
        """Offsets of the requests' pages int32 [B, G, n], which layers alike share."""
        key = place.stride, *place.units
        if key not in self.tables:
            self.tables[key] = _offsets(self.step.tables[:, None], place.units, place.stride)
        return self.tables[key]

    def _parts(self) -> list[AttentionMetadata]:
        """Those that decode, then the others one by one, as chunks of a prompt."""
        step = self.step
        requests = len(step.tables)
        parts = [self._part(0, step.decodes, 0, 1)] if step.decodes else []
        for i in range(step.decodes, requests):
            begin, end = step.starts[i], step.starts[i + 1]
            if end > begin:
                parts.append(self._part(i, i + 1, begin, end - begin))
        return parts

    def _part(self, first: int, last: int, begin: int, tokens: int) -> AttentionMetadata:
        """Of requests first..last, of as many tokens each, from token `begin` on."""
        step, view = self.step, self.view
        slots = torch.arange(first, last, device=view.device)
        back = torch.arange(-tokens, 0, device=view.device)
        count, layers = last - first, len(view.layout.spec.layers)
        most = None if step.most is None else np.array(step.most[first:last], dtype=np.int64)
        total = count * view.max_tokens if most is None else int(most.sum())
        groups = max(len(view.layout.groups_of_layer(i)) for i in self.attention.layers)
        return AttentionMetadata(
            first_token=begin,
            slots=slots,
            positions=step.lengths[first:last, None] + back,
            lengths=np.broadcast_to(np.empty(0) if most is None else most, (layers, *_shape(most))),
            rows=total * groups,
            stop=view.max_tokens,
            decode=first < step.decodes,
        )


def _shape(most: np.ndarray | None) -> tuple[int, ...]:
    return (0,) if most is None else most.shape


def arena_of(cache: Tensor) -> tuple[Tensor, int]:
    """The bytes of a layer's blocks cache [blocks, ..], uint8 from its first block on, others
    between them included; and units of 64 bytes from block to block."""
    stride = cache.stride(0) * cache.dtype.itemsize
    inner = cache[0].numel() * cache.dtype.itemsize
    assert cache[0].is_contiguous(), "a block is bytes in a row"
    assert stride % UNIT == 0 and cache.data_ptr() % UNIT == 0, f"blocks of {stride} bytes"
    flat = cache.as_strided(((stride * (len(cache) - 1) + inner) // cache.dtype.itemsize,), (1,))
    return flat.view(torch.uint8), stride // UNIT


def _offsets(blocks: Tensor, units: tuple[int, ...], stride: int) -> Tensor:
    """blocks int [.., 1, n] -> int32 [.., G, n] offsets of their pages, in units."""
    return (blocks * stride + first_pages(units, blocks.device)).int()


@lru_cache(maxsize=256)
def first_pages(units: tuple[int, ...], device: torch.device) -> Tensor:
    """Where the pages of block 0 begin, pages of so many units: int32 [G, 1]. Made once, since a
    graph cannot be captured while the host copies."""
    return torch.tensor([*accumulate(units[:-1], initial=0)], dtype=torch.int32).to(device)[:, None]
