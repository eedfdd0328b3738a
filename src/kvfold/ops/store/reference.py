"""Rows of one layer into and out of its pages. Reference implementation, plain PyTorch.

Shapes: S slots (sequences at once), G groups of the layer, R numbers of a row, P rows a page,
n pages of the longest group; N new tokens, B sequences, T rows read, M rows moved; g groups of a
kind, W words of its rows (see `pages`). Offsets in `tables` are int32 counts of 64 bytes; addresses
are int64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.formats.integers import (
    SCALES_IN,
    dequantize,
    dequantize_channels,
    pack,
    quantize,
    quantize_channels,
    scale_of,
    unpack,
)
from kvfold.ops.common.pages import (
    INTS,
    METRICS,
    POSITIONS,
    SCALES,
    PageClass,
    plan_pages,
    words_of,
)
from kvfold.spec.layout import UNIT, Group


@dataclass(frozen=True)
class StoredRows:
    """rows [B, T, R]; valid bool [B, G, T]: row < length; positions int32 [B, G, T].

    Rows beyond a group's length are 0 in the group's columns. Positions are the stored ones (0
    beyond the length) where the layout is tracked, else the row's index.
    """

    rows: Tensor
    valid: Tensor
    positions: Tensor


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

    arena uint8 [bytes]; tables int32 [S, G, pages]; rows float [N, R], whose dtype unquantised
    numbers keep; slots int64 [N]; index int64 [N, G]; positions int32 [N], needed where tracked.
    Per-channel segments take whole pages: P rows in order, after one another (see `kivi`).
    """
    plan = plan_pages(tuple(groups), arena.device)
    assert rows.shape[1] == plan.width, f"rows of {rows.shape[1]} numbers, not {plan.width}"
    assert plan.itemsize in (None, rows.dtype.itemsize), f"rows cannot be stored as {rows.dtype}"
    assert not plan.tracked or positions is not None, "tracked rows need positions"
    packed = plan.pack(rows.detach())
    for kind in plan.kinds:
        slot, row = slots[:, None], index[:, kind.numbers]
        words, channels = _encode(kind, packed, positions)
        words_of(arena, kind.word)[kind.address(tables, slot, kind.numbers, row)] = words
        if channels is not None:
            first = slot[:: plan.page], kind.numbers, row[:: plan.page]
            words_of(arena, torch.int16)[kind.channel_address(tables, *first)] = channels


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

    slots int64 [B]; lengths int [B, G]; dtype: of the result, and that of the unquantised numbers
    at `append`; size: T, at least the longest length. Without it the longest is asked for, which
    waits for the device. Unquantised numbers come back bit for bit, others as `dequantize` gives.
    """
    plan = plan_pages(tuple(groups), arena.device)
    assert plan.itemsize in (None, dtype.itemsize), f"rows are not stored as {dtype}"
    size = int(lengths.max()) if size is None else size
    num_pages = -(-size // plan.page)
    index = torch.arange(num_pages * plan.page, dtype=torch.int32, device=arena.device)
    valid = index < lengths[..., None]
    positions = (
        torch.zeros_like(valid, dtype=torch.int32) if plan.tracked else index.expand_as(valid)
    )
    packed = torch.empty(len(slots), len(index), plan.width, dtype=dtype, device=arena.device)
    for kind in plan.kinds:
        inside = valid[:, kind.numbers].unflatten(-1, (num_pages, plan.page))
        pages = _read_pages(arena, tables, kind, slots, inside)
        _decode(kind, pages, inside, packed, plan.even)
        if plan.tracked:
            found = kind.block(pages, POSITIONS, torch.int32)[..., 0] * inside
            positions[:, kind.numbers] = found.flatten(2)
    rows = (packed if plan.even else plan.unpack(packed))[:, :size]
    return StoredRows(rows, valid[..., :size], positions[..., :size])


def add_metrics(
    arena: Tensor,
    tables: Tensor,
    groups: Sequence[Group],
    slots: Tensor,
    values: Tensor,
    valid: Tensor,
) -> None:
    """Add values fp32 [B, G, T] to the metrics of the valid (bool [B, G, T]) rows of `slots` [B].

    `slots` are distinct. Rows that are not valid are left alone, whatever their value.
    """
    words = words_of(arena, torch.int32)
    for kind in plan_pages(tuple(groups), arena.device).kinds:
        keep = valid[:, kind.numbers]
        address = _track_address(tables, kind, slots, keep, METRICS)
        old = words[address]
        new = (old.view(torch.float32) + values[:, kind.numbers]).view(torch.int32)
        # Adding the difference of the bits: rows that are not valid may own no page, and adding
        # integer 0 to whatever word they point to leaves every pattern of bits as it is.
        words.index_add_(0, address.flatten(), ((new - old) * keep).flatten())


def read_metrics(
    arena: Tensor, tables: Tensor, groups: Sequence[Group], slots: Tensor, valid: Tensor
) -> Tensor:
    """Metrics fp32 [B, G, T] of the rows of `slots` [B]; 0 where not valid (bool [B, G, T])."""
    return _read_track(arena, tables, groups, slots, valid, METRICS).view(torch.float32)


def read_tracked(
    arena: Tensor,
    tables: Tensor,
    groups: Sequence[Group],
    slots: Tensor,
    lengths: Tensor,
    size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(metrics fp32, positions int32, valid bool), each [B, G, T], of tracked rows.

    slots int64 [B]; lengths int [B, G]; size: T. 0 beyond a group's length.
    """
    valid = torch.arange(size, device=arena.device) < lengths[..., None]
    positions = _read_track(arena, tables, groups, slots, valid, POSITIONS)
    return read_metrics(arena, tables, groups, slots, valid), positions, valid


