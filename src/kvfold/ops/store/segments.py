"""Build the tables that describe a layer's pages to the kernels of `store`.

Shapes: G groups of the layer; D pieces: a group's segments, each cut into at most `limit` numbers,
or one empty piece if a group stores none; K blocks of a page that `move` copies. Sizes are in
bytes. A piece's fields are the columns of an int32 tensor [D, 13], in the order of `Piece`.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby
from math import gcd

import torch
from torch import Tensor

from kvfold.layout.formats.integers import GAUSSIAN_STEP, PLANES
from kvfold.layout.pages import Group, PageLayout, Segment
from kvfold.ops.common.plan import power_of_two

NONE = -1  # the offset of what a piece does not have
RUN = 512  # numbers of a piece in 16 bits, at most
NARROWEST = 16  # numbers that a tile's row is padded to, at least


@lru_cache(maxsize=4096)
def unserved(groups: tuple[Group, ...]) -> str | None:
    """Why the kernels do not support these pages, or None."""
    if any(group.layout.residual for group in groups):
        return "rows wait unquantised in a tail"
    formats = {x.format for group in groups for x in group.layout.segments}
    unknown = {x.name for x in formats if "store" not in x.kernels}
    return f"no kernel stores format {', '.join(sorted(unknown))}" if unknown else None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """`width` numbers from column `start` of the layer's row, all of one segment of one group.

    Offsets are from the start of the page to row 0; row r follows r * row bytes later (codes) or r
    * scales bytes later (scale and zero point).

    low, high: the planes of `integers.PLANES`. positions, metrics: set for a group's first piece
        only, so that one program writes them; first: whether it is that piece.
    """

    group: int
    start: int = 0
    width: int = 0
    bits: int = 16
    low: int = 0
    high: int = 0
    row: int = 0
    scale: int = NONE
    zero: int = NONE
    scales: int = 0
    positions: int = NONE
    metrics: int = NONE
    first: int = 0


@dataclass(frozen=True)
class Form:
    """A bit width of the layer, with the constants its kernel is compiled for.

    low, high: bits of both planes; gaussian: see `integers.GAUSSIAN_STEP`; bytes: divides the
        offsets and row lengths of all its pieces; columns: divides their columns and the layer's
        row.
    """

    bits: int
    low: int
    high: int
    gaussian: float
    bytes: int
    columns: int


@dataclass(frozen=True)
class Pieces:
    """The table of a layer's pieces, sorted by bit width and width.

    table: int32 [D, 13], see `Piece`. forms: the fields of a `Form` for every bit width of the
        layer. tiles: pieces with the same bit width and padded width, as (index of the form, padded
        width, first piece, number of pieces). width: the largest padded width; row: numbers of the
        layer's row; whole: whether all numbers are quantised; scale: bytes of a scale; zeros:
        whether scales have zero points.
    """

    table: Tensor
    forms: tuple[tuple[int | float, ...], ...]
    tiles: tuple[tuple[int, int, int, int], ...]
    width: int
    row: int
    whole: bool
    scale: int
    zeros: bool


@dataclass(frozen=True)
class Blocks:
    """The blocks of a page that a move copies.

    table: int32 [G, K, 2]: (offset, bytes per token), 0 bytes where a group has fewer blocks. word:
        bytes that divide all of these. width: most words of a token in a block, rounded up to a
        power of two. tracks: int32 [2, G]: offsets of positions and of metrics.
    """

    table: Tensor
    word: int
    width: int
    tracks: Tensor


# Pure functions of what never changes, remembered because every layer asks in every step.
@lru_cache(maxsize=4096)
def plan_pieces(groups: tuple[Group, ...], limit: int, device: torch.device) -> Pieces:
    """Return the table of one layer's pieces. limit: most numbers of a piece, a multiple of 8."""
    pieces = [x for g, group in enumerate(groups) for x in _pieces(g, group.layout, limit)]
    pieces.sort(key=_alike)
    row, bits = sum(x.width for x in pieces), sorted({x.bits for x in pieces})
    forms = tuple(astuple(_form(x, pieces, row)) for x in bits)
    alike = [(key, len([*members])) for key, members in groupby(pieces, _alike)]
    firsts = accumulate((count for _, count in alike), initial=0)
    tiles = zip(alike, firsts, strict=False)
    scaled = [x.layout for x in groups if x.layout.scales_per_row]
    return Pieces(
        table=torch.tensor([astuple(x) for x in pieces], dtype=torch.int32, device=device),
        forms=forms,
        tiles=tuple((bits.index(x), width, at, n) for ((x, width), n), at in tiles),
        width=max(width for (_, width), _ in alike),
        row=row,
        whole=all(x.quantized for group in groups for x in group.layout.segments),
        scale=next((x.scale for x in scaled), 2),
        zeros=any(x.has_zero_points for x in scaled),
    )


