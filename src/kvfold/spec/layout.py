"""Where every number of a token lives: segments of a row, rows of a page, bytes of both.

A *group* is a set of KV heads of one layer that share stored numbers; it owns pages and is evicted
as one. A *row* is what one token stores for one group; a *page* holds `page` rows of one group of
one sequence:

    [codes of segment 0][codes of segment 1]..[channels][scales][positions][metrics]

each block 16-B aligned. A *segment* is consecutive numbers of one latent in one format, which share
metadata: in most formats a scale (and a zero) a token; of formats per channel every column of a
page has them, in the block of channels. With a *residual* of R tokens the last 1 to R rows of a
sequence wait unquantised in its *tail*, until it is full and another row comes. Sizes are bytes
unless a name says bits.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvfold.formats import format_of
from kvfold.formats.base import Asked, Format
from kvfold.formats.unquantized import Unquantized
from kvfold.spec import CacheSpec, Geometry, Latent, LayerSpec, Side, Tiers, plain_layer

Ints = npt.NDArray[np.int64]

UNIT = 64  # page offsets count units of this many bytes
BLOCK = 16  # every block of a page begins at a multiple of it
POSITION = 4  # bytes of an int32 position
METRIC = 4  # bytes of an fp32 eviction metric
WHOLE = 16  # bits of a number that is not quantised, in whatever dtype it is stored


@dataclass(frozen=True, kw_only=True)
class Segment:
    """`width` numbers of the latent of `heads` from column `start` of the layer's row."""

    side: Side
    heads: tuple[int, ...]
    start: int
    width: int
    format: Format

    @property
    def bits(self) -> int:
        return self.format.bits

    @property
    def quantized(self) -> bool:
        return self.bits < WHOLE

    @property
    def per_channel(self) -> bool:
        """Whether its metadata are those of a page's columns, not of its own rows."""
        return self.format.per_channel

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's codes."""
        return self.format.row_bytes(self.width)


class Block(NamedTuple):
    """A part of every page: bytes from the page's start, and how many."""

    offset: int
    size: int


class PageBlocks(NamedTuple):
    """A page's blocks in order; codes: one a segment. All but `channels` are as many equal parts as
    the page has rows."""

    codes: tuple[Block, ...]
    channels: Block
    scales: Block
    positions: Block
    metrics: Block

    @property
    def of_rows(self) -> tuple[Block, ...]:
        return (*self.codes, self.scales, self.positions, self.metrics)


