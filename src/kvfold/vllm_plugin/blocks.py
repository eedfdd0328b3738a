"""Use another engine's KV cache blocks as kvfold's pages.

A block of the engine holds `page` tokens of a layer. kvfold sees it as the pages of the layer's
groups, one after another. The engine's buffer then is an arena, and a group's page follows from the
engine's block number alone:

    buffer: .. [block b of layer i: page of group 0 | page of group 1 | ..] .. [block b + 1: ..] ..

Shapes: B requests of a step, N its tokens, n blocks of the longest request, G groups of a layer, R
numbers of a cache entry, Hq query heads, W numbers of the output projection's input.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvfold.attention.backend import AttentionBackend
from kvfold.attention.base import LayerAttention
from kvfold.attention.fallback import Fallback
from kvfold.attention.metadata import AttentionMetadata
from kvfold.attention.selector import Backends
from kvfold.attention.triton_prefill import TritonPrefill
from kvfold.attention.window import ExactTokens
from kvfold.layout.pages import UNIT, CacheLayout, Group
from kvfold.ops import store
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.common.plan import cdiv
from kvfold.ops.common.recording import Recording, Weights, copy
from kvfold.vllm_plugin.block_window import BlockWindow, BlockWindowStep, decoders_of
from kvfold.vllm_plugin.flash import FlashPrefill

# In order of preference; the first that supports a layer is used (`attention.selector`).
PREFILL: tuple[type[AttentionBackend], ...] = (FlashPrefill, TritonPrefill, Fallback)
LONG_CHUNK = 1024  # tokens of a prefill chunk with enough tiles to fill a GPU
# Tokens of a step's prompts up to which launches are repeated. Until the step ends, a recording
# keeps the prompts' entries that it has gathered; with more of them the GPU takes longer than the
# host.
MAX_PROMPT_TOKENS = 1 << 17


@dataclass(frozen=True, eq=False)
class BlockStep:
    """One step of the engine. The first `num_decodes` requests have one new token each.

    tables int32 [B, n]: block numbers.
    lengths int32 [B]: tokens of each request, including those of this step.
    slots int64 [N]: where each new token is stored, block * page + offset; negative: nowhere.
    starts [B + 1]: first token of each request (on the host).
    max_lengths [B]: upper bounds of `lengths` (on the host); None while a graph is captured.
    exact: tables and slots of the blocks with exact tokens, if there is a window.
    """

    tables: Tensor
    lengths: Tensor
    slots: Tensor
    num_decodes: int
    starts: Sequence[int]
    max_lengths: Sequence[int] | None
    exact: "BlockStep | None" = None

    def decodes(self) -> "BlockStep":
        """The step's decoding requests alone, without the lengths that the host knows."""
        return BlockStep(
            tables=self.tables[: self.num_decodes],
            lengths=self.lengths[: self.num_decodes],
            slots=self.slots[: self.num_decodes],
            num_decodes=self.num_decodes,
            starts=self.starts[: self.num_decodes + 1],
            max_lengths=None,
            exact=None if self.exact is None else self.exact.decodes(),
        )


@dataclass(eq=False)
class BlockView:
    """Blocks as attention backends see a cache (a `CacheView`); `step` is set within a step."""

    layout: CacheLayout
    dtype: torch.dtype
    device: torch.device
    max_tokens: int
    step: BlockStep | None = None
    pages: Mapping[int, LayerPages] = field(default_factory=dict)

    observing = None

    def lengths(self, slots: Tensor, groups: Tensor) -> Tensor:
        """Lengths [slots, groups], the same for all groups."""
        assert self.step is not None
        return self.step.lengths[slots][:, None].expand(-1, len(groups)).contiguous()


