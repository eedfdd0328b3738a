"""Rows as kernels read them piece by piece: numbers of one latent and one precision.

Shapes: G groups of a layer, Hk KV heads, N query heads of each, V pieces of values, L precisions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import gcd

import torch
from torch import Tensor

from kvfold.layout import Side
from kvfold.layout.pages import Group, Segment
from kvfold.ops.common.plan import padded_width

CODES = (8, 4, 2)  # precisions that kernels unpack, besides 16 bits as they are
TILE = {16: 64, 8: 64, 4: 64, 2: 16}  # most 16-bit words of a row that a program of values takes
WEIGHTS = 1024  # what a row's weights cost a program of values, in bits of its tile
Forms = tuple[tuple[int, int], ...]  # (bits, words of a tile) of every precision


@dataclass(frozen=True)
class Place:
    """Where a segment's numbers lie in a group's pages: words from row to row and to the first row;
    scales from row to row, to the first row's, and from there to its zero."""

    words: int
    start: int
    scale_row: int
    scale: int
    zero: int

    @classmethod
    def of(cls, group: Group, segment: Segment) -> "Place":
        layout = group.layout
        index = layout.segments.index(segment)
        first, *rest = layout.metadata_indices[index] or (0,)
        scales = layout.blocks.scales.offset // layout.scale
        return cls(
            words=segment.row_bytes // 2,
            start=layout.blocks.codes[index].offset // 2,
            scale_row=layout.scales_per_row,
            scale=scales + first,
            zero=rest[0] - first if rest else 0,
        )


@dataclass(frozen=True, eq=False)
class Pieces:
    """One side of a layer's rows.

    table int32 [., .]: of keys `KEY_FIELDS` a line, then `FORM_FIELDS` for every form; of values
    `VALUE_FIELDS` a piece. forms: all that occur, the highest precision first; align: words
    that divide all rows' lengths; cost int32: bits of a row in a line's tiles; scale: bytes of a
    scale.
    """

    table: Tensor
    forms: Forms
    align: int
    cost: Tensor
    scale: int
    zeros: bool


def latents_of(group: Group, side: Side) -> list[list[Segment]]:
    """The segments of every latent of a side, in order."""
    found: dict[tuple[int, ...], list[Segment]] = {}
    for segment in group.layout.segments:
        if side in segment.side:
            found.setdefault(segment.heads, []).append(segment)
    return list(found.values())


def unread(op: str, groups: Sequence[Group], *, joint: bool = False) -> str | None:
    """Why these pages are not read piece by piece; None where they are: keys and values apart (or
    `joint`), each in 16 bits or in codes of CODES, once each, in whole 16-bit words."""
    for layout in {group.layout: None for group in groups}:
        for x in layout.segments:
            if x.side == "kv" and not joint:
                return "keys and values in one latent: the kernels read either by itself"
            if x.per_channel or op not in x.format.kernels:
                return f"format {x.format.name}, of which the kernels read no pieces"
            if x.bits not in (16, *CODES):
                return f"numbers in {x.bits} bits: the kernels read 16, 8, 4 and 2"
            if x.bits == 16 and layout.itemsize != 2:
                return f"numbers of {8 * layout.itemsize} bits: the kernels read 16, and codes"
            if x.width * x.bits % 16:
                return f"{x.width} numbers in {x.bits} bits: the kernels read whole 16-bit words"
    for side in ("k", "v"):
        bits = {x.bits for each in groups for x in each.layout.segments if side in x.side}
        if 16 in bits and len(bits) > 1:
            return "16 bits beside codes: the kernels read codes, or 16 bits"
        for group in groups:
            if any(len({x.bits for x in own}) < len(own) for own in latents_of(group, side)):
                return "several scales for numbers of as many bits: the kernels read one"
    if len({group.layout.has_zero_points for group in groups if group.layout.scales_per_row}) > 1:
        return "zeros in some groups: the kernels read them in all or in none"
    each = len(groups[0].heads)
    if not all(x.heads == tuple(range(i * each, (i + 1) * each)) for i, x in enumerate(groups)):
        return "groups of unequal or scattered heads: the kernels read as many in a row of each"
    served = [own[0].heads for group in groups for own in latents_of(group, "v")]
    if not alike(served):
        return "value latents of unequal or scattered heads: the kernels read as many of each"
    return None


def alike(served: Sequence[tuple[int, ...]]) -> bool:
    """Whether all serve equally many consecutive heads."""
    consecutive = all(b == a + 1 for heads in served for a, b in pairwise(heads))
    return consecutive and len({len(heads) for heads in served}) <= 1


KEY_FIELDS = 3  # group, first query head, scales from row to row
FORM_FIELDS = 6  # words from row to row and to the first, numbers, first column, scale, zero
VALUE_FIELDS = 11  # see `value_pieces`


@lru_cache(maxsize=4096)
def key_heads(groups: tuple[Group, ...]) -> int:
    """KV heads whose scores a line of keys gives: those of a latent, where all latents of a layer
    serve as many neighbours; else 1."""
    served = [own[0].heads for group in groups for own in latents_of(group, "k")]
    each = len(served[0]) if served and alike(served) else 1
    inside = len(groups[0].heads) % each == 0 and all(x[0] % each == 0 for x in served)
    return each if inside else 1


