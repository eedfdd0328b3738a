"""Rows of one layer into and out of its pages. Triton kernels, one launch a call.

Shapes and arguments as in `store`, whose functions these are; D pieces of columns (see `segments`).
A program handles a tile of rows and all numbers of one piece, padded to a power of two. Per-channel
segments (KIVI) are not supported: `supports` says so.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from kvfold.ops.common.pages import INTS, words_of
from kvfold.ops.common.plan import power_of_two
from kvfold.ops.store.kernels import append_rows, gather_rows, move_rows, track_rows
from kvfold.ops.store.reference import StoredRows
from kvfold.ops.store.segments import Blocks, has_channels, plan_blocks, plan_pieces
from kvfold.spec.layout import Group, PageLayout

WHOLE = 1 << 30  # no segment is cut where it is quantised: its numbers share a scale
CHUNK = 128  # numbers of a piece where it is read
TRACK = 256  # rows of a tile of metrics
MOVED = 2048  # words of a tile of rows that move


def supports(layout: PageLayout) -> bool:
    """Whether these kernels read and write pages of `layout`: all but KIVI's per-channel ones."""
    return not has_channels(layout)


def tile(width: int) -> tuple[int, int]:
    """Rows and warps of a program of `append`: of the layout alone, so that sums are taken in one
    order however many tokens come at once."""
    return max(1, min(32, 256 // width)), max(1, min(8, width // 256))


def append(
    arena: Tensor,
    tables: Tensor,
    groups: Sequence[Group],
    rows: Tensor,
    slots: Tensor,
    index: Tensor,
    positions: Tensor | None = None,
) -> None:
    """Write token i's row of group g as row index[i, g] of sequence slots[i], metric 0.

    As `store.append`, bytes included; where two scales are equally good to within fp32's rounding
    the choice may differ. What a token stores does not depend on the tokens beside it.
    """
    layout, width = _layout(groups), _row_width(groups)
    assert rows.shape[1] == width, f"rows of {rows.shape[1]} numbers, not {width}"
    assert layout.itemsize == rows.dtype.itemsize or _quantized(groups), (
        f"rows cannot be stored as {rows.dtype}"
    )
    assert not layout.tracked or positions is not None, "tracked rows need positions"
    assert rows.stride(1) == 1 or width < 2, "rows must be contiguous along their numbers"
    pieces = plan_pieces(tuple(groups), WHOLE, arena.device)
    num_rows, warps = tile(pieces.width)
    append_rows[(triton.cdiv(len(rows), num_rows), len(pieces.table))](
        arena,
        tables,
        pieces.table,
        rows.detach(),
        slots.contiguous(),
        index,
        positions.contiguous() if positions is not None and layout.tracked else None,
        len(rows),
        *tables.stride(),
        rows.stride(0),
        *index.stride(),
        FORMS=pieces.forms,
        PAGE=layout.page,
        SCALE=layout.scale,
        ZEROS=layout.zeros,
        TRACKED=layout.tracked,
        ROWS=num_rows,
        WIDTH=pieces.width,
        num_warps=warps,
    )


def gather(
    arena: Tensor,
    tables: Tensor,
    groups: Sequence[Group],
    slots: Tensor,
    lengths: Tensor,
    dtype: torch.dtype,
    size: int | None = None,
) -> StoredRows:
    """Read the first lengths[b, g] rows of every group of the sequences `slots`.

    As `store.gather`, bit for bit. With `size` nothing waits for the device.
    """
    layout, width = _layout(groups), _row_width(groups)
    assert layout.itemsize == dtype.itemsize or _quantized(groups), (
        f"rows are not stored as {dtype}"
    )
    size = int(lengths.max()) if size is None else size
    pieces = plan_pieces(tuple(groups), CHUNK, arena.device)
    on, shape = arena.device, (len(slots), len(groups), size)
    found = StoredRows(
        rows=torch.empty(len(slots), size, width, dtype=dtype, device=on),
        valid=torch.empty(shape, dtype=torch.bool, device=on),
        positions=torch.empty(shape, dtype=torch.int32, device=on),
    )
    gather_rows[(len(pieces.table) * triton.cdiv(size, layout.page), len(slots))](
        arena,
        tables,
        pieces.table,
        slots.contiguous(),
        lengths,
        found.rows,
        found.valid,
        found.positions,
        size,
        width,
        len(groups),
        len(pieces.table),
        *tables.stride(),
        *lengths.stride(),
        FORMS=pieces.forms,
        PAGE=layout.page,
        SCALE=layout.scale,
        ZEROS=layout.zeros,
        TRACKED=layout.tracked,
        ROWS=power_of_two(layout.page),
        WIDTH=pieces.width,
    )
    return found


def move(
    arena: Tensor,
    tables: Tensor,
    groups: Sequence[Group],
    slots: Tensor,
    group: Tensor,
    source: Tensor,
    target: Tensor,
) -> None:
    """Copy row source[i] of (slots[i], group[i]) to row target[i] of the same. As `store.move`, but
    it never waits for the device."""
    blocks = plan_blocks(tuple(groups), arena.device)
    number, rows = blocks.table.shape[1], max(1, MOVED // blocks.width)
    move_rows[(triton.cdiv(len(slots), rows), number)](
        words_of(arena, INTS[blocks.word]),
        tables,
        blocks.table,
        *(x.contiguous() for x in (slots, group, source, target)),
        len(slots),
        number,
        *tables.stride(),
        PAGE=_layout(groups).page,
        WORD=blocks.word,
        ROWS=rows,
        WIDTH=blocks.width,
    )


def add_metrics(
    arena: Tensor,
    tables: Tensor,
    groups: Sequence[Group],
    slots: Tensor,
    values: Tensor,
    valid: Tensor,
) -> None:
    """Add values fp32 [B, G, T] to the metrics of the valid (bool [B, G, T]) rows of `slots` [B].
    As `store.add_metrics`."""
    blocks, _ = _tracked(groups, arena)
    _track(arena, tables, groups, slots, valid, blocks.tracks[1], values.float().contiguous(), True)


def read_metrics(
    arena: Tensor, tables: Tensor, groups: Sequence[Group], slots: Tensor, valid: Tensor
) -> Tensor:
    """Metrics fp32 [B, G, T] of the rows of `slots` [B]; 0 where not valid (bool [B, G, T])."""
    blocks, device = _tracked(groups, arena)
    found = torch.empty(valid.shape, dtype=torch.float32, device=device)
    _track(arena, tables, groups, slots, valid, blocks.tracks[1], found, False)
    return found


def read_tracked(
    arena: Tensor,
    tables: Tensor,
    groups: Sequence[Group],
    slots: Tensor,
    lengths: Tensor,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(metrics fp32, positions int32, valid bool), each [B, G, T]. As `store.read_tracked`."""
    blocks, device = _tracked(groups, arena)
    valid = torch.arange(size, device=device) < lengths[..., None]
    positions = torch.empty(valid.shape, dtype=torch.int32, device=device)
    _track(arena, tables, groups, slots, valid, blocks.tracks[0], positions, False)
    return read_metrics(arena, tables, groups, slots, valid), positions, valid


def _track(
    arena: Tensor,
    tables: Tensor,
    groups: Sequence[Group],
    slots: Tensor,
    valid: Tensor,
    offsets: Tensor,
    values: Tensor,
    add: bool,
) -> None:
    """Add values [B, G, T] to the block at `offsets` [G], or read it into them."""
    track_rows[(triton.cdiv(valid.shape[2], TRACK), *valid.shape[1::-1])](
        words_of(arena, values.dtype),
        tables,
        offsets,
        slots.contiguous(),
        valid.contiguous(),
        values,
        valid.shape[2],
        *tables.stride(),
        PAGE=_layout(groups).page,
        ADD=add,
        ROWS=TRACK,
    )


def _tracked(groups: Sequence[Group], arena: Tensor) -> tuple[Blocks, torch.device]:
    assert _layout(groups).tracked, "untracked rows have neither positions nor metrics"
    return plan_blocks(tuple(groups), arena.device), arena.device


def _layout(groups: Sequence[Group]) -> PageLayout:
    """What all groups of a layer agree in: everything but segments."""
    layout = groups[0].layout
    assert all(supports(group.layout) for group in groups), "per-channel segments need `kivi`"
    return layout


def _row_width(groups: Sequence[Group]) -> int:
    return sum(x.width for group in groups for x in group.layout.segments)


def _quantized(groups: Sequence[Group]) -> bool:
    return all(x.quantized for group in groups for x in group.layout.segments)
