"""A layer's groups as the kernel `triton` reads them: widths, strides and offsets in one table.

Shapes: G groups (KV heads) of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import gcd

import torch
from torch import Tensor

from kvfold.layout import SIDES
from kvfold.layout.pages import Group, Segment
from kvfold.ops.common import support


@dataclass(frozen=True)
class DecodeGroups:
    """A layer's groups as `decode_kernel` reads them.

    table int32 [G, 8]: width of a key and of a value in numbers; stride from entry to entry of keys
        and of values, in 16-bit words; offset of the first value, in words; offset of the first
        scale and stride from entry to entry of scales, in fp16 numbers; first query head.
    widths: of the widest key and value; narrowest: of the narrowest ones; bits: of keys and of
        values; zeros: whether entries have zero points; page: entries per page; align: words that
        divide all strides; paired: whether a key's and a value's scale lie side by side in every
        entry.
    """

    table: Tensor
    widths: tuple[int, int]
    bits: tuple[int, int]
    zeros: bool
    page: int
    align: int
    paired: bool
    narrowest: tuple[int, int]

    def exact(self, keys: int, values: int) -> bool:
        """Tell whether all groups have exactly these widths."""
        return self.narrowest == self.widths == (keys, values)


def unsupported_reason(groups: Sequence[Group]) -> str | None:
    """Say why the kernel does not support these groups; None if it does.

    It reads entries of one KV head each, with 16, 8 or 4 bits and one scale for keys and one for
    values, in whole 16-bit words.
    """
    for group in groups:
        if len(group.heads) > 1:
            return "entries that KV heads share: the kernels read entries of one KV head"
        sides = [segment.side for segment in group.layout.segments]
        if "kv" in sides:
            return "keys and values in one latent: the kernels read separate ones"
        if sides not in ([], ["k"], ["v"], ["k", "v"]):
            return "several scales or bit widths for keys or for values: the kernels read one"
    if len({group.layout.has_zero_points for group in groups if group.layout.scales_per_row}) > 1:
        return "zero points in some groups: the kernels read them in all groups or in none"
    segments = {side: [x for group in groups for x in segments_of(group, side)] for side in SIDES}
    return support.unsupported_reason("decode", groups, segments)


def segments_of(group: Group, side: str) -> list[Segment]:
    """Return a group's segments of one side ("k" or "v")."""
    return [segment for segment in group.layout.segments if segment.side == side]


@lru_cache(maxsize=4096)
def decode_groups(groups: tuple[Group, ...], queries: int, device: torch.device) -> DecodeGroups:
    """Collect a layer's groups for the kernel, once. queries: query heads per KV head."""
    rows = []
    for group in groups:
        layout = group.layout
        side_layout = {
            x.side: (x.width, x.row_bytes // 2, block.offset // 2)
            for x, block in zip(layout.segments, layout.blocks.codes, strict=True)
        }
        (key, key_row, _), (value, value_row, start) = (
            side_layout.get(x, (0, 0, 0)) for x in SIDES
        )
        scales = layout.blocks.scales.offset // 2, layout.scales_per_row
        rows.append((key, value, key_row, value_row, start, *scales, group.heads[0] * queries))
    keys, values, *strides = list(zip(*rows, strict=True))[:4]
    key_bits, value_bits = (
        max([s.bits for group in groups for s in segments_of(group, side)], default=16)
        for side in SIDES
    )
    return DecodeGroups(
        table=torch.tensor(rows, dtype=torch.int32, device=device),
        widths=(max(keys), max(values)),
        bits=(key_bits, value_bits),
        zeros=any(group.layout.has_zero_points for group in groups),
        page=groups[0].layout.page,
        align=gcd(16, *chain(*strides)),
        narrowest=(min(keys), min(values)),
        paired=max(key_bits, value_bits) < 16 and all(len(g.layout.segments) == 2 for g in groups),
    )