@dataclass(frozen=True, kw_only=True)
class PageLayout:
    """The blocks of a page. Groups with equal layouts share pages of one byte class.

    itemsize: bytes of an unquantised number; tracked: rows carry positions and eviction metrics;
    residual: rows of the tail, whole pages of them, or 0.
    """

    segments: tuple[Segment, ...]
    page: int
    itemsize: int
    tracked: bool
    residual: int = 0

    @cached_property
    def tail(self) -> "PageLayout | None":
        """One page of `residual` rows, the same but unquantised."""
        if not self.residual:
            return None
        whole = Unquantized(itemsize=self.itemsize)
        segments = tuple(replace(x, format=whole) for x in self.segments)
        return replace(self, segments=segments, page=self.residual, residual=0)

    @property
    def zeros(self) -> bool:
        """Whether rows or channels carry a zero beside every scale."""
        return any(x.format.num_metadata > 1 for x in self.segments)

    @cached_property
    def metadata(self) -> torch.dtype:
        """Of all scales and zeros of a page; fp16 where there are none."""
        found = {x.format.metadata for x in self.segments if x.format.num_metadata}
        assert len(found) <= 1, f"scales of a page are of one dtype, not {found}"
        return found.pop() if found else torch.float16

    @property
    def scale(self) -> int:
        """Bytes of a scale or a zero."""
        return self.metadata.itemsize

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """Where every segment's metadata stand among a row's scales, or where they begin among the
        page's channels: all scales, then all zeros. Counted in numbers."""
        found: list[tuple[int, ...]] = [()] * len(self.segments)
        ends = {False: 0, True: 0}  # of rows, and per channel
        for number in range(max((x.format.num_metadata for x in self.segments), default=0)):
            for i, x in enumerate(self.segments):
                if number < x.format.num_metadata:
                    found[i] += (ends[x.per_channel],)
                    ends[x.per_channel] += x.width if x.per_channel else 1
        return tuple(found)

    @cached_property
    def scales_per_row(self) -> int:
        """Metadata numbers a row stores beside its codes."""
        return sum(x.format.num_metadata for x in self.segments if not x.per_channel)

    @cached_property
    def blocks(self) -> PageBlocks:
        codes = [self.page * x.row_bytes for x in self.segments]
        track = (POSITION, METRIC) if self.tracked else (0, 0)
        rows = [self.page * size for size in (self.scales_per_row * self.scale, *track)]
        channels = (x.format.num_metadata * x.width for x in self.segments if x.per_channel)
        sizes = [*codes, self.scale * sum(channels), *rows]
        offsets = accumulate((_round_up(size, BLOCK) for size in sizes), initial=0)
        found = [Block(*pair) for pair in zip(offsets, sizes, strict=False)]
        return PageBlocks(tuple(found[: len(codes)]), *found[len(codes) :])

    @cached_property
    def page_bytes(self) -> int:
        last = self.blocks.metrics
        return max(UNIT, _round_up(last.offset + last.size, UNIT))

    @property
    def page_units(self) -> int:
        return self.page_bytes // UNIT

    @cached_property
    def row_bits(self) -> float:
        """Bits that count as stored: numbers (unquantised ones as 16), what is stored beside
        them, and quantiser metadata, a page's being shared by its rows."""
        codes = sum(x.width * x.bits + 8 * x.format.sparse_bytes(x.width) for x in self.segments)
        channels = self.blocks.channels.size / self.page
        return codes + 8 * (self.scale * self.scales_per_row + channels)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The KV heads `heads` of layer `layer`, and how their rows are laid out."""

    layer: int
    heads: tuple[int, ...]
    layout: PageLayout

    def __hash__(self) -> int:
        """Without all of a layout's segments: every layer of a step is looked up by its groups."""
        return hash((self.layer, self.heads, self.layout.page_bytes))