class BlockAttention:
    """Attention of some of a model's layers over an engine's blocks: what all steps share.

    decode, prefill: backends of decoding requests and of prefill chunks.
    window: if queries see their last tokens exactly. It attends, with `decode` among others, and
        `prefill` tells only whether kernels serve chunks; no launches are recorded.
    locations: by layer, and whether the blocks have exact tokens.
    """

    def __init__(self, layers: Sequence[LayerAttention], view: BlockView) -> None:
        self.layers, self.view = {layer.index: layer for layer in layers}, view
        self.locations: dict[tuple[int, bool], BlockLocation] = {}
        has_window = view.layout.window > 0
        self.decode = Backends(view, layers)
        self.prefill = Backends(view, layers, PREFILL, decode=False)
        self.window = BlockWindow(layers, view, self.decode) if has_window else None
        self.kinds = self._kinds()

    def _kinds(self) -> dict[int, int]:
        """Numbers of layers, equal for those whose attention launches the same kernels. Left out
        are layers of which there is only one, and those of which not all is recorded."""
        kinds: dict[int, Hashable] = {}
        for i, layer in self.layers.items():
            groups = self.view.layout.groups_of_layer(i)
            backends = self.decode.kinds[i], self.prefill.kinds[i]
            stored = store.STORE.which(self.view.device.type, groups)
            replays = [x.replays(layer) for x in backends]
            if self.window is not None:
                replays.append(self.window.replays(layer))
            if stored == "triton" and all(replays):
                pages = tuple((group.heads, group.layout) for group in groups)
                shape = layer.spec, layer.geometry, layer.window, layer.has_sinks, id(layer.rope)
                kinds[i] = (pages, *shape, *backends)
        repeated = [kind for kind, count in Counter(kinds.values()).items() if count > 1]
        return {i: repeated.index(kind) for i, kind in kinds.items() if kind in repeated}

    def begin(self, step: BlockStep) -> "BlockContext":
        return BlockContext(self, step)

    def location(self, layer: int, cache: Tensor, *, exact: bool = False) -> "BlockLocation":
        """Where a layer's blocks are in memory; computed once per buffer. exact: those of exact
        tokens."""
        location = self.locations.get((layer, exact))
        known = None if location is None else (location.data_ptr, location.blocks)
        if location is None or known != (cache.data_ptr(), len(cache)):
            layout = self._layout(exact)
            location = BlockLocation.of(cache, layout.groups_of_layer(layer))
            self.locations[layer, exact] = location
        return location

    def _layout(self, exact: bool) -> CacheLayout:
        layout = self.view.layout.exact if exact else self.view.layout
        assert layout is not None, "the layout has a window"
        return layout

    @torch.inference_mode()
    def warm_up(self, max_num_decodes: int) -> None:
        """Compile the kernels of steps of up to `max_num_decodes` decoding requests, on blocks of
        their own: alone as in a CUDA graph, and beside a short or a long prefill chunk.
        """
        groups = self.view.layout.groups_of_layer
        distinct = {tuple(y.layout for y in groups(i)): x for i, x in self.layers.items()}
        where = self.view.layout, self.view.device.type, self.view.dtype
        for layer in distinct.values():
            has_graphs = all(x.supports_graphs for x in decoders_of(layer, *where))
            for i in range(max_num_decodes.bit_length()):
                self._run_step(layer, 1 << i, 2)
                if has_graphs:
                    self._run_step(layer, 1 << i, 0)
            self._run_step(layer, 1, min(LONG_CHUNK, self.view.max_tokens - 1))
        self.locations.clear()

    def _run_step(self, layer: LayerAttention, num_decodes: int, chunk: int) -> None:
        """Run one layer in a step of `num_decodes` decoding requests and a prefill chunk after one
        token. Without a chunk the host does not know lengths, as while a graph is captured."""
        view, count = self.view, num_decodes + chunk
        shape = layer.geometry.num_query_heads, count, layer.key_width
        q = torch.zeros(shape, dtype=view.dtype, device=view.device)
        entries = torch.zeros(count, layer.spec.row_width, dtype=view.dtype, device=view.device)
        step = self.make_step([1] * num_decodes, chunk, before=1)
        if not chunk:
            step = step.decodes()
        exact = None if self.window is None else self._exact_zeros(layer, count)
        self.attend_on_new_blocks(layer, step, q, entries, exact)

    def _exact_zeros(self, layer: LayerAttention, count: int) -> ExactTokens:
        """Exact tokens in one tensor, as vLLM's projections return them."""
        heads = layer.geometry.num_query_heads, *[layer.geometry.num_kv_heads] * 2
        size = count, sum(heads), layer.geometry.head_dim
        both = torch.zeros(size, dtype=self.view.dtype, device=self.view.device)
        return ExactTokens(*(x.transpose(0, 1) for x in both.split(heads, 1)))

    def make_step(self, lengths: Sequence[int], chunk: int, before: int = 0) -> BlockStep:
        """A step for trials: one decoding request per entry of `lengths`, and a prefill chunk after
        `before` tokens.

        All requests read the same blocks. The chunk's tokens are stored there; those of the
        decoding requests are stored nowhere.
        """
        step = self._make_step(lengths, chunk, before, exact=False)
        if self.window is None:
            return step
        return replace(step, exact=self._make_step(lengths, chunk, before, exact=True))

    def _make_step(self, lengths: Sequence[int], chunk: int, before: int, exact: bool) -> BlockStep:
        page, device = self._layout(exact).page, self.view.device
        all_lengths = [*lengths, before + chunk]
        blocks = cdiv(max(all_lengths), page)
        nowhere = torch.full((len(lengths),), -1)
        slots = torch.cat((nowhere, page + torch.arange(before, before + chunk)))
        return BlockStep(
            tables=torch.arange(1, blocks + 1, dtype=torch.int32, device=device).repeat(
                len(all_lengths), 1
            ),
            lengths=torch.tensor(all_lengths, dtype=torch.int32, device=device),
            slots=slots.to(device),
            num_decodes=len(lengths),
            starts=[*range(len(all_lengths)), len(lengths) + chunk],
            max_lengths=all_lengths,
        )

    def attend_on_new_blocks(
        self,
        layer: LayerAttention,
        step: BlockStep,
        q: Tensor,
        entries: Tensor,
        exact: ExactTokens | None = None,
        context: "BlockContext | None" = None,
    ) -> Tensor:
        """The output [N, W] of a layer in a step of `make_step`, on newly allocated blocks. q,
        entries and exact (with a window): as in `BlockContext`. context: of the step, if layers
        share it."""
        context = context or self.begin(step)
        out = entries.new_empty(len(entries), layer.output_width)
        cache = self._new_blocks(layer, step, exact=False)
        if exact is None:
            context.attend(layer, cache, q, entries, out)
        else:
            assert step.exact is not None, "the step has exact blocks"
            caches = cache, self._new_blocks(layer, step.exact, exact=True)
            context.attend_in_window(layer, caches, q, entries, exact, out)
        return out

    def _new_blocks(self, layer: LayerAttention, step: BlockStep, exact: bool) -> Tensor:
        groups = self._layout(exact).groups_of_layer(layer.index)
        size = 1 + step.tables.shape[1], sum(group.layout.page_bytes for group in groups)
        return torch.zeros(size, dtype=torch.uint8, device=self.view.device)


