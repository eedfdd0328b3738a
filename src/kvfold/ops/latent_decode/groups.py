"""A layer's latents as the kernel `triton` reads them: widths, strides and offsets in two tables.

Shapes as in `latent_decode`; V value latents of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from kvfold.layout import SIDES, LayerSpec, Side
from kvfold.layout.pages import Group, Segment
from kvfold.ops.common import support
from kvfold.ops.common.pages import owner_of
from kvfold.ops.common.pieces import alike
from kvfold.ops.common.plan import padded_width

Layer = tuple[LayerSpec, tuple[Group, ...]]
WIDEST = 512  # most numbers of a latent that the kernels can hold on chip


@dataclass(frozen=True, eq=False)
class LatentGroups:
    """A layer's latents as the kernels read them.

    keys int32 [Hk, 8] and values int32 [V, 8]: both have the stride from entry to entry in 16-bit
        words, width in numbers, offset of the first entry in words; offset of its scale, stride
        from entry to entry of scales, and offset from a scale to its zero point, in fp16 numbers.
        Then keys have the offset of the positions in int32 numbers and the group; values the group
        and the first query head.
    widths and narrowest: widest and narrowest key and value; bits: of keys and of values; zeros:
        whether entries have zero points; tracked: whether they store positions; page: entries per
        page; align: words that divide all strides.
    heads: KV heads per group, per value latent and per key latent (if those are consecutive;
        otherwise 1).
    """

    keys: Tensor
    values: Tensor
    widths: tuple[int, int]
    narrowest: tuple[int, int]
    bits: tuple[int, int]
    zeros: bool
    tracked: bool
    page: int
    align: int
    heads: tuple[int, int, int]

    @property
    def pieces(self) -> tuple[int, int]:
        """Code words of a key latent as the sum of two powers of two; the second is 0 if one is no
        larger."""
        words = max(16, self.widths[0] * self.bits[0] // 16)
        first = 1 << (words.bit_length() - 1)
        second = padded_width(words - first) if words > first else 0
        return (first, second) if second < first else (first + second, 0)


def unsupported_reason(layer: LayerSpec, groups: Sequence[Group]) -> str | None:
    """Say why the kernels do not support these pages; None if they do.

    They read keys that are reconstructed before RoPE; latents of 16, 8 or 4 bits for keys and for
    values, at most WIDEST numbers wide, with one scale each, in whole 16-bit words; groups and
    value latents that each serve equally many consecutive heads.
    """
    if layer.keys != "pre_rope":
        return f"keys are stored {layer.keys}: none are reconstructed"
    if not alike([group.heads for group in groups]):
        return (
            "groups of unequal or scattered heads: the kernels read equally many consecutive ones"
        )
    if not alike([latent.heads for latent in layer.value_latents]):
        return "value latents of unequal or scattered heads: the kernels read equally many of each"
    segments = {side: _segments(layer, groups, side) for side in SIDES}
    if any(x is None for of_side in segments.values() for x in of_side):
        return "latents of several scales or bit widths: the kernels read one per latent"
    if (widest := max(latent.rank for latent in layer.latents)) > WIDEST:
        return f"latents of {widest} numbers: the kernels read at most {WIDEST}"
    return support.unsupported_reason("latent_decode", groups, segments)


def _segments(layer: LayerSpec, groups: Sequence[Group], side: Side) -> list[Segment | None]:
    """Return the segment of every latent of a side; None for a latent that is not exactly one
    segment."""
    by_columns = {(x.start, x.width): x for group in groups for x in group.layout.segments}
    latents = layer.key_latents if side == "k" else layer.value_latents
    return [by_columns.get((layer.columns(latent).start, latent.rank)) for latent in latents]


@lru_cache(maxsize=4096)
def latent_groups(
    layer: LayerSpec, groups: tuple[Group, ...], queries: int, device: torch.device
) -> LatentGroups:
    """Collect a layer's latents for the kernels, once. queries: query heads per KV head."""
    key_segments, value_segments = (_segments(layer, groups, side) for side in SIDES)
    owner = owner_of(groups)
    keys = {
        head: (
            *_where(groups[owner[head]], segment),
            groups[owner[head]].layout.blocks.positions.offset // 4,
            owner[head],
        )
        for latent, segment in zip(layer.key_latents, key_segments, strict=True)
        for head in latent.heads
    }
    values = [
        (*_where(groups[owner[x.heads[0]]], segment), owner[x.heads[0]], x.heads[0] * queries)
        for x, segment in zip(layer.value_latents, value_segments, strict=True)
    ]
    rows = [keys[head] for head in sorted(keys)], sorted(values, key=lambda row: row[-1])
    strides = [row[0] for side in rows for row in side]
    widths = [[row[1] for row in side] for side in rows]
    layout, served = groups[0].layout, [latent.heads for latent in layer.key_latents]
    return LatentGroups(
        keys=torch.tensor(rows[0], dtype=torch.int32, device=device),
        values=torch.tensor(rows[1], dtype=torch.int32, device=device),
        widths=(max(widths[0]), max(widths[1])),
        narrowest=(min(widths[0]), min(widths[1])),
        bits=(_bits(key_segments), _bits(value_segments)),
        zeros=any(group.layout.has_zero_points for group in groups),
        tracked=layout.tracked,
        page=layout.page,
        align=gcd(16, *strides),
        heads=(
            len(groups[0].heads),
            len(layer.value_latents[0].heads),
            len(served[0]) if alike(served) else 1,
        ),
    )


def _bits(segments: Sequence[Segment | None]) -> int:
    return max(x.bits for x in segments if x)


def _where(group: Group, segment: Segment | None) -> tuple[int, ...]:
    """The first six numbers of a latent's row in `LatentGroups.keys` and `values`."""
    assert segment is not None, "the kernels do not support this layer: see `unsupported_reason`"
    layout = group.layout
    index = list(layout.segments).index(segment)
    coded = [x.quantized for x in layout.segments]
    scale = layout.blocks.scales.offset // 2 + sum(coded[:index])
    words = segment.width * segment.bits // 16
    start = layout.blocks.codes[index].offset // 2
    return words, segment.width, start, scale, layout.scales_per_row, sum(coded)