class LayerGroups(tuple[Group, ...]):
    """Of a layer. Their hash is taken once, since every launch looks up what is known of them."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """All groups of a model, layer by layer. Indices into `groups` are group numbers. narrow: of
    the same heads, for rows of unimportant tokens, where these are narrower."""

    spec: CacheSpec
    page: int
    groups: tuple[Group, ...]
    narrow: "CacheLayout | None" = None

    @cached_property
    def layer_groups(self) -> tuple[slice, ...]:
        """Group numbers of every layer."""
        counts = [0] * len(self.spec.layers)
        for group in self.groups:
            counts[group.layer] += 1
        ends = list(accumulate(counts))
        return tuple(slice(end - count, end) for end, count in zip(ends, counts, strict=True))

    @cached_property
    def _by_layer(self) -> tuple[LayerGroups, ...]:
        return tuple(LayerGroups(self.groups[where]) for where in self.layer_groups)

    def of_layer(self, layer: int) -> LayerGroups:
        """The groups of a layer."""
        return self._by_layer[layer]

    @cached_property
    def tracked(self) -> bool:
        return any(group.layout.tracked for group in self.groups)

    @cached_property
    def residual(self) -> int:
        """Rows of every group's tail; 0: there are none."""
        return self.groups[0].layout.residual

    def packed(self, rows: Ints) -> Ints:
        """How many of a group's first `rows` rows (any shape) lie in pages, not in its tail: all
        but the last 1 to `residual`."""
        if not self.residual:
            return rows
        return np.maximum(rows - 1, 0) // self.residual * self.residual

    def most_at(self, row: int) -> int:
        """Most tokens of a sequence that may come in one step from `row` on. Where there are tails
        a step ends where they are full, so that no token sees another's row packed too early."""
        return self.residual - row % self.residual if self.residual else sys.maxsize

    @cached_property
    def bits_per_token(self) -> float:
        """Numbers and quantiser metadata of one token in all layers; on average, where tokens
        differ."""
        if self.narrow is None:
            return sum(self._layer_bits)
        return self.spec.mean(self._layer_bits, self.narrow._layer_bits)

    @cached_property
    def _layer_bits(self) -> list[float]:
        """Of one token in every layer."""
        layers = range(len(self.spec.layers))
        return [sum(group.layout.row_bits for group in self.of_layer(i)) for i in layers]

    @cached_property
    def kept_fraction(self) -> float:
        """Bits a token stores over the bits of the uncompressed 16-bit cache."""
        return self.bits_per_token / (16 * self.spec.geometry.full_numbers)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page of every group: what `page` tokens take."""
        return sum(group.layout.page_bytes for group in self.groups)

    def bytes_for(self, num_slots: int, max_tokens: int) -> int:
        """Of a pool that holds all slots at full length, with room for what slabs lose, and for
        rows of one that become narrow."""
        pages = -(-max_tokens // self.page)
        slot = self.page_bytes * pages + self.tail_bytes
        return int((slot * num_slots + self.spare_page_bytes * pages) * 1.05) + 2**20

    @cached_property
    def spare_page_bytes(self) -> int:
        """Bytes of a narrow page of every group whose rows become narrow together, before their
        wide ones are freed: of the layers with one leader that take most; 0 without narrow rows."""
        if self.narrow is None or self.spec.hybrid is None:
            return 0
        own = [0] * len(self.spec.layers)
        for group in self.narrow.groups:
            own[group.layer] += group.layout.page_bytes
        return max(sum(own[layer] for layer in unit) for unit in self.spec.hybrid.units)

    def wide_rows(self, rows: Ints) -> Ints:
        """How many of `rows` rows of every group [..., G] stay wide: of important tokens, in whole
        pages, since less would free nothing."""
        pages: Ints = np.ceil(self._important * rows / self.page - 1e-9).astype(np.int64)
        return np.minimum(pages * self.page, rows)

    @cached_property
    def _important(self) -> npt.NDArray[np.float64]:
        """The share of tokens that are important, by group [G]."""
        assert self.spec.hybrid is not None, "rows have one width"
        return np.array([self.spec.hybrid.important[group.layer] for group in self.groups])

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of the pages of a sequence of so many tokens, narrow ones where they may be."""
        rows = wide = np.full(len(self.groups), tokens)
        sizes = [group.layout.page_bytes for group in self.groups]
        less = 0
        if self.narrow is not None:
            wide = self.wide_rows(rows)
            narrow = [group.layout.page_bytes for group in self.narrow.groups]
            less = int(-(-(rows - wide) // self.page) @ narrow)
        return int(-(-wide // self.page) @ sizes) + less + self.tail_bytes

    @cached_property
    def tail_bytes(self) -> int:
        """Bytes of the tails of one sequence, which it holds from its first row on."""
        tails = (group.layout.tail for group in self.groups)
        return sum(tail.page_bytes for tail in tails if tail is not None)


def plain_spec(geometry: Geometry) -> CacheSpec:
    """An uncompressed model's spec: one group per KV head, nothing mapped."""
    layer = plain_layer(geometry)
    return CacheSpec(geometry=geometry, layers=(layer,) * geometry.num_layers)


def cache_layout(
    spec: CacheSpec,
    *,
    page: int = 32,
    itemsize: int = 2,
    bits: int | None = None,
    sub_group: int | None = None,
    zeros: bool = False,
    tracked: bool | Sequence[bool] = False,
    format: str = "integers",
    residual: int | None = None,
) -> CacheLayout:
    """Lay out every group of `spec`.

    bits: of every number; None: what each latent plans, and 16 where it plans nothing.
    sub_group: most quantised numbers that share a scale (None: as the format has it, mostly a whole
        latent's tier).
    tracked: rows of all layers, or of those that say so, carry positions and metrics.
    format: how quantised numbers are stored, a name of FORMATS.
    residual: most rows that wait unquantised, whole pages of them (None: as the format has it).
    Raises ValueError for formats, bits, pages or residuals that do not exist, and for what the
    format cannot store.
    """
    chosen = format_of(format)
    sub_group = chosen.sub_group if sub_group is None else sub_group
    residual = chosen.residual if residual is None else residual
    if page < 1:
        raise ValueError(f"page must be at least 1 row, got {page}")
    if sub_group is not None and sub_group < 8:
        raise ValueError(f"sub_group must be at least 8 numbers, got {sub_group}")
    if residual is not None:
        _check_residual(residual, page, spec, bits)
    if isinstance(tracked, bool):
        tracked = (tracked,) * len(spec.layers)

    def segments(layer: LayerSpec, latent: Latent) -> Iterator[Segment]:
        """Nothing for rank 0."""
        if not latent.rank:
            return
        if reason := chosen.refusal(latent.side, layer.keys, len(latent.heads)):
            raise ValueError(reason)
        start = layer.columns(latent).start
        for width, number in tiers(latent, bits, chosen):
            if number == WHOLE:
                found: Format = Unquantized(itemsize=itemsize)
            else:
                asked = Asked(
                    side=latent.side,
                    bits=number,
                    page=page,
                    zeros=zeros,
                    planned=bits is None,
                    codebooks=latent.codebooks,
                )
                found = chosen.of(asked)
            for size in filter(None, found.cut(width, sub_group)):
                yield Segment(
                    side=latent.side, heads=latent.heads, start=start, width=size, format=found
                )
                start += size

    groups = []
    for index, layer in enumerate(spec.layers):
        for heads in layer.groups():
            own = [x for x in layer.latents if set(x.heads) <= set(heads)]
            layout = PageLayout(
                segments=tuple(chain.from_iterable(segments(layer, x) for x in own)),
                page=page,
                itemsize=itemsize,
                tracked=tracked[index],
                residual=residual or 0,
            )
            groups.append(Group(layer=index, heads=heads, layout=layout))
    narrow = None
    if spec.narrow is not None:
        same: dict[str, Any] = {"itemsize": itemsize, "bits": bits, "sub_group": sub_group}
        narrow = cache_layout(spec.narrow, page=page, zeros=zeros, format=format, **same)
    return CacheLayout(spec=spec, page=page, groups=tuple(groups), narrow=narrow)


def _check_residual(residual: int, page: int, spec: CacheSpec, bits: int | None) -> None:
    if bits == WHOLE or (bits is None and not spec.planned):
        raise ValueError(
            f"residual={residual}: tokens wait in 16 bits until they are packed, but bits={bits} "
            "packs none: set bits to 8 or fewer, or leave residual out"
        )
    if residual < page or residual % page:
        raise ValueError(
            f"residual must be whole pages of {page} rows, which are packed together, got"
            f" {residual}: take {max(residual // page, 1) * page}, or pages of another size"
        )


def tiers(latent: Latent, bits: int | None, chosen: type[Format]) -> Tiers:
    """(numbers, bits) of a latent, from its first number on."""
    found = latent.tiers or ((latent.rank, WHOLE),) if bits is None else ((latent.rank, bits),)
    legal = (WHOLE, *chosen.widths)
    for _, number in found:
        if number not in legal:
            raise ValueError(f"bits must be one of {', '.join(map(str, legal))}; got {number}")
    if sum(width for width, _ in found) != latent.rank:
        raise ValueError(f"tiers {found} do not add up to rank {latent.rank}")
    return found


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
