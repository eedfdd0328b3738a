"""Keep a sequence's last tokens in 16 bits and quantise earlier ones R at a time. PyTorch.

Shapes: S slots, G groups of the layer, C numbers of a token, P rows of a page, R rows of the tail
(whole pages), n pages of the longest sequence; N new tokens, M full tails, B sequences, T rows
read.

The last column of `tables` [S, G, n + 1] is the *tail*, an unquantised page of R rows that every
sequence has:

    [page 0][page 1]..[stale]..[tail: the last 1 to R rows]

When a full tail gets another row, all its rows are packed into R / P pages at once, since the keys
of a page may share scales (KIVI §3.2). All new rows of a sequence in one step go to one tail, so a
query sees the rows before it as if they had been appended one by one: neither stored bytes nor
attention depend on the chunk size. All groups of a sequence have equally many rows, since nothing
is evicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.layout.pages import Group
from kvfold.ops.common.pages import LayerPages
from kvfold.ops.store import reference
from kvfold.ops.store.reference import StoredRows


@dataclass(frozen=True)
class Fill:
    """The full tails that a step has to pack before it appends N tokens. The same for all layers,
    and known on the host.

    slots, first int64 [M]: the tail of sequence `slots[m]` holds the R rows from `first[m]` on.
    """

    slots: Tensor
    first: Tensor

    @classmethod
    def of(
        cls, slots: Sequence[int], index: Sequence[int], residual: int, device: torch.device
    ) -> "Fill":
        """Return the tails that are full before these tokens are appended.

        slots, index [N]: sequence and row of every token; tokens of a sequence are adjacent.
        residual: R.
        """
        slot, row = np.array(slots, dtype=np.int64), np.array(index, dtype=np.int64)
        begins = np.flatnonzero(row % residual == 0)
        starts_step = np.diff(slot, prepend=-1)[begins] != 0
        assert starts_step.all(), (
            f"rows {row[begins[~starts_step]]} begin a tail in the middle of a step"
        )
        full = begins[row[begins] > 0]
        return cls(*(torch.from_numpy(x).to(device) for x in (slot[full], row[full] - residual)))


@lru_cache(maxsize=4096)
def _laid_out(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Return the groups with the layout of their tails."""
    return tuple(
        replace(x, layout=x.layout.residual_block)
        for x in groups
        if x.layout.residual_block is not None
    )


def _tails(pages: LayerPages) -> LayerPages:
    """Return the tails as pages, one per sequence and group."""
    return pages._replace(tables=pages.tables[..., -1:], groups=_laid_out(pages.groups))


def append(pages: LayerPages, rows: Tensor, slots: Tensor, index: Tensor, fill: Fill) -> None:
    """Write the entry of token i as row index[i] of all groups of sequence slots[i].

    rows: float [N, C], of the storage dtype. slots, index: int64 [N].
    fill: the full tails for these slots and rows. They are packed, then overwritten.
    """
    tails, num_groups, device = _tails(pages), len(pages.groups), rows.device
    residual = tails.groups[0].layout.page
    if len(fill.slots):
        whole = torch.full((len(fill.slots), num_groups), residual, device=device)
        held = reference.gather(tails, fill.slots, whole, rows.dtype, residual).rows
        page_rows = (fill.first[:, None] + torch.arange(residual, device=device)).view(-1, 1)
        slot = fill.slots.repeat_interleave(residual)
        reference.append(pages, held.flatten(0, 1), slot, page_rows.expand(-1, num_groups))
    reference.append(tails, rows, slots, (index % residual)[:, None].expand(-1, num_groups))


def gather(
    pages: LayerPages, slots: Tensor, lengths: Tensor, dtype: torch.dtype, size: int
) -> StoredRows:
    """Read the first lengths[b, g] rows: pages dequantised, the tail bit for bit.

    Arguments and result as in `reference.gather`.
    """
    tails = _tails(pages)
    residual = tails.groups[0].layout.page
    packed = (lengths - 1).clamp(min=0) // residual * residual
    most = max(size - 1, 0) // residual * residual
    rows = reference.gather(pages, slots, packed, dtype, most).rows
    rows = F.pad(rows, (0, 0, 0, residual))  # room for the tail behind the pages
    tail = reference.gather(tails, slots, lengths - packed, dtype, residual).rows
    tail_rows = packed[:, :1].long() + torch.arange(residual, device=rows.device)
    rows.scatter_(1, tail_rows[..., None].expand_as(tail), tail)
    index = torch.arange(size, dtype=torch.int32, device=rows.device)
    valid = index < lengths[..., None]
    return StoredRows(rows[:, :size], valid, index.expand_as(valid))