class BlockLocation(NamedTuple):
    """Where a layer's blocks are in memory.

    blocks, data_ptr: their number, and the address of the first one.
    arena: all bytes from the first block on.
    stride: units from one block to the next.
    units: units of each group's page.
    tables int32 [1, G, blocks]: offsets of all blocks' pages, as of one sequence.
    """

    blocks: int
    data_ptr: int
    arena: Tensor
    stride: int
    units: tuple[int, ...]
    tables: Tensor

    @classmethod
    def of(cls, cache: Tensor, groups: tuple[Group, ...]) -> "BlockLocation":
        arena, stride = as_arena(cache)
        units = tuple(group.layout.page_units for group in groups)
        tables = _page_offsets(
            torch.arange(len(cache), device=arena.device)[None, None], units, stride
        )
        return cls(len(cache), cache.data_ptr(), arena, stride, units, tables)

    def offsets(self, blocks: Tensor) -> Tensor:
        """Offsets of the pages of blocks: int [.., 1, n] -> int32 [.., G, n]."""
        return _page_offsets(blocks, self.units, self.stride)


class BlockContext:
    """Attention of all layers in one step. A step that only decodes never waits for the device, so
    that a CUDA graph can capture it."""

    def __init__(self, attention: BlockAttention, step: BlockStep) -> None:
        view = attention.view
        self.attention, self.step, device = attention, step, view.device
        self.pages: dict[int, LayerPages] = {}
        self.view = BlockView(
            view.layout, view.dtype, device, view.max_tokens, step=step, pages=self.pages
        )
        # Block 0 belongs to no request: entries to be stored nowhere are stored there.
        self.slots = step.slots.clamp(min=0)
        self.zeros = torch.zeros_like(self.slots)
        self.parts = self._parts()
        lengths = step.max_lengths or ()  # unknown while a graph is captured, without prompts
        prompts = lengths[step.num_decodes :]
        self.repeats = sum(prompts) <= MAX_PROMPT_TOKENS
        self.recordings: dict[Hashable, Recording] = {}
        self.tables: dict[tuple[int, ...], Tensor] = {}
        self.indices: dict[int, tuple[Tensor, Tensor]] = {}  # by number of groups
        self.window = None
        if attention.window is not None:
            self.window = BlockWindowStep(attention.window, self)
            self.repeats &= attention.window.replays_chunks or not prompts
        else:
            self.decode = attention.decode.begin(self.view)
            self.prefill = attention.prefill.begin(self.view)

    @cached_property
    def positions(self) -> Tensor:
        """Positions of the step's tokens in their sequences, int64 [N]."""
        return torch.cat([part.positions.flatten() for part in self.parts])

    def attend(
        self, layer: LayerAttention, cache: Tensor, q: Tensor, entries: Tensor | None, out: Tensor
    ) -> None:
        """Store a layer's entries and attend, into out [N, W].

        cache [blocks, ..]: the layer's blocks, of any dtype.
        q [Hq, N, .]: queries in score space.
        entries [N, R]: of the step's tokens; None if another layer stores them.
        """
        inputs = [q] if entries is None else [q, entries]
        self.project_and_attend(layer, cache, lambda: (q, entries), inputs, layer.weights, out)

    def attend_in_window(
        self,
        layer: LayerAttention,
        caches: tuple[Tensor, Tensor],
        q: Tensor,
        entries: Tensor,
        exact: ExactTokens,
        out: Tensor,
    ) -> None:
        """Like `attend`, with exact tokens. caches: the layer's blocks of entries and of exact
        tokens."""
        self.project_and_attend(
            layer, caches[0], lambda: (q, entries), [q, entries], layer.weights, out,
            exact, caches[1],
        )  # fmt: skip

    def project_and_attend(
        self,
        layer: LayerAttention,
        cache: Tensor,
        project: Callable[[], tuple[Tensor, Tensor | None]],
        inputs: Sequence[Tensor],
        weights: Weights | None,
        out: Tensor,
        exact: ExactTokens | None = None,
        exact_cache: Tensor | None = None,
    ) -> None:
        """Like `attend`, with the q and entries that `project` returns.

        inputs, weights: all tensors that `project` and attention read. What is computed from them
            is recorded (`ops.common.recording`) and repeated for other layers, unless weights is
            None.
        exact, exact_cache: of a layer with a window, its exact tokens and blocks of them.
        """
        kind = self.attention.kinds.get(layer.index)
        location = self.attention.location(layer.index, cache)
        attend = partial(self._attend, layer, location)
        inputs, arenas = [*inputs, out], [location.arena]
        if exact is not None:
            assert self.window is not None and exact_cache is not None, "the layout has a window"
            exact_location = self.attention.location(layer.index, exact_cache, exact=True)
            attend = partial(self.window.attend, layer, location, exact_location, exact)
            inputs += [exact.queries, exact.keys, exact.values]
            arenas.append(exact_location.arena)
        if kind is None or weights is None or not self.repeats:
            attend(*project(), out)
            return
        apart = range(len(inputs), len(inputs) + len(arenas))
        inputs += arenas
        key = kind, location.blocks, location.stride, len(inputs)
        known = self.recordings.get(key)
        if known is None or not known.replay(inputs, weights):
            with Recording(inputs, weights, apart) as self.recordings[key]:
                attend(*project(), out)

    def _attend(
        self,
        layer: LayerAttention,
        location: BlockLocation,
        q: Tensor,
        entries: Tensor | None,
        out: Tensor,
    ) -> None:
        self.store(layer, location, entries)
        packed = q[None]
        for part in self.parts:
            backends = self.decode if part.decode else self.prefill
            part_out = out[part.first_token : part.first_token + part.positions.numel()]
            part_out = part_out.view(*part.positions.shape, -1)
            outputs = backends[layer.index].attend(layer, part, part.slice_of(packed), part_out)
            if outputs.data_ptr() != part_out.data_ptr():
                copy(part_out, outputs)

    def store(self, layer: LayerAttention, location: BlockLocation, entries: Tensor | None) -> None:
        """Append the step's entries, unless another layer stores them, and set the layer's
        pages."""
        groups = self.view.layout.groups_of_layer(layer.index)
        slots, lengths = self._indices(len(groups))
        if entries is not None:
            all_blocks = LayerPages(location.arena, location.tables, lengths, groups)
            store.append(all_blocks, entries, self.zeros, slots)
        tables = self._tables(location)
        self.pages[layer.index] = LayerPages(location.arena, tables, lengths, groups)

    def _indices(self, groups: int) -> tuple[Tensor, Tensor]:
        """Slots of new entries int64 [N, G] and lengths int32 [B, G], the same for every group.
        Computed once for all layers with that many groups."""
        if groups not in self.indices:
            lengths = self.step.lengths[:, None].expand(-1, groups).contiguous()
            self.indices[groups] = self.slots[:, None].expand(-1, groups), lengths
        return self.indices[groups]

    def _tables(self, location: BlockLocation) -> Tensor:
        """Offsets of the requests' pages int32 [B, G, n]. Layers with the same page sizes share
        them."""
        key = location.stride, *location.units
        if key not in self.tables:
            self.tables[key] = location.offsets(self.step.tables[:, None])
        return self.tables[key]

    def _parts(self) -> list[AttentionMetadata]:
        """One part for all decoding requests, then one for each prefill chunk."""
        step = self.step
        num_requests = len(step.tables)
        parts = [self._part(0, step.num_decodes, 0, 1)] if step.num_decodes else []
        for i in range(step.num_decodes, num_requests):
            begin, end = step.starts[i], step.starts[i + 1]
            if end > begin:
                parts.append(self._part(i, i + 1, begin, end - begin))
        return parts

    def _part(self, first: int, last: int, begin: int, tokens: int) -> AttentionMetadata:
        """The part of requests first..last, of `tokens` tokens each, from token `begin` of the step
        on."""
        step, view = self.step, self.view
        slots = torch.arange(first, last, device=view.device)
        offsets = torch.arange(-tokens, 0, device=view.device)
        count, layers = last - first, len(view.layout.spec.layers)
        bounds, num_entries = np.empty(0), count * view.max_tokens
        if step.max_lengths is not None:
            bounds = np.array(step.max_lengths[first:last], dtype=np.int64)
            num_entries = int(bounds.sum())
        groups = max(len(view.layout.groups_of_layer(i)) for i in self.attention.layers)
        return AttentionMetadata(
            first_token=begin,
            slots=slots,
            positions=step.lengths[first:last, None] + offsets,
            lengths=np.broadcast_to(bounds, (layers, *bounds.shape)),
            rows=num_entries * groups,
            stop=view.max_tokens,
            decode=first < step.num_decodes,
        )


