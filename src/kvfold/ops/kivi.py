"""KIVI's pages: full ones in few bits, a sequence's unfinished one in 16. Plain PyTorch.

Shapes: S slots, G groups of the layer, R numbers of a row, P rows a page, n pages of the longest
sequence; N new tokens, M pages that they fill, B sequences, T rows read.

The last column of `tables` [S, G, n + 1] is the *tail*, a 16-bit page that every sequence keeps:

    [full page 0][full page 1]..[stale]..[tail: the rows beyond the last full page]

Keys of a full page share a scale and zero per channel, values per row, so a page is quantised once,
when its last row comes, from what the tail holds: bytes do not depend on how rows came in chunks.
All groups of a sequence have as many rows, since nothing is evicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kvfold.ops import store
from kvfold.ops.pages import Group, PageLayout
from kvfold.ops.store import StoredRows


@dataclass(frozen=True)
class Fill:
    """Which pages the N new rows fill: the same in all layers, and known on the host.

    slots, pages int64 [M]: full page `pages[m]` of sequence `slots[m]`. source int64 [M, P]: the
    new row that is its row, or -1 for one that the tail holds. rest: new rows that go to the tail.
    """

    slots: Tensor
    pages: Tensor
    source: Tensor
    rest: Tensor

    @classmethod
    def of(
        cls, slots: Sequence[int], index: Sequence[int], page: int, device: torch.device
    ) -> "Fill":
        """slots, index [N]: the sequence and the row of every token, a sequence's in a run."""
        slot, row = np.array(slots, dtype=np.int64), np.array(index, dtype=np.int64)
        last = np.flatnonzero(row % page == page - 1)
        source = last[:, None] - np.arange(page)[::-1]
        new = (source >= 0) & (slot[source.clip(0)] == slot[last, None])
        source = np.where(new, source, -1)
        rest = np.setdiff1d(np.arange(len(slot)), source)
        found = (slot[last], row[last] // page, source, rest)
        return cls(*(torch.from_numpy(x).to(device) for x in found))


@dataclass(frozen=True)
class _Tail:
    """A group as its tail is laid out."""

    layout: PageLayout


@lru_cache(maxsize=4096)
def _tails(groups: tuple[Group, ...]) -> tuple[_Tail, ...]:
    tails = [group.layout.tail for group in groups]
    return tuple(_Tail(tail) for tail in tails if tail is not None)


def append(
    arena: Tensor,
    tables: Tensor,
    groups: Sequence[Group],
    rows: Tensor,
    slots: Tensor,
    index: Tensor,
    fill: Fill,
) -> None:
    """Write token i's row as row index[i] of all groups of sequence slots[i].

    arena uint8 [bytes]; tables int32 [S, G, n + 1]; rows float [N, R], of the storage dtype; slots,
    index int64 [N]; fill: of these slots and rows. Full pages are packed, the rest waits as it is.
    """
    tails, page, g = _tails(tuple(groups)), groups[0].layout.page, len(groups)
    last = tables[..., -1:]
    if len(fill.slots):
        # The tail is read whole, garbage and all: `where` takes what it knows to be there.
        whole = torch.full((len(fill.slots), g), page, device=arena.device)
        held = store.gather(arena, last, tails, fill.slots, whole, rows.dtype, page).rows
        new = (fill.source >= 0)[..., None]
        full = torch.where(new, rows.detach()[fill.source.clamp(min=0)], held).flatten(0, 1)
        where = fill.pages[:, None] * page + torch.arange(page, device=arena.device)
        slot = fill.slots.repeat_interleave(page)
        store.append(arena, tables, groups, full, slot, where.view(-1, 1).expand(-1, g))
    place = (index[fill.rest] % page)[:, None].expand(-1, g)
    store.append(arena, last, tails, rows[fill.rest], slots[fill.rest], place)


def gather(
    arena: Tensor,
    tables: Tensor,
    groups: Sequence[Group],
    slots: Tensor,
    lengths: Tensor,
    dtype: torch.dtype,
    size: int,
) -> StoredRows:
    """Read the first lengths[b, g] rows, full pages dequantised and the tail bit for bit.

    Arguments and result as of `store.gather`, with tables int32 [S, G, n + 1].
    """
    tails, page = _tails(tuple(groups)), groups[0].layout.page
    full = lengths // page * page
    # With a page to spare, so that the tail's P rows have a place behind the full ones.
    found = store.gather(arena, tables, groups, slots, full, dtype, size + page).rows
    tail = store.gather(arena, tables[..., -1:], tails, slots, lengths - full, dtype, page).rows
    place = full[:, :1].long() + torch.arange(page, device=arena.device)
    found.scatter_(1, place[..., None].expand_as(tail), tail)
    index = torch.arange(size, dtype=torch.int32, device=arena.device)
    valid = index < lengths[..., None]
    return StoredRows(found[:, :size], valid, index.expand_as(valid))