def move(
    arena: Tensor,
    tables: Tensor,
    groups: Sequence[Group],
    slots: Tensor,
    group: Tensor,
    source: Tensor,
    target: Tensor,
) -> None:
    """Copy row source[i] of (slots[i], group[i]) to row target[i] of the same: codes, scales,
    position and metric.

    All int64 [M]; no row is the target of two, or both source and target. Where groups differ in
    kind this waits for the device once a kind.
    """
    moves = torch.stack((slots, group, source, target))
    for kind in plan_pages(tuple(groups), arena.device).kinds:
        every = len(kind.numbers) == len(groups)
        mine = moves if every else moves[:, torch.isin(group, kind.numbers)]
        slot, number, old, new = mine
        words = words_of(arena, kind.word)
        found = words[kind.address(tables, slot, number, old)]
        words[kind.address(tables, slot, number, new)] = found


def _encode(
    kind: PageClass, packed: Tensor, positions: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The bytes of N rows of a kind's groups: packed [N, R] -> words [N, g, W], and of their pages'
    channels, int16 [N / P, g, c] or None."""
    layout, g = kind.layout, len(kind.numbers)
    parts, scales, zeros, channels = [], [], [], []
    for segment, columns in zip(layout.segments, kind.columns, strict=True):
        x = packed[:, columns].unflatten(-1, (g, segment.width))
        if segment.per_channel:
            codes, *found = quantize_channels(x, layout.page, segment.bits)
            x = pack(codes, segment.bits)
            channels.append(torch.stack(found, dim=-2).view(torch.int16))
        elif segment.quantized:
            codes, scale, zero = quantize(x, segment.bits, layout.zeros, SCALES_IN[layout.scale])
            x = pack(codes, segment.bits)
            scales.append(scale.view(INTS[layout.scale]))
            zeros += [] if zero is None else [zero.view(INTS[layout.scale])]
        parts.append(x)
    if scales:
        parts.append(torch.stack(scales + zeros, dim=-1))
    if positions is not None and layout.tracked:
        where = positions[:, None, None].expand(-1, g, 1)
        parts += [where, torch.zeros_like(where, dtype=torch.float32)]
    words = torch.cat([x.contiguous().view(torch.uint8) for x in parts], dim=-1).view(kind.word)
    return words, torch.cat(channels, dim=-1).flatten(-2) if channels else None


def _decode(kind: PageClass, pages: Tensor, inside: Tensor, packed: Tensor, even: bool) -> None:
    """Fill the kind's columns of packed [B, n * P, R]; rows that are not inside become 0.

    even: columns are the row's own, not packed. pages uint8 [B, g, n, page_bytes]; inside bool
    [B, g, n, P].
    """
    stored = kind.block(pages, SCALES, SCALES_IN[kind.layout.scale]).unbind(-1)
    scales = iter(stored)
    zeros = iter(stored[len(stored) // 2 :] if kind.layout.zeros else ())
    channels = iter(kind.channel_scales(pages))
    ints = INTS[packed.dtype.itemsize]
    mask = -inside.to(ints)[..., None]
    for i, (segment, columns) in enumerate(zip(kind.layout.segments, kind.columns, strict=True)):
        if even:
            out = kind.columns_of(packed, i)
        else:
            out = packed[..., columns].unflatten(-1, (-1, segment.width))
        out = out.unflatten(1, inside.shape[2:]).permute(0, 3, 1, 2, 4)
        if segment.per_channel:
            codes = unpack(kind.block(pages, i, torch.uint8), segment.width, segment.bits)
            steps, lows = (torch.where(inside[..., :1], x.float(), 0.0) for x in next(channels))
            out.copy_(dequantize_channels(codes, steps, lows, segment.bits))
        elif segment.quantized:
            block = kind.block(pages, i, torch.uint8)
            codes = unpack(block, segment.width, segment.bits)
            scale = torch.where(inside, scale_of(next(scales), segment.bits), 0.0)
            zero = torch.where(inside, next(zeros).float(), 0.0) if kind.layout.zeros else None
            dequantize(codes, scale, zero, segment.bits, out)
        else:
            # As bits, because garbage may be NaN, and in the one pass that copies.
            torch.bitwise_and(kind.block(pages, i, ints), mask, out=out.view(ints))


def _read_pages(
    arena: Tensor, tables: Tensor, kind: PageClass, slots: Tensor, inside: Tensor
) -> Tensor:
    """Pages of B sequences: inside bool [B, g, n, P] -> uint8 [B, g, n, page_bytes].

    The table of a page without rows may say anything: some page is read in its place.
    """
    pages = tables[slots[:, None], kind.numbers, : inside.shape[2]]
    pages = torch.where(inside[..., 0], pages, 0).long()
    units = pages[..., None] + torch.arange(kind.layout.page_units, device=arena.device)
    found = words_of(arena, torch.uint8).view(-1, UNIT).index_select(0, units.flatten())
    return found.view(*pages.shape, kind.layout.page_units * UNIT)


def _read_track(
    arena: Tensor,
    tables: Tensor,
    groups: Sequence[Group],
    slots: Tensor,
    valid: Tensor,
    block: int,
) -> Tensor:
    """int32 [B, G, T] of the block POSITIONS or METRICS; 0 where not valid."""
    found = torch.empty_like(valid, dtype=torch.int32)
    words = words_of(arena, torch.int32)
    for kind in plan_pages(tuple(groups), arena.device).kinds:
        keep = valid[:, kind.numbers]
        found[:, kind.numbers] = words[_track_address(tables, kind, slots, keep, block)] * keep
    return found


def _track_address(
    tables: Tensor, kind: PageClass, slots: Tensor, valid: Tensor, block: int
) -> Tensor:
    """4-byte words of POSITIONS or METRICS, int64 [B, g, T]; word 0 where not valid."""
    layout = kind.layout
    assert layout.tracked, "untracked rows have neither positions nor metrics"
    row = torch.arange(valid.shape[-1], device=tables.device)
    page = tables[slots[:, None, None], kind.numbers[:, None], row // layout.page].long()
    address = page * (UNIT // 4) + layout.block_offsets[block] // 4 + row % layout.page
    return torch.where(valid, address, 0)