def as_arena(cache: Tensor) -> tuple[Tensor, int]:
    """The bytes of a layer's blocks as one uint8 tensor that begins at the first block, and the
    units of 64 bytes from one block to the next.

    cache [blocks, ..]. The tensor includes bytes of other layers between the blocks.
    """
    stride = cache.stride(0) * cache.dtype.itemsize
    block_bytes = cache[0].numel() * cache.dtype.itemsize
    assert cache[0].is_contiguous(), "a block is bytes in a row"
    assert stride % UNIT == 0 and cache.data_ptr() % UNIT == 0, f"blocks of {stride} bytes"
    spanned = cache.as_strided(
        ((stride * (len(cache) - 1) + block_bytes) // cache.dtype.itemsize,), (1,)
    )
    return spanned.view(torch.uint8), stride // UNIT


def _page_offsets(blocks: Tensor, units: tuple[int, ...], stride: int) -> Tensor:
    """Offsets of the pages of blocks, in units: int [.., 1, n] -> int32 [.., G, n]."""
    return (blocks * stride + first_pages(units, blocks.device)).int()


@lru_cache(maxsize=256)
def first_pages(units: tuple[int, ...], device: torch.device) -> Tensor:
    """Offsets of the pages of block 0, whose groups have pages of `units`: int32 [G, 1].

    Cached, because a graph cannot be captured while data is copied from the host.
    """
    return torch.tensor([*accumulate(units[:-1], initial=0)], dtype=torch.int32).to(device)[:, None]
