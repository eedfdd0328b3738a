"""Attention of one new token a sequence over its pages: the decode step's hot loop.

Shapes: B sequences, G groups of the layer, Hq query heads, S slots, n pages of the longest group.
Direct rows only: what is stored is in score space (`plain`, `post` and `absorbed` keys), and a
group is one KV head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfold.ops.backend import use_triton
from kvfold.ops.common.attention import attention
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.store.reference import gather
from kvfold.spec.layout import Group, Segment

if TYPE_CHECKING:
    from kvfold.ops.decode.triton import DecodePlan


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


def supports(groups: Sequence[Group]) -> bool:
    """Whether `decode` has a kernel for these pages: per-head rows of 16, 8 or 4 bits, a scale a
    side, in whole 16-bit words."""
    found = {side: {s.bits for g in groups for s in _side(g, side)} for side in ("k", "v")}
    return (
        all(len(bits) <= 1 and bits <= {16, 8, 4} for bits in found.values())
        and all(len(group.heads) == 1 and _plain(group) for group in groups)
        and len({group.layout.zeros for group in groups if group.layout.scales_per_row}) <= 1
    )


def _side(group: Group, side: str) -> list[Segment]:
    return [segment for segment in group.layout.segments if segment.side == side]


def _plain(group: Group) -> bool:
    layout = group.layout
    sides = [segment.side for segment in layout.segments]
    whole = all(x.quantized for x in layout.segments)
    return (
        (layout.itemsize == 2 or whole)
        and sides in ([], ["k"], ["v"], ["k", "v"])
        and layout.known_to("decode")
        and not any(x.width * min(x.bits, 16) % 16 for x in layout.segments)
        and (layout.scale == 2 or not any(x.quantized for x in layout.segments))
    )


@lru_cache(maxsize=4096)
def decode_groups(groups: tuple[Group, ...], queries: int, device: torch.device) -> DecodeGroups:
    """queries: query heads of a KV head."""
    rows, widths, strides = [], [], []
    for group in groups:
        layout = group.layout
        blocks = dict(zip([s.side for s in layout.segments], layout.block_offsets, strict=False))
        sizes = {s.side: s for s in layout.segments}
        width = [sizes[side].width if side in sizes else 0 for side in ("k", "v")]
        stride = [sizes[side].row_bytes // 2 if side in sizes else 0 for side in ("k", "v")]
        scales = layout.blocks.scales.offset // 2, layout.scales_per_row
        first = group.heads[0] * queries
        rows.append([*width, *stride, blocks.get("v", 0) // 2, *scales, first])
        widths.append(width)
        strides += stride
    align = next(n for n in (16, 8, 4, 2, 1) if all(stride % n == 0 for stride in strides))
    bits = [
        max([s.bits for g in groups for s in _side(g, side)], default=16) for side in ("k", "v")
    ]
    return DecodeGroups(
        table=torch.tensor(rows, dtype=torch.int32, device=device),
        widths=(max(k for k, _ in widths), max(v for _, v in widths)),
        bits=(bits[0], bits[1]),
        zeros=any(group.layout.zeros for group in groups),
        page=groups[0].layout.page,
        align=align,
        narrowest=(min(k for k, _ in widths), min(v for _, v in widths)),
        paired=max(bits) < 16 and all(len(g.layout.segments) == 2 for g in groups),
    )


def has_kernel(layers: Sequence[Sequence[Group]], device_type: str) -> bool:
    """Whether `decode` runs as a kernel on all of these layers, planned together."""
    alike = len({len(groups) for groups in layers}) == 1
    return alike and use_triton(device_type) and all(map(supports, layers))


def plan_layers(
    layers: Sequence[Sequence[Group]], lengths: Tensor, queries: int
) -> "list[DecodePlan]":
    """How a step's work is cut, all layers at once, where `has_kernel`: what `decode` takes.

    lengths int [B, groups of all layers], of the sequences `decode` is given, the step's own rows
    included; queries: query heads of a KV head.
    """
    from kvfold.ops.decode import triton as decode_triton

    return decode_triton.plan_layers(layers, lengths, queries)


def decode(
    q: Tensor,
    arena: Tensor,
    tables: Tensor,
    lengths: Tensor,
    groups: Sequence[Group],
    slots: Tensor,
    scale: float,
    plan: "DecodePlan | None" = None,
) -> Tensor:
    """softmax(q k^T * scale) v over the rows of every group.

    q [B, Hq, widest key rank], zeros beyond a head's own rank; arena uint8; tables int32 [S, G, n];
    lengths int [S, G]; slots int64 [B]; plan: of `plan_layers`, else made here. Returns [B, Hq,
    widest value rank], 0 beyond a head's own rank and for a group without rows.
    """
    if use_triton(arena.device.type) and supports(groups):
        from kvfold.ops.decode import triton as decode_triton

        return decode_triton.decode(q, arena, tables, lengths, groups, slots, scale, plan)[0]
    return decode_reference(q, arena, tables, lengths, groups, slots, scale)


def decode_reference(
    q: Tensor,
    arena: Tensor,
    tables: Tensor,
    lengths: Tensor,
    groups: Sequence[Group],
    slots: Tensor,
    scale: float,
) -> Tensor:
    """`decode`, gathering all rows."""
    counts = lengths[slots]
    pages = LayerPages(arena, tables, lengths, tuple(groups))
    stored = gather(pages, slots, counts, q.dtype)
    k = _spread(stored.rows, groups, "k", q.shape[-1])
    v = _spread(stored.rows, groups, "v", None)
    order = torch.tensor([g.heads[0] for g in groups], device=q.device).argsort()
    k, v = k[:, order], v[:, order]
    empty = (counts[:, order] == 0)[..., None, None]
    mask = (stored.valid[:, order, None] | empty).repeat_interleave(q.shape[1] // len(groups), 1)
    if not mask.shape[-1]:
        return q.new_zeros(*q.shape[:2], v.shape[-1])
    out, _ = attention(q[:, :, None], k, v, mask, scale)
    return out[:, :, 0]


def _spread(rows: Tensor, groups: Sequence[Group], side: str, width: int | None) -> Tensor:
    """One side's columns of rows [B, T, R] as [B, G, T, width]."""
    segments = [_side(group, side) for group in groups]
    if width is None:
        width = max((sum(s.width for s in found) for found in segments), default=0)
    out = rows.new_zeros(rows.shape[0], len(groups), rows.shape[1], width)
    for g, found in enumerate(segments):
        for s in found:
            begin = s.start - found[0].start
            out[:, g, :, begin : begin + s.width] = rows[..., s.start : s.start + s.width]
    return out
