"""Where every number of a token lives: segments of a row, rows of a page, bytes of both.

A *group* is a set of KV heads of one layer that share stored numbers; it owns pages and is evicted
as one. A *row* is what one token stores for one group; a *page* holds `page` rows of one group of
one sequence:

    [codes of segment 0][codes of segment 1]..[channels][scales][positions][metrics]

each block 16-B aligned. A *segment* is consecutive numbers of one latent that share bits and, where
quantised, one scale (and zero) a token. With KIVI keys have a scale and a zero for every number
(*channel*) of a page instead. With a *residual* of R tokens the last 1 to R rows of a sequence wait
unquantised in its *tail*, until it is full and another row comes. Sizes are bytes unless a name
says bits.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvfold.formats.integers import PLANES
from kvfold.spec import CacheSpec, Geometry, Latent, LayerSpec, Side, Tiers, plain_layer

Ints = npt.NDArray[np.int64]

UNIT = 64  # page offsets count units of this many bytes
BLOCK = 16  # every block of a page begins at a multiple of it
POSITION = 4  # bytes of an int32 position
METRIC = 4  # bytes of an fp32 eviction metric
BITS = (16, *sorted(PLANES, reverse=True))  # 16: unquantised, in the storage dtype
RESIDUAL, SUB_GROUP = 128, 32  # of KIVI's own experiments: tokens, and numbers of a value's scale


@dataclass(frozen=True, kw_only=True)
class Segment:
    """`width` numbers from column `start` of the layer's row, `bits` each.

    per_channel: quantised along the rows of a page, not along its own numbers.
    """

    side: Side
    start: int
    width: int
    bits: int
    per_channel: bool = False

    @property
    def quantized(self) -> bool:
        return self.bits < 16

    def row_bytes(self, itemsize: int) -> int:
        """Bytes of one token's codes, every plane of them in whole bytes."""
        if not self.quantized:
            return self.width * itemsize
        return sum(-(-self.width * bits // 8) for bits in PLANES[self.bits])


@dataclass(frozen=True, kw_only=True)
class PageLayout:
    """The blocks of a page. Groups with equal layouts share pages of one byte class.

    itemsize: bytes of an unquantised number; zeros: quantised segments store a zero beside the
    scale (asymmetric); scale: bytes of either, 2 (fp16) or 1 (fp8, symmetric only); tracked: rows
    carry positions and eviction metrics; residual: rows of the tail, whole pages of them, or 0.
    """

    segments: tuple[Segment, ...]
    page: int
    itemsize: int
    zeros: bool
    scale: int
    tracked: bool
    residual: int = 0

    @cached_property
    def tail(self) -> "PageLayout | None":
        """One page of `residual` rows, the same but unquantised."""
        if not self.residual:
            return None
        whole = tuple(replace(x, bits=16, per_channel=False) for x in self.segments)
        return replace(self, segments=whole, page=self.residual, residual=0)

    @cached_property
    def scales_per_row(self) -> int:
        """Numbers a row stores beside its codes: all scales, then all zeros."""
        per_row = sum(x.quantized and not x.per_channel for x in self.segments)
        return per_row * (2 if self.zeros else 1)

    @cached_property
    def channels_bytes(self) -> int:
        """Bytes of a page's scales, then zeros, of every per-channel number."""
        return 2 * self.scale * sum(x.width for x in self.segments if x.per_channel)

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """Bytes of every block: one per segment, then channels, scales, positions, metrics."""
        codes = [self.page * x.row_bytes(self.itemsize) for x in self.segments]
        track = (POSITION, METRIC) if self.tracked else (0, 0)
        rows = [self.page * size for size in (self.scales_per_row * self.scale, *track)]
        return (*codes, self.channels_bytes, *rows)

    @cached_property
    def block_offsets(self) -> tuple[int, ...]:
        """Where every block begins, in bytes from the page's start."""
        padded = [_round_up(size, BLOCK) for size in self.block_sizes]
        return tuple(accumulate(padded, initial=0))[:-1]

    @property
    def scales_offset(self) -> int:
        return self.block_offsets[-3]

    @property
    def positions_offset(self) -> int:
        return self.block_offsets[-2]

    @property
    def metrics_offset(self) -> int:
        return self.block_offsets[-1]

    @cached_property
    def page_bytes(self) -> int:
        return max(UNIT, _round_up(self.block_offsets[-1] + self.block_sizes[-1], UNIT))

    @property
    def page_units(self) -> int:
        return self.page_bytes // UNIT

    @cached_property
    def row_bits(self) -> float:
        """Bits that count as stored: numbers (unquantised ones as 16) and quantiser metadata, a
        page's being shared by its rows."""
        codes = sum(x.width * (x.bits if x.quantized else 16) for x in self.segments)
        return codes + 8 * (self.scale * self.scales_per_row + self.channels_bytes / self.page)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The KV heads `heads` of layer `layer`, and how their rows are laid out."""

    layer: int
    heads: tuple[int, ...]
    layout: PageLayout


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """All groups of a model, layer by layer. Indices into `groups` are group numbers."""

    spec: CacheSpec
    page: int
    groups: tuple[Group, ...]

    @cached_property
    def layer_groups(self) -> tuple[slice, ...]:
        """Group numbers of every layer."""
        counts = [0] * len(self.spec.layers)
        for group in self.groups:
            counts[group.layer] += 1
        ends = list(accumulate(counts))
        return tuple(slice(end - count, end) for end, count in zip(ends, counts, strict=True))

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
        """Numbers and quantiser metadata of one token in all layers."""
        return sum(group.layout.row_bits for group in self.groups)

    @cached_property
    def kept_fraction(self) -> float:
        """Bits a token stores over the bits of the uncompressed 16-bit cache."""
        return self.bits_per_token / (16 * self.spec.geometry.full_numbers)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page of every group: what `page` tokens take."""
        return sum(group.layout.page_bytes for group in self.groups)

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
    kivi: bool = False,
    residual: int | None = None,
) -> CacheLayout:
    """Lay out every group of `spec`.

    bits: of every number; None: what each latent plans (with fp8 scales, for its many tiers), and
        16 where it plans nothing.
    sub_group: most quantised numbers that share a scale (None: a whole latent's tier, with KIVI
        SUB_GROUP).
    tracked: rows of all layers, or of those that say so, carry positions and metrics.
    kivi: keys per channel of a page, values per token, both asymmetric (KIVI §3.2-3.3).
    residual: most rows that wait unquantised, whole pages of them (None: none, with KIVI RESIDUAL).
    Raises ValueError for bits, pages or residuals that do not exist, and for what KIVI cannot
    quantise.
    """
    if kivi:
        sub_group = SUB_GROUP if sub_group is None else sub_group
        residual = RESIDUAL if residual is None else residual
    if page < 1:
        raise ValueError(f"page must be at least 1 row, got {page}")
    if sub_group is not None and sub_group < 8:
        raise ValueError(f"sub_group must be at least 8 numbers, got {sub_group}")
    if kivi:
        _check_kivi(spec)
    if residual is not None:
        _check_residual(residual, page, spec, bits)
    if isinstance(tracked, bool):
        tracked = (tracked,) * len(spec.layers)
    groups = []
    for index, layer in enumerate(spec.layers):
        for heads in layer.groups():
            segments = tuple(
                segment
                for latent in layer.latents
                if set(latent.heads) <= set(heads)
                for segment in _segments(layer, latent, tiers(latent, bits), sub_group, kivi)
            )
            layout = PageLayout(
                segments=segments,
                page=page,
                itemsize=itemsize,
                zeros=zeros or kivi,
                scale=1 if bits is None and spec.planned and not zeros else 2,
                tracked=tracked[index],
                residual=residual or 0,
            )
            groups.append(Group(layer=index, heads=heads, layout=layout))
    return CacheLayout(spec=spec, page=page, groups=tuple(groups))


def _check_residual(residual: int, page: int, spec: CacheSpec, bits: int | None) -> None:
    if bits == 16 or (bits is None and not spec.planned):
        raise ValueError(
            f"residual={residual}: tokens wait in 16 bits until they are packed, but bits={bits} "
            "packs none: set bits to 8 or fewer, or leave residual out"
        )
    if residual < page or residual % page:
        raise ValueError(
            f"residual must be whole pages of {page} rows, which are packed together, got"
            f" {residual}: take {max(residual // page, 1) * page}, or pages of another size"
        )


def _check_kivi(spec: CacheSpec) -> None:
    for layer in spec.layers:
        for latent in layer.key_latents:
            if latent.side == "kv":
                what = "one latent for keys and values (recipe small)"
            elif layer.keys == "pre" and len(latent.heads) > 1:
                what = "key latents of several heads before RoPE (recipes lorc, palu-g, palu-j)"
            else:
                continue
            raise ValueError(
                f"kivi=True needs keys of their own, by head, but this model stores {what}: leave "
                "kivi out, or compress with a recipe that keeps keys per head, such as fast"
            )


def tiers(latent: Latent, bits: int | None) -> Tiers:
    """(numbers, bits) of a latent, from its first number on."""
    found = latent.tiers or ((latent.rank, 16),) if bits is None else ((latent.rank, bits),)
    for _, number in found:
        if number not in BITS:
            raise ValueError(f"bits must be one of {', '.join(map(str, BITS))}; got {number}")
    if sum(width for width, _ in found) != latent.rank:
        raise ValueError(f"tiers {found} do not add up to rank {latent.rank}")
    return found


def _segments(
    layer: LayerSpec,
    latent: Latent,
    tiers: Sequence[tuple[int, int]],
    sub_group: int | None,
    kivi: bool,
) -> list[Segment]:
    """A latent's tiers, cut into sub-groups of nearly equal width; nothing for rank 0. KIVI's keys
    stay whole, since each of their numbers has a scale."""
    found, start = [], layer.columns(latent).start
    per_channel = kivi and latent.side == "k"
    for width, bits in tiers:
        count = 1 if sub_group is None or bits == 16 or per_channel else -(-width // sub_group)
        for i in range(count):
            size = width * (i + 1) // count - width * i // count
            if size:
                found.append(
                    Segment(
                        side=latent.side,
                        start=start,
                        width=size,
                        bits=bits,
                        per_channel=per_channel,
                    )
                )
            start += size
    return found


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
