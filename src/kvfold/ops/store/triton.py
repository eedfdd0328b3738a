"""Write and read the token entries of one layer: launches of the Triton kernels in `store.kernels`.

Shapes and arguments as in `store`; D pieces of columns (see `segments`). A program handles a tile
of rows and all numbers of one piece, padded to a power of two.
"""

import torch
from torch import Tensor

from kvfold.layout.formats.base import INTS
from kvfold.layout.pages import Group, PageLayout
from kvfold.ops.common.pages import LayerPages, words_of
from kvfold.ops.common.plan import cdiv, power_of_two
from kvfold.ops.common.recording import launch
from kvfold.ops.store.kernels import append_rows, gather_rows, move_rows, track_rows
from kvfold.ops.store.reference import StoredRows
from kvfold.ops.store.segments import plan_blocks, plan_pieces, unserved

WHOLE = 1 << 30  # `append` cuts no quantised segment: its numbers share a scale
OF_WARP = 256  # numbers of a warp, in `append`
CHUNK = 128  # most numbers of a piece, in `gather`
TRACK = 256  # rows of a tile, in `track_rows`
MOVED = 2048  # words of a tile, in `move`


def tile(width: int) -> tuple[int, int]:
    """Return the numbers and warps of a program of `append`, from the widest piece.

    They depend on the layout alone, so that sums are in the same order for any number of tokens.
    One warp sums a row without waiting for others.
    """
    numbers = max(OF_WARP, width)
    return numbers, min(8, numbers // OF_WARP)


def append(
    pages: LayerPages, rows: Tensor, slots: Tensor, index: Tensor, positions: Tensor | None = None
) -> None:
    """Like `reference.append`, bytes included; where two scales are equally good to within fp32's
    rounding the choice may differ."""
    arena, tables, _, groups = pages
    layout, pieces = _layout(groups), plan_pieces(groups, WHOLE, arena.device)
    assert rows.shape[1] == pieces.row, f"rows of {rows.shape[1]} numbers, not {pieces.row}"
    assert layout.itemsize == rows.dtype.itemsize or pieces.whole, (
        f"rows cannot be stored as {rows.dtype}"
    )
    assert not layout.tracked or positions is not None, "tracked rows need positions"
    assert rows.stride(1) == 1 or pieces.row < 2, "rows must be contiguous along their numbers"
    numbers, warps = tile(pieces.width)
    number = len(rows)  # read once: this runs for every layer of every step
    programs = sum(cdiv(number, numbers // width) * count for _, width, _, count in pieces.tiles)
    launch(
        append_rows, (programs,),
        arena, tables, pieces.table, rows.detach(), slots.contiguous(), index,
        positions.contiguous() if positions is not None and layout.tracked else None, number,
        *tables.stride(), rows.stride(0), *index.stride(),
        FORMS=pieces.forms, TILES=pieces.tiles, PAGE=layout.page, SCALE=pieces.scale,
        ZEROS=pieces.zeros, TRACKED=layout.tracked, SIZE=numbers, num_warps=warps,
    )  # fmt: skip


def gather(
    pages: LayerPages, slots: Tensor, lengths: Tensor, dtype: torch.dtype, size: int | None = None
) -> StoredRows:
    """Like `reference.gather`, bit for bit."""
    arena, tables, _, groups = pages
    layout, pieces = _layout(groups), plan_pieces(groups, CHUNK, arena.device)
    assert layout.itemsize == dtype.itemsize or pieces.whole, f"rows are not stored as {dtype}"
    size = int(lengths.max()) if size is None else size
    device, shape = arena.device, (len(slots), len(groups), size)
    out = StoredRows(
        rows=torch.empty(len(slots), size, pieces.row, dtype=dtype, device=device),
        valid=torch.empty(shape, dtype=torch.bool, device=device),
        positions=torch.empty(shape, dtype=torch.int32, device=device),
    )
    launch(
        gather_rows, (len(pieces.table) * cdiv(size, layout.page), len(slots)),
        arena, tables, pieces.table, slots.contiguous(), lengths,
        out.rows, out.valid, out.positions, size, pieces.row, len(groups), len(pieces.table),
        *tables.stride(), *lengths.stride(),
        FORMS=pieces.forms, PAGE=layout.page, SCALE=pieces.scale, ZEROS=pieces.zeros,
        TRACKED=layout.tracked, ROWS=power_of_two(layout.page), WIDTH=pieces.width,
    )  # fmt: skip
    return out


def move(pages: LayerPages, slots: Tensor, group: Tensor, source: Tensor, target: Tensor) -> None:
    """Like `ops.store.move`. Never waits for the device."""
    arena, tables, _, groups = pages
    blocks = plan_blocks(groups, arena.device)
    number, rows = blocks.table.shape[1], max(1, MOVED // blocks.width)
    launch(
        move_rows, (cdiv(len(slots), rows), number),
        words_of(arena, INTS[blocks.word]), tables, blocks.table,
        *(x.contiguous() for x in (slots, group, source, target)), len(slots), number,
        *tables.stride(),
        PAGE=_layout(groups).page, WORD=blocks.word, ROWS=rows, WIDTH=blocks.width,
    )  # fmt: skip


def add_metrics(pages: LayerPages, slots: Tensor, values: Tensor, valid: Tensor) -> None:
    """Like `ops.store.add_metrics`."""
    _track(pages, slots, valid, _tracks(pages)[1], values.float().contiguous(), True)


def read_tracked(
    pages: LayerPages, slots: Tensor, lengths: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `ops.store.read_tracked`."""
    valid = torch.arange(size, device=pages.arena.device) < lengths[..., None]
    tracks = [torch.empty_like(valid, dtype=dtype) for dtype in (torch.int32, torch.float32)]
    for offsets, values in zip(_tracks(pages), tracks, strict=True):
        _track(pages, slots, valid, offsets, values, False)
    positions, metrics = tracks
    return metrics, positions, valid


def _track(
    pages: LayerPages, slots: Tensor, valid: Tensor, offsets: Tensor, values: Tensor, add: bool
) -> None:
    """Add values [B, G, T] to the block at `offsets` [G], or read that block into `values`."""
    launch(
        track_rows, (cdiv(valid.shape[2], TRACK), *valid.shape[1::-1]),
        words_of(pages.arena, values.dtype), pages.tables, offsets,
        slots.contiguous(), valid.contiguous(), values, valid.shape[2], *pages.tables.stride(),
        PAGE=_layout(pages.groups).page, ADD=add, ROWS=TRACK,
    )  # fmt: skip


def _tracks(pages: LayerPages) -> Tensor:
    """Return offsets int32 [2, G] of positions and of metrics."""
    assert _layout(pages.groups).tracked, "untracked rows have neither positions nor metrics"
    return plan_blocks(pages.groups, pages.arena.device).tracks


def _layout(groups: tuple[Group, ...]) -> PageLayout:
    """Return the page layout of the first group; all groups share everything but the segments."""
    assert unserved(groups) is None, unserved(groups)
    return groups[0].layout
