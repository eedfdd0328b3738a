"""Tables of the key and value segments in pages, as the two-pass Triton kernels read them.

A run is the numbers of one latent at one bit width. Keys have one table line per KV head or key
latent, values one per tile.

Shapes: G groups of a layer, Hk KV heads, N query heads per KV head, V tiles of values, L bit
widths.
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

CODES = (8, 4, 2)  # bit widths of codes that the kernels unpack; 16 bits are read as they are
TILE = {16: 64, 8: 64, 4: 64, 2: 16}  # largest value tile per bit width, in 16-bit words per token
WEIGHTS = 1024  # cost of loading a token's attention weights in the value kernel, in bits
Forms = tuple[tuple[int, int], ...]  # (bits, words of a tile) of every bit width


@dataclass(frozen=True)
class Place:
    """Offsets and strides of a segment in a group's pages.

    words, start: stride from token to token and offset of the first, in 16-bit words. scale_row:
        scales per token; scale: offset of the first token's scale; zero: from a scale to its zero
        point, in scales.
    """

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
    """The table of one side (keys or values) of a layer.

    table int32 [lines, fields]: keys have `KEY_FIELDS`, then `FORM_FIELDS` per bit width; values
    have `VALUE_FIELDS`. forms: bit widths that occur, the highest first; align: divides the entry
    lengths, in words; cost int32 [lines]: bits read per token; scale: bytes of a scale; zeros:
    whether there are zero points.
    """

    table: Tensor
    forms: Forms
    align: int
    cost: Tensor
    scale: int
    zeros: bool


def latents_of(group: Group, side: Side) -> list[list[Segment]]:
    """The segments of every latent of one side, in order."""
    latents: dict[tuple[int, ...], list[Segment]] = {}
    for segment in group.layout.segments:
        if side in segment.side:
            latents.setdefault(segment.heads, []).append(segment)
    return list(latents.values())


def unsupported_reason(op: str, groups: Sequence[Group], *, joint: bool = False) -> str | None:
    """Why the kernels cannot read these pages tile by tile, or None.

    They read keys and values that are stored apart (or `joint`), in 16 bits or codes of CODES bits,
    each bit width at most once per latent, in whole 16-bit words.
    """
    for layout in {group.layout: None for group in groups}:
        for x in layout.segments:
            if x.side == "kv" and not joint:
                return "keys and values share a latent: the kernels read them from separate latents"
            if x.per_channel or op not in x.format.kernels:
                return f"format {x.format.name}: the kernels do not read it"
            if x.bits not in (16, *CODES):
                return f"numbers in {x.bits} bits: the kernels read 16, 8, 4 and 2"
            if x.bits == 16 and layout.itemsize != 2:
                return f"numbers of {8 * layout.itemsize} bits: the kernels read 16, and codes"
            if x.width * x.bits % 16:
                return f"{x.width} numbers in {x.bits} bits: the kernels read whole 16-bit words"
    for side in ("k", "v"):
        bits = {x.bits for group in groups for x in group.layout.segments if side in x.side}
        if 16 in bits and len(bits) > 1:
            return "16-bit numbers beside codes: the kernels read all codes or all 16 bits"
        for group in groups:
            if any(len({y.bits for y in x}) < len(x) for x in latents_of(group, side)):
                return "several scales for one bit width of a latent: the kernels read one"
    if len({group.layout.has_zero_points for group in groups if group.layout.scales_per_row}) > 1:
        return "zero points in some groups only: the kernels read them in all or in none"
    heads_per_group = len(groups[0].heads)
    firsts = range(0, heads_per_group * len(groups), heads_per_group)
    expected = [tuple(range(first, first + heads_per_group)) for first in firsts]
    if [group.heads for group in groups] != expected:
        return "groups of unequal or scattered heads: the kernels need equally many adjacent heads"
    served = [latent[0].heads for group in groups for latent in latents_of(group, "v")]
    if not alike(served):
        return (
            "value latents of unequal or scattered heads: the kernels need equally many adjacent"
            " heads"
        )
    return None


def alike(served: Sequence[tuple[int, ...]]) -> bool:
    """Whether all serve equally many adjacent heads."""
    consecutive = all(b == a + 1 for heads in served for a, b in pairwise(heads))
    return consecutive and len({len(heads) for heads in served}) <= 1


KEY_FIELDS = 3  # group, first query head, scales per token
FORM_FIELDS = 6  # words per token, words to the first, numbers, first column, scale, zero point
VALUE_FIELDS = 11  # see `value_pieces`


@lru_cache(maxsize=4096)
def key_heads(groups: tuple[Group, ...]) -> int:
    """Number of KV heads scored by one line of the key table: the heads that share a key latent, if
    all latents serve equally many adjacent heads; otherwise 1."""
    served = [latent[0].heads for group in groups for latent in latents_of(group, "k")]
    heads_per_latent = len(served[0]) if served and alike(served) else 1
    aligned = len(groups[0].heads) % heads_per_latent == 0 and all(
        x[0] % heads_per_latent == 0 for x in served
    )
    return heads_per_latent if aligned else 1


@lru_cache(maxsize=4096)
def key_pieces(groups: tuple[Group, ...], queries: int, device: torch.device) -> Pieces:
    """The key table: one line per KV head, or per `key_heads` KV heads, in head order. queries:
    query heads per KV head."""
    forms = widest_words(x for y in groups for x in y.layout.segments if x.side == "k")
    lines: dict[int, list[int]] = {}
    heads_per_line = key_heads(groups)
    for g, group in enumerate(groups):
        latents = {head: x for x in latents_of(group, "k") for head in x[0].heads}
        for head in group.heads[::heads_per_line]:
            fields, column = {}, 0
            for x in latents.get(head, ()):
                place = Place.of(group, x)
                fields[x.bits] = [
                    place.words, place.start, x.width, column, place.scale, place.zero,
                ]  # fmt: skip
                column += x.width
            nothing = [0] * FORM_FIELDS
            runs = [number for bits, _ in forms for number in fields.get(bits, nothing)]
            lines[head] = [g, head * queries, group.layout.scales_per_row, *runs]
    table = [lines[head] for head in sorted(lines)]
    tile = sum(16 * words for _, words in forms)
    return _pieces(groups, "k", table, forms, [tile] * len(table), device)


@lru_cache(maxsize=4096)
def value_pieces(groups: tuple[Group, ...], queries: int, device: torch.device) -> Pieces:
    """The value table: every value latent, in tiles of `forms`. queries: query heads per KV head.

    Fields of a line: words per token, numbers, words to the first token, offset of the scale,
        scales per token, offset of the zero point, group, first query head, first output column,
        index of the bit width in `forms`, and whether it is the latent's first tile.
    """
    heads_per_latent = value_heads(groups)
    lines: list[list[int]] = []
    forms: list[tuple[int, int]] = []  # of every line
    for g, group in enumerate(groups):
        latents = {x[0].heads: x for x in latents_of(group, "v")}
        served = [
            group.heads[i : i + heads_per_latent]
            for i in range(0, len(group.heads), heads_per_latent)
        ]
        for heads in served:
            column, first = 0, 1
            for x in latents.get(heads, [None]):
                place = Place(0, 0, 0, 0, 0) if x is None else Place.of(group, x)
                bits, width = (16, 0) if x is None else (x.bits, x.width)
                tile = TILE[bits] * 16 // bits
                for begin in range(0, max(width, 1), tile):
                    tile_width = min(tile, width - begin)
                    forms.append((bits, padded_width(tile_width * bits // 16)))
                    line = [
                        place.words, tile_width, place.start + begin * bits // 16, place.scale,
                        place.scale_row, place.zero, g, heads[0] * queries, column + begin, 0,
                        first,
                    ]  # fmt: skip
                    lines.append(line)
                    first = 0
                column += width
    if any(bits < 16 for bits, _ in forms):  # heads without values too, so that one kernel serves
        forms = [(8, 16) if bits == 16 else (bits, words) for bits, words in forms]
    kinds = tuple(sorted(set(forms), reverse=True))
    for line, form in zip(lines, forms, strict=True):
        line[9] = kinds.index(form)
    return _pieces(groups, "v", lines, kinds, [16 * words + WEIGHTS for _, words in forms], device)


def value_heads(groups: Sequence[Group]) -> int:
    """Number of KV heads that share a value latent."""
    served = [len(latent[0].heads) for group in groups for latent in latents_of(group, "v")]
    return max(served, default=len(groups[0].heads))


@lru_cache(maxsize=4096)
def widest_value(groups: tuple[Group, ...]) -> int:
    """Width of the widest value latent, in numbers."""
    widths = (sum(x.width for x in latent) for group in groups for latent in latents_of(group, "v"))
    return max(widths, default=0)


@lru_cache(maxsize=4096)
def equal_values(groups: tuple[Group, ...]) -> bool:
    """Whether every KV head has values, all of the same width."""
    latents = [latent for group in groups for latent in latents_of(group, "v")]
    served = sum(len(latent[0].heads) for latent in latents)
    widths = {sum(x.width for x in latent) for latent in latents}
    return len(widths) == 1 and served == sum(len(group.heads) for group in groups)


def widest_words(segments: Iterable[Segment]) -> Forms:
    """The bit widths of segments, the highest first, with the 16-bit words of the widest run of
    each, padded to a power of two of at least 16 (the least a matrix product takes)."""
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