@lru_cache(maxsize=4096)
def plan_blocks(groups: tuple[Group, ...], device: torch.device) -> Blocks:
    """Return the table of the blocks of one layer's groups."""
    layouts = [group.layout for group in groups]
    rows = [[(offset, size // x.page) for offset, size in x.blocks.of_rows] for x in layouts]
    word = gcd(8, *(size for row in rows for _, size in row))
    most = max(len(row) for row in rows)
    table = torch.tensor([row + [(0, 0)] * (most - len(row)) for row in rows], dtype=torch.int32)
    blocks = [x.blocks for x in layouts]
    tracks = [[x.positions.offset for x in blocks], [x.metrics.offset for x in blocks]]
    return Blocks(
        table=table.to(device),
        word=word,
        width=power_of_two(int(table[..., 1].max()) // word),
        tracks=torch.tensor(tracks, dtype=torch.int32, device=device),
    )


def _pieces(group: int, layout: PageLayout, limit: int) -> list[Piece]:
    """Return the pieces of a group; the first one also has the group's positions and metrics."""
    blocks, pieces = layout.blocks, []
    for segment, codes, places in zip(
        layout.segments, blocks.codes, layout.metadata_indices, strict=True
    ):
        metadata_offsets = [blocks.scales.offset + place * layout.scale for place in places]
        scale, zero, *_ = *metadata_offsets, NONE, NONE
        most = limit if segment.quantized else min(limit, RUN)
        for begin in range(0, segment.width, most):
            piece = Piece(
                group=group,
                start=segment.start + begin,
                width=min(most, segment.width - begin),
                bits=segment.bits,
                scale=scale,
                zero=zero,
                scales=layout.scales_per_row * layout.scale,
                **_planes(layout, segment, codes.offset, begin),
            )
            pieces.append(piece)
    first, *others = pieces or [Piece(group=group)]
    track = {"positions": blocks.positions.offset, "metrics": blocks.metrics.offset}
    return [replace(first, first=1, **(track if layout.tracked else {})), *others]


def _alike(piece: Piece) -> tuple[int, int]:
    """Return the bit width and padded width of a piece: pieces of one tile share both."""
    return piece.bits, power_of_two(max(NARROWEST, piece.width))


def _planes(layout: PageLayout, segment: Segment, low: int, begin: int) -> dict[str, int]:
    """Return where both planes of codes begin, for the numbers from `begin` on of a segment at
    `low`, and the bytes of the segment's row."""
    first, *more = PLANES[segment.bits] if segment.quantized else (8 * layout.itemsize,)
    high = low - (-segment.width * first // 8)
    return {
        "low": low + begin * first // 8,
        "high": high + begin * more[0] // 8 if more else NONE,
        "row": segment.row_bytes,
    }


def _form(bits: int, pieces: Sequence[Piece], row: int) -> Form:
    same_bits = [x for x in pieces if x.bits == bits]
    low, *high = PLANES.get(bits, (bits,))
    offsets = [y for x in same_bits for y in (x.low, x.high, x.row) if y != NONE]
    return Form(
        bits=bits,
        low=low,
        high=high[0] if high else 0,
        gaussian=GAUSSIAN_STEP.get(bits, 0.0),
        bytes=gcd(16, *offsets),
        columns=gcd(16, row, *(y for x in same_bits for y in (x.start, x.width))),
    )
