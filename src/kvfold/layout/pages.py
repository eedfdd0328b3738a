"""Page layouts: tier segments of a row, and byte offsets of the blocks of a page. (How many
bits each number has is decided before, by the plan: its bit-width layouts.)

A *group* is a set of KV heads of one layer that share stored numbers; it has its own pages and its
tokens are evicted together. A *row* here is the KV entry of one token in one group. A *page* holds
`page` rows of one group of one sequence:

    [codes of segment 0][codes of segment 1]..[channels][scales][positions][metrics]

Each block is aligned to 16 bytes. A *segment* is a range of consecutive numbers of one latent in
one format, which share metadata: in most formats a scale (and a zero point) per token; in
per-channel formats a scale per column of a page, in the block `channels`. With a *residual* of R
tokens, the last 1 to R rows of a sequence stay unquantised in its *tail* (residual block), until it
is full and another row comes. Sizes are bytes unless a name says bits.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvfold.layout import (
    CacheSpec,
    Geometry,
    Latent,
    LayerSpec,
    Side,
    Tiers,
    plain_layer,
)
from kvfold.layout.formats import format_of
from kvfold.layout.formats.base import Format, FormatRequest
from kvfold.layout.formats.unquantized import Unquantized

Ints = npt.NDArray[np.int64]

UNIT = 64  # page offsets count units of this many bytes
BLOCK = 16  # alignment of the blocks of a page
POSITION = 4  # bytes of an int32 position
METRIC = 4  # bytes of an fp32 eviction metric
WINDOW_PAGE = 32  # tokens of a page of an exact window
UNQUANTIZED_BITS = 16  # nominal bits of an unquantised number, whatever its dtype


@dataclass(frozen=True, kw_only=True)
class Segment:
    """`width` numbers in one format, of the latent of `heads`, from column `start` of the layer's
    row."""

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
        return self.bits < UNQUANTIZED_BITS

    @property
    def per_channel(self) -> bool:
        """Whether scales belong to the columns of a page instead of its rows."""
        return self.format.per_channel

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes of one token."""
        return self.format.row_bytes(self.width)


class Block(NamedTuple):
    """A part of a page: offset from the page's start, and size, in bytes."""

    offset: int
    size: int


