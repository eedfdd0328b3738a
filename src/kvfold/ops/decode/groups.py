"""A layer's groups of rows in score space as the decode kernels read them."""

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
    """A layer's groups as the kernel reads them.

    table int32 [G, 8]: key and value width, words from row to row of keys and of values, words to
    the first value, fp16s to the first scale and from row to row of scales, first query head.
    widths: the widest key and value; bits: of keys and of values; align: words that divide all of
    the rows' lengths.
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
        """Whether all groups are as wide as that."""
        return self.narrowest == self.widths == (keys, values)


def unread(groups: Sequence[Group]) -> str | None:
    """Why the kernels do not read these groups' rows; None where they do: rows of a KV head each,
    of 16, 8 or 4 bits a side, with a scale a side, in whole 16-bit words."""
    for group in groups:
        if len(group.heads) > 1:
            return "rows that KV heads share: the kernels read rows of one"
        sides = [segment.side for segment in group.layout.segments]
        if "kv" in sides:
            return "keys and values in one latent: the kernels read either by itself"
        if sides not in ([], ["k"], ["v"], ["k", "v"]):
            return "several scales or widths of bits a side: the kernels read one"
    if len({group.layout.has_zero_points for group in groups if group.layout.scales_per_row}) > 1:
        return "zeros in some groups: the kernels read them in all or in none"
    each = {side: [x for group in groups for x in segments_of(group, side)] for side in SIDES}
    return support.unread("decode", groups, each)


def segments_of(group: Group, side: str) -> list[Segment]:
    return [segment for segment in group.layout.segments if segment.side == side]


@lru_cache(maxsize=4096)
def decode_groups(groups: tuple[Group, ...], queries: int, device: torch.device) -> DecodeGroups:
    """queries: query heads of a KV head."""
    rows = []
    for group in groups:
        layout = group.layout
        found = {
            x.side: (x.width, x.row_bytes // 2, block.offset // 2)
            for x, block in zip(layout.segments, layout.blocks.codes, strict=True)
        }
        (key, key_row, _), (value, value_row, start) = (found.get(x, (0, 0, 0)) for x in SIDES)
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
