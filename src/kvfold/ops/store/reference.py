"""Write and read the token entries of one layer. Reference implementation, plain PyTorch.

Shapes as in `store`; g groups of a class of pages with one layout, W words of a row in such a page
(see `common.pages`), n pages of the longest group. Addresses are int64.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.layout.formats.base import INTS
from kvfold.layout.pages import UNIT, Block
from kvfold.ops.common.pages import LayerPages, PageClass, page_classes, plan_pages, words_of


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
    pages: LayerPages, rows: Tensor, slots: Tensor, index: Tensor, positions: Tensor | None = None
) -> None:
    """Like `ops.store.append`. Per-channel formats take whole pages: P rows in order, page after
    page (see `residual`)."""
    arena, tables, _, groups = pages
    plan = plan_pages(groups, arena.device)
    assert rows.shape[1] == plan.width, f"rows of {rows.shape[1]} numbers, not {plan.width}"
    assert plan.itemsize in (None, rows.dtype.itemsize), f"rows cannot be stored as {rows.dtype}"
    assert not plan.tracked or positions is not None, "tracked rows need positions"
    packed = plan.pack(rows.detach())
    for kind in plan.kinds:
        slot, row = slots[:, None], index[:, kind.numbers]
        words, channels = _encode(kind, kind.split(packed), positions)
        words_of(arena, kind.word)[kind.address(tables, slot, kind.numbers, row)] = words
        if channels is not None:
            first = slot[:: plan.page], kind.numbers, row[:: plan.page]
            words_of(arena, channels.dtype)[kind.channel_address(tables, *first)] = channels


def rewrite(
    pages: LayerPages, sides: Mapping[str, Tensor], slots: Tensor, group: Tensor, index: Tensor
) -> None:
    """Like `ops.store.rewrite`."""
    arena, tables, _, groups = pages
    kinds, _ = page_classes(groups, arena.device)
    for kind in kinds:
        if not kind.layout.segments:
            continue
        single_class = len(kind.numbers) == len(groups)
        chosen = ... if single_class else torch.isin(group, kind.numbers)
        parts, first = [], dict.fromkeys(sides, 0)
        for x in kind.layout.segments:
            columns = slice(first[x.side], first[x.side] + x.width)
            parts.append(sides[x.side][chosen][:, None, columns])
            first[x.side] = columns.stop
        words, channels = _encode(kind, parts, None)
        assert channels is None, "numbers that share a page's channels are packed together"
        address = kind.address(tables, slots[chosen], group[chosen], index[chosen])
        # Words of positions and metrics come last.
        words_of(arena, kind.word)[address[:, : words.shape[-1]]] = words[:, 0]


def gather(
    pages: LayerPages, slots: Tensor, lengths: Tensor, dtype: torch.dtype, size: int | None = None
) -> StoredRows:
    """Like `ops.store.gather`. Without a size it reads the longest length, which waits for the
    device."""
    arena, tables, _, groups = pages
    plan = plan_pages(groups, arena.device)
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
        exists = valid[:, kind.numbers].unflatten(-1, (num_pages, plan.page))
        data = _read_pages(arena, tables, kind, slots, exists)
        _decode(kind, data, exists, packed, plan.even)
        if plan.tracked:
            stored = kind.block(data, kind.layout.blocks.positions, torch.int32)[..., 0] * exists
            positions[:, kind.numbers] = stored.flatten(2)
    rows = (packed if plan.even else plan.unpack(packed))[:, :size]
    return StoredRows(rows, valid[..., :size], positions[..., :size])


def add_metrics(pages: LayerPages, slots: Tensor, values: Tensor, valid: Tensor) -> None:
    """Like `ops.store.add_metrics`; values are fp32."""
    words = words_of(pages.arena, torch.int32)
    for kind in plan_pages(pages.groups, pages.arena.device).kinds:
        keep = valid[:, kind.numbers]
        address = _track_address(pages.tables, kind, kind.layout.blocks.metrics, slots, keep)
        old = words[address]
        new = (old.view(torch.float32) + values[:, kind.numbers]).view(torch.int32)
        # Add the difference of the bits: a row that is not valid may have no page, and adding
        # integer 0 to the word it points to leaves any bits unchanged.
        words.index_add_(0, address.flatten(), ((new - old) * keep).flatten())


def set_metrics(pages: LayerPages, slots: Tensor, index: Tensor, values: Tensor) -> None:
    """Like `ops.store.set_metrics`."""
    words = words_of(pages.arena, torch.int32)
    for kind in plan_pages(pages.groups, pages.arena.device).kinds:
        layout, row = kind.layout, index[:, kind.numbers]
        page = pages.tables[slots[:, None], kind.numbers, row // layout.page].long()
        address = page * (UNIT // 4) + layout.blocks.metrics.offset // 4 + row % layout.page
        words[address] = values[:, kind.numbers].view(torch.int32)


def read_metrics(pages: LayerPages, slots: Tensor, valid: Tensor) -> Tensor:
    """Read metrics fp32 [B, G, T] of the rows of `slots` [B]; 0 where not valid (bool [B, G,
    T])."""
    return _read_track(pages, "metrics", slots, valid).view(torch.float32)


def read_tracked(
    pages: LayerPages, slots: Tensor, lengths: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `ops.store.read_tracked`."""
    valid = torch.arange(size, device=pages.arena.device) < lengths[..., None]
    positions = _read_track(pages, "positions", slots, valid)
    return read_metrics(pages, slots, valid), positions, valid