class PageBlocks(NamedTuple):
    """The blocks of a page in order. codes: one block per segment. Every block but `channels` is
    divided equally between the rows of the page."""

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
    """Where the bytes of a page are: its blocks. Groups with equal layouts use pages of the same
    byte class.

    itemsize: bytes of an unquantised number.
    tracked: rows have positions and eviction metrics.
    residual: rows of the residual block, a multiple of the page; 0: there is none.
    least_bytes: size of a page at least, so that pages of two layouts can take each other's place.
    """

    segments: tuple[Segment, ...]
    page: int
    itemsize: int
    tracked: bool
    residual: int = 0
    least_bytes: int = field(default=UNIT, repr=False)

    @cached_property
    def residual_block(self) -> "PageLayout | None":
        """Layout of the residual block: one unquantised page of `residual` rows; None without a
        residual."""
        if not self.residual:
            return None
        unquantized = Unquantized(itemsize=self.itemsize)
        segments = tuple(replace(x, format=unquantized) for x in self.segments)
        return replace(self, segments=segments, page=self.residual, residual=0)

    @property
    def has_zero_points(self) -> bool:
        """Whether rows or channels store a zero point with each scale."""
        return any(x.format.num_metadata > 1 for x in self.segments)

    @cached_property
    def metadata(self) -> torch.dtype:
        """The dtype of all scales and zero points of a page; fp16 if there are none."""
        dtypes = {x.format.metadata for x in self.segments if x.format.num_metadata}
        assert len(dtypes) <= 1, f"scales of a page are of one dtype, not {dtypes}"
        return dtypes.pop() if dtypes else torch.float16

    @property
    def scale(self) -> int:
        """Bytes of one scale or zero point."""
        return self.metadata.itemsize

    @cached_property
    def metadata_indices(self) -> tuple[tuple[int, ...], ...]:
        """Per segment, the indices of its metadata in the scales of a row, or their first indices
        in the channels of a page: all scales come first, then all zero points."""
        indices: list[tuple[int, ...]] = [()] * len(self.segments)
        ends = {False: 0, True: 0}  # numbers so far, per row and per channel
        for number in range(max((x.format.num_metadata for x in self.segments), default=0)):
            for i, x in enumerate(self.segments):
                if number < x.format.num_metadata:
                    indices[i] += (ends[x.per_channel],)
                    ends[x.per_channel] += x.width if x.per_channel else 1
        return tuple(indices)

    @cached_property
    def scales_per_row(self) -> int:
        """Metadata numbers (scales and zero points) per row."""
        return sum(x.format.num_metadata for x in self.segments if not x.per_channel)

    @cached_property
    def blocks(self) -> PageBlocks:
        codes = [self.page * x.row_bytes for x in self.segments]
        track = (POSITION, METRIC) if self.tracked else (0, 0)
        rows = [self.page * size for size in (self.scales_per_row * self.scale, *track)]
        channels = (x.format.num_metadata * x.width for x in self.segments if x.per_channel)
        sizes = [*codes, self.scale * sum(channels), *rows]
        offsets = accumulate((_round_up(size, BLOCK) for size in sizes), initial=0)
        blocks = [Block(*pair) for pair in zip(offsets, sizes, strict=False)]
        return PageBlocks(tuple(blocks[: len(codes)]), *blocks[len(codes) :])

    @cached_property
    def page_bytes(self) -> int:
        last = self.blocks.metrics
        return max(self.least_bytes, _round_up(last.offset + last.size, UNIT))

    @property
    def page_units(self) -> int:
        return self.page_bytes // UNIT

    @cached_property
    def row_bits(self) -> float:
        """Stored bits per row: numbers (unquantised ones count 16 bits), sparse outliers, and
        metadata; the channels of a page are divided by its rows."""
        codes = sum(x.width * x.bits + 8 * x.format.sparse_bytes(x.width) for x in self.segments)
        channels = self.blocks.channels.size / self.page
        return codes + 8 * (self.scale * self.scales_per_row + channels)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The KV heads `heads` of layer `layer`, and the page layout of their rows."""

    layer: int
    heads: tuple[int, ...]
    layout: PageLayout

    def __hash__(self) -> int:
        """Leaves out the layout's segments, because each layer of a step is looked up by its
        groups."""
        return hash((self.layer, self.heads, self.layout.page_bytes))


class LayerGroups(tuple[Group, ...]):
    """The groups of one layer. Caches its hash, because every kernel launch looks up its plan by
    it."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(cls, groups: Iterable[Group]) -> tuple[Group, ...]:
        """The groups as a tuple, unchanged if they are one."""
        return groups if isinstance(groups, tuple) else cls(groups)


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The page layouts of all groups of a model, layer by layer. An index into `groups` is a group
    number.

    coarse: layout of the same groups for the rows of the coarse pool: of lower rank (unimportant
        tokens), or of fewer bits (`with_coarse_bits`); None if all tokens store the same.
    window: last tokens of a sequence that are also kept as the model computed them; 0: none.
    exact: layout of the pages that keep them (`with_window`).
    """

    spec: CacheSpec
    page: int
    groups: tuple[Group, ...]
    coarse: "CacheLayout | None" = None
    window: int = 0
    exact: "CacheLayout | None" = None

    @cached_property
    def layer_groups(self) -> tuple[slice, ...]:
        """Group numbers of each layer."""
        counts = [0] * len(self.spec.layers)
        for group in self.groups:
            counts[group.layer] += 1
        ends = list(accumulate(counts))
        return tuple(slice(end - count, end) for end, count in zip(ends, counts, strict=True))

    @cached_property
    def _by_layer(self) -> tuple[LayerGroups, ...]:
        return tuple(LayerGroups(self.groups[groups]) for groups in self.layer_groups)

    def groups_of_layer(self, layer: int) -> LayerGroups:
        """The groups of one layer."""
        return self._by_layer[layer]

    @cached_property
    def tracked(self) -> bool:
        return any(group.layout.tracked for group in self.groups)

    @cached_property
    def residual(self) -> int:
        """Rows of each group's residual block; 0: there is none."""
        return self.groups[0].layout.residual

    def num_quantized(self, rows: Ints) -> Ints:
        """How many of a group's first `rows` rows (any shape) are quantised in pages: all but the
        last 1 to `residual`, which are in the residual block."""
        if not self.residual:
            return rows
        return np.maximum(rows - 1, 0) // self.residual * self.residual

    def max_tokens_in_step(self, row: int) -> int:
        """Most tokens that one step may append to a sequence of `row` rows. With a residual a step
        ends where the residual block is full, so that no token attends to rows that were quantised
        too early."""
        return self.residual - row % self.residual if self.residual else sys.maxsize

    @cached_property
    def bits_per_token(self) -> float:
        """Stored bits of one token in all layers, metadata included; the average if tokens
        differ, before any is demoted to fewer bits."""
        if self.coarse is None or self.spec.hybrid is None:
            return sum(self.layer_bits)
        return self.spec.mean_per_token(self.layer_bits, self.coarse.layer_bits)

    @cached_property
    def layer_bits(self) -> list[float]:
        """Stored bits of one token, per layer."""
        layers = range(len(self.spec.layers))
        return [sum(group.layout.row_bits for group in self.groups_of_layer(i)) for i in layers]

    @cached_property
    def kept_fraction(self) -> float:
        """Stored bits of a token over those of the uncompressed 16-bit cache."""
        return self.bits_per_token / (16 * self.spec.geometry.full_numbers)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page per group: the memory of `page` tokens."""
        return sum(group.layout.page_bytes for group in self.groups)

    def bytes_for(self, num_slots: int, max_tokens: int) -> int:
        """Bytes of a pool that holds `num_slots` sequences of `max_tokens` tokens, with the windows
        of these and of the padding slot."""
        return self.page_bytes_for(num_slots, max_tokens) + self.window_bytes * (num_slots + 1)

    def page_bytes_for(self, num_slots: int, max_tokens: int) -> int:
        """Bytes of pages for `num_slots` sequences of `max_tokens` tokens, with a margin for slabs,
        and for one sequence whose rows are being demoted to the low rank."""
        pages = -(-max_tokens // self.page)
        slot = self.page_bytes * pages + self.residual_bytes
        return int((slot * num_slots + self.spare_page_bytes * pages) * 1.05) + 2**20

    @cached_property
    def spare_page_bytes(self) -> int:
        """Temporary bytes per page while rows are demoted to the low rank: pages for their low-rank
        rows are allocated before the full-rank pages are freed. The largest set of layers that are
        demoted together counts; 0 if all tokens store the same."""
        if self.coarse is None or self.spec.hybrid is None:
            return 0
        layer_bytes = [0] * len(self.spec.layers)
        for group in self.coarse.groups:
            layer_bytes[group.layer] += group.layout.page_bytes
        return max(
            sum(layer_bytes[layer] for layer in unit) for unit in self.spec.hybrid.leader_sets
        )

    def num_full_rank(self, rows: Ints) -> Ints:
        """How many of `rows` rows per group [..., G] keep the full rank: those of important tokens,
        rounded up to whole pages, since a partial page would free nothing."""
        pages: Ints = np.ceil(self._important * rows / self.page - 1e-9).astype(np.int64)
        return np.minimum(pages * self.page, rows)

    @cached_property
    def _important(self) -> npt.NDArray[np.float64]:
        """Share of important tokens per group [G]."""
        assert self.spec.hybrid is not None, "rows have one width"
        return np.array([self.spec.hybrid.important[group.layer] for group in self.groups])

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of the pages of a sequence of `tokens` tokens, with low-rank rows where they are
        possible."""
        rows = full_rank = np.full(len(self.groups), tokens)
        sizes = [group.layout.page_bytes for group in self.groups]
        low_rank_bytes = 0
        if self.coarse is not None and self.spec.hybrid is not None:
            full_rank = self.num_full_rank(rows)
            low_rank_sizes = [group.layout.page_bytes for group in self.coarse.groups]
            low_rank_bytes = int(-(-(rows - full_rank) // self.page) @ low_rank_sizes)
        beside = self.residual_bytes + self.window_bytes
        return int(-(-full_rank // self.page) @ sizes) + low_rank_bytes + beside

    @cached_property
    def residual_bytes(self) -> int:
        """Bytes of the residual blocks of one sequence, which it holds from its first row on."""
        tails = (group.layout.residual_block for group in self.groups)
        return sum(tail.page_bytes for tail in tails if tail is not None)

    @cached_property
    def window_bytes(self) -> int:
        """Bytes of the window of one sequence, which its slot has from the start."""
        if self.exact is None:
            return 0
        return -(-self.window // self.exact.page) * self.exact.page_bytes


def plain_spec(geometry: Geometry) -> CacheSpec:
    """The spec of an uncompressed model: one group per KV head, full keys and values."""
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
    """Compute the page layout of each group of `spec`.

    bits: of each number; None: the planned bits, and 16 for latents without a plan.
    sub_group: most quantised numbers that share a scale (None: the format's default, mostly a whole
        tier of a latent).
    tracked: whether rows have positions and metrics, for all layers or per layer.
    format: how quantised numbers are stored, a name of FORMATS.
    residual: most rows that stay unquantised, a multiple of the page (None: the format's default).

    Raises ValueError for unknown formats, bits, pages or residuals, and for what the format cannot
    store.
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
        """The segments of a latent; none for rank 0."""
        if not latent.rank:
            return
        if reason := chosen.unsupported_reason(latent.side, layer.keys, len(latent.heads)):
            raise ValueError(reason)
        start = layer.columns(latent).start
        for width, tier_bits in tiers(latent, bits, chosen):
            if tier_bits == UNQUANTIZED_BITS:
                number_format: Format = Unquantized(itemsize=itemsize)
            else:
                request = FormatRequest(
                    side=latent.side,
                    bits=tier_bits,
                    page=page,
                    zeros=zeros,
                    planned=bits is None,
                    codebooks=latent.codebooks,
                )
                number_format = chosen.for_request(request)
            for size in filter(None, number_format.segment_widths(width, sub_group)):
                yield Segment(
                    side=latent.side,
                    heads=latent.heads,
                    start=start,
                    width=size,
                    format=number_format,
                )
                start += size

    def page_layout(layer: LayerSpec, heads: tuple[int, ...], tracked: bool) -> PageLayout:
        latents = [x for x in layer.latents if set(x.heads) <= set(heads)]
        return PageLayout(
            segments=tuple(chain.from_iterable(segments(layer, x) for x in latents)),
            page=page,
            itemsize=itemsize,
            tracked=tracked,
            residual=residual or 0,
        )

    groups = []
    layouts: dict[tuple[LayerSpec, bool], dict[tuple[int, ...], PageLayout]] = {}
    for index, layer in enumerate(spec.layers):
        key = layer, tracked[index]
        if key not in layouts:  # layers that store alike share page layouts
            layouts[key] = {x: page_layout(layer, x, tracked[index]) for x in layer.groups()}
        groups += [Group(layer=index, heads=x, layout=y) for x, y in layouts[key].items()]
    coarse = None
    if spec.low_rank is not None:
        settings: dict[str, Any] = {"itemsize": itemsize, "bits": bits, "sub_group": sub_group}
        coarse = cache_layout(spec.low_rank, page=page, zeros=zeros, format=format, **settings)
    return CacheLayout(spec=spec, page=page, groups=tuple(groups), coarse=coarse)


def with_coarse_bits(fine: CacheLayout, coarse: CacheLayout) -> CacheLayout:
    """`fine` with `coarse`, which stores the same numbers in fewer bits and has more rows a page.

    Pages of both take as many bytes, the larger of the two, so that a coarse page can take the
    place of a fine one.
    """
    assert coarse.page % fine.page == 0 and coarse.spec == fine.spec, "not the same rows"
    sizes = [
        max(a.layout.page_bytes, b.layout.page_bytes)
        for a, b in zip(fine.groups, coarse.groups, strict=True)
    ]

    def padded(layout: CacheLayout) -> CacheLayout:
        groups = (
            replace(x, layout=replace(x.layout, least_bytes=size))
            for x, size in zip(layout.groups, sizes, strict=True)
        )
        return replace(layout, groups=tuple(groups))

    return replace(padded(fine), coarse=padded(coarse))


def with_window(
    layout: CacheLayout, tokens: int, itemsize: int, page: int = WINDOW_PAGE
) -> CacheLayout:
    """`layout` with the last `tokens` tokens of a sequence kept as the model computed them, too, in
    numbers of `itemsize` bytes. page: tokens of a page of these."""
    geometry = layout.spec.geometry
    spec = CacheSpec(geometry=geometry, layers=(plain_layer(geometry),) * len(layout.spec.layers))
    exact = cache_layout(spec, page=page, itemsize=itemsize, bits=UNQUANTIZED_BITS)
    return replace(layout, window=tokens, exact=exact)


def _check_residual(residual: int, page: int, spec: CacheSpec, bits: int | None) -> None:
    if bits == UNQUANTIZED_BITS or (bits is None and not spec.planned):
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
    """(numbers, bits) of a latent, in order."""
    pairs = (
        latent.tiers or ((latent.rank, UNQUANTIZED_BITS),)
        if bits is None
        else ((latent.rank, bits),)
    )
    legal = (UNQUANTIZED_BITS, *chosen.widths)
    for _, tier_bits in pairs:
        if tier_bits not in legal:
            raise ValueError(f"bits must be one of {', '.join(map(str, legal))}; got {tier_bits}")
    if sum(width for width, _ in pairs) != latent.rank:
        raise ValueError(f"tiers {pairs} do not add up to rank {latent.rank}")
    return pairs


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