@lru_cache(maxsize=4096)
def key_pieces(groups: tuple[Group, ...], queries: int, device: torch.device) -> Pieces:
    """Keys of every KV head, in order, or of every `key_heads` of them; queries: query heads of a
    KV head."""
    forms = widest_words(x for y in groups for x in y.layout.segments if x.side == "k")
    lines: dict[int, list[int]] = {}
    each = key_heads(groups)
    for g, group in enumerate(groups):
        own = {head: x for x in latents_of(group, "k") for head in x[0].heads}
        for head in group.heads[::each]:
            found, column = {}, 0
            for x in own.get(head, ()):
                place = Place.of(group, x)
                found[x.bits] = [
                    place.words, place.start, x.width, column, place.scale, place.zero,
                ]  # fmt: skip
                column += x.width
            nothing = [0] * FORM_FIELDS
            runs = [number for bits, _ in forms for number in found.get(bits, nothing)]
            lines[head] = [g, head * queries, group.layout.scales_per_row, *runs]
    table = [lines[head] for head in sorted(lines)]
    tile = sum(16 * words for _, words in forms)
    return _pieces(groups, "k", table, forms, [tile] * len(table), device)


@lru_cache(maxsize=4096)
def value_pieces(groups: tuple[Group, ...], queries: int, device: torch.device) -> Pieces:
    """Values, latent by latent, in tiles of `forms`; queries: query heads of a KV head.

    A line of the table: words from row to row, numbers, words to the first row, scale, scales from
    row to row, zero, group, first query head, first column of the output, form, and whether it is
    its latent's first.
    """
    each = value_heads(groups)
    lines: list[list[int]] = []
    forms: list[tuple[int, int]] = []  # of every line
    for g, group in enumerate(groups):
        own = {x[0].heads: x for x in latents_of(group, "v")}
        served = [group.heads[i : i + each] for i in range(0, len(group.heads), each)]
        for heads in served:
            column, first = 0, 1
            for x in own.get(heads, [None]):
                place = Place(0, 0, 0, 0, 0) if x is None else Place.of(group, x)
                bits, width = (16, 0) if x is None else (x.bits, x.width)
                tile = TILE[bits] * 16 // bits
                for begin in range(0, max(width, 1), tile):
                    own_width = min(tile, width - begin)
                    forms.append((bits, padded_width(own_width * bits // 16)))
                    line = [
                        place.words, own_width, place.start + begin * bits // 16, place.scale,
                        place.scale_row, place.zero, g, heads[0] * queries, column + begin, 0,
                        first,
                    ]  # fmt: skip
                    lines.append(line)
                    first = 0
                column += width
    if any(bits < 16 for bits, _ in forms):  # what stores nothing is read as codes are
        forms = [(8, 16) if bits == 16 else (bits, words) for bits, words in forms]
    kinds = tuple(sorted(set(forms), reverse=True))
    for line, form in zip(lines, forms, strict=True):
        line[9] = kinds.index(form)
    return _pieces(groups, "v", lines, kinds, [16 * words + WEIGHTS for _, words in forms], device)


def value_heads(groups: Sequence[Group]) -> int:
    """KV heads of a value latent."""
    served = [len(own[0].heads) for group in groups for own in latents_of(group, "v")]
    return max(served, default=len(groups[0].heads))


@lru_cache(maxsize=4096)
def widest_value(groups: tuple[Group, ...]) -> int:
    """Numbers of the widest value latent."""
    each = (sum(x.width for x in own) for group in groups for own in latents_of(group, "v"))
    return max(each, default=0)


@lru_cache(maxsize=4096)
def equal_values(groups: tuple[Group, ...]) -> bool:
    """Whether every KV head has values, all as wide as the widest."""
    latents = [own for group in groups for own in latents_of(group, "v")]
    served = sum(len(own[0].heads) for own in latents)
    widths = {sum(x.width for x in own) for own in latents}
    return len(widths) == 1 and served == sum(len(group.heads) for group in groups)


def widest_words(segments: Iterable[Segment]) -> Forms:
    """The precisions of segments, the highest first, and as many words of each as hold its widest
    run, a power of two; at least 16, which a product wants."""
    widest: dict[int, int] = {}
    for x in segments:
        widest[x.bits] = max(widest.get(x.bits, 0), padded_width(x.row_bytes // 2))
    return tuple(sorted(widest.items(), reverse=True)) or ((16, 16),)


def _pieces(
    groups: Sequence[Group],
    side: Side,
    table: list[list[int]],
    forms: Forms,
    cost: list[int],
    device: torch.device,
) -> Pieces:
    layouts = [group.layout for group in groups]
    words = [x.row_bytes // 2 for y in layouts for x in y.segments if side in x.side]
    return Pieces(
        table=torch.tensor(table, dtype=torch.int32, device=device),
        forms=forms,
        align=gcd(8, *words),
        cost=torch.tensor(cost, dtype=torch.int32, device=device),
        scale=next((x.scale for x in layouts if x.scales_per_row), 2),
        zeros=any(x.has_zero_points for x in layouts),
    )