def move(pages: LayerPages, slots: Tensor, group: Tensor, source: Tensor, target: Tensor) -> None:
    """Like `ops.store.move`. If the groups have several layouts, it waits for the device once per
    layout."""
    arena, tables, _, groups = pages
    moves = torch.stack((slots, group, source, target))
    for kind in plan_pages(groups, arena.device).kinds:
        single_class = len(kind.numbers) == len(groups)
        class_moves = moves if single_class else moves[:, torch.isin(group, kind.numbers)]
        slot, number, old, new = class_moves
        words = words_of(arena, kind.word)
        entries = words[kind.address(tables, slot, number, old)]
        words[kind.address(tables, slot, number, new)] = entries


def _encode(
    kind: PageClass, numbers: Sequence[Tensor], positions: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Encode N rows of a class's groups: of all g, or of one each without positions.

    numbers: of each segment, [N, g, width]. Returns words [N, g, W] of the rows, and the scales
    that their pages hold per channel, as words [N / P, g, c], or None.
    """
    layout = kind.layout
    word, parts = INTS[layout.scale], []
    scales: dict[int, Tensor] = {}  # of each row, by index in the row's scales
    channels: dict[int, Tensor] = {}  # of each page, by index in the page's scales
    for segment, x, places in zip(layout.segments, numbers, layout.metadata_indices, strict=True):
        codes, metadata = segment.format.encode(x, layout.page)
        parts.append(codes)
        stored = (number.view(word) for number in metadata)
        (channels if segment.per_channel else scales).update(zip(places, stored, strict=True))
    if scales:
        parts.append(torch.stack([scales[place] for place in sorted(scales)], dim=-1))
    if positions is not None and layout.tracked:
        tiled_positions = positions[:, None, None].expand(-1, len(kind.numbers), 1)
        parts += [tiled_positions, torch.zeros_like(tiled_positions, dtype=torch.float32)]
    words = torch.cat([x.contiguous().view(torch.uint8) for x in parts], dim=-1).view(kind.word)
    ordered = [channels[place] for place in sorted(channels)]
    return words, torch.cat(ordered, dim=-1) if ordered else None


def _decode(kind: PageClass, data: Tensor, exists: Tensor, packed: Tensor, even: bool) -> None:
    """Write the class's columns of packed [B, n * P, R]; rows that do not exist become 0.

    even: columns are those of the unpacked row. data: pages, uint8 [B, g, n, page_bytes]; exists:
        bool [B, g, n, P].
    """
    for i, (segment, columns) in enumerate(zip(kind.layout.segments, kind.columns, strict=True)):
        if even:
            out = kind.columns_of(packed, i)
        else:
            out = packed[..., columns].unflatten(-1, (-1, segment.width))
        out = out.unflatten(1, exists.shape[2:]).permute(0, 3, 1, 2, 4)
        segment.format.decode(kind.codes(data, i), kind.metadata(data, i), exists, out)


def _read_pages(
    arena: Tensor, tables: Tensor, kind: PageClass, slots: Tensor, exists: Tensor
) -> Tensor:
    """Read pages of B sequences: exists bool [B, g, n, P] -> uint8 [B, g, n, page_bytes].

    Table entries beyond a sequence's pages are undefined: page 0 is read instead.
    """
    pages = tables[slots[:, None], kind.numbers, : exists.shape[2]]
    pages = torch.where(exists[..., 0], pages, 0).long()
    units = pages[..., None] + torch.arange(kind.layout.page_units, device=arena.device)
    units_read = words_of(arena, torch.uint8).view(-1, UNIT).index_select(0, units.flatten())
    return units_read.view(*pages.shape, kind.layout.page_units * UNIT)


def _read_track(pages: LayerPages, name: str, slots: Tensor, valid: Tensor) -> Tensor:
    """Read the block `positions` or `metrics` as int32 [B, G, T]; 0 where not valid."""
    numbers = torch.empty_like(valid, dtype=torch.int32)
    words = words_of(pages.arena, torch.int32)
    for kind in plan_pages(pages.groups, pages.arena.device).kinds:
        keep = valid[:, kind.numbers]
        block: Block = getattr(kind.layout.blocks, name)
        address = _track_address(pages.tables, kind, block, slots, keep)
        numbers[:, kind.numbers] = words[address] * keep
    return numbers


def _track_address(
    tables: Tensor, kind: PageClass, block: Block, slots: Tensor, valid: Tensor
) -> Tensor:
    """Return the 4-byte word of each position or metric, int64 [B, g, T]; word 0 where not
    valid."""
    layout = kind.layout
    assert layout.tracked, "untracked rows have neither positions nor metrics"
    row = torch.arange(valid.shape[-1], device=tables.device)
    page = tables[slots[:, None, None], kind.numbers[:, None], row // layout.page].long()
    address = page * (UNIT // 4) + block.offset // 4 + row % layout.page
    return torch.where(valid, address, 0)
