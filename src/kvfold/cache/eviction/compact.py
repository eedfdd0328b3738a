"""How rows that stay move together so that whole pages come free, and who is compressed when.

Pure functions. Shapes: B sequences, G groups, T row slots, M rows moved. `compaction` waits for the
device twice a call.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

Id = TypeVar("Id")


def compaction(
    evicted: Tensor, lengths: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Moves that close the holes, (sequence, group, source slot, target slot), int64 [M] each; new
    lengths [B, G].

    evicted bool [B, G, T]; lengths int [B, G]. KV-Compress Algorithm 1 in parallel: survivors
    beyond the new length take the evicted slots before it, so sources and targets never meet and
    the moves can be made at once, in any order.
    """
    slots = torch.arange(evicted.shape[2], device=evicted.device, dtype=torch.int32)
    survives = ~evicted & (slots < lengths[..., None])
    new_lengths = survives.sum(2, dtype=torch.int32)
    inside = slots < new_lengths[..., None]
    sequence, group, source = (survives & ~inside).nonzero(as_tuple=True)
    *_, target = (inside & ~survives).nonzero(as_tuple=True)
    return (sequence, group, source, target), new_lengths.to(lengths.dtype)


def capped(order: Sequence[tuple[Id, int]], limit: int) -> list[Id]:
    """Sequences to compress in this round: the first whose rows stay within `limit` together.

    order: (sequence id, rows in all groups), never compressed first, then by the time of the last
    compression. Stops at the first that would exceed the limit (KV-Compress §4.2.3): one with more
    rows than `limit` is never compressed, nor are those behind it.
    """
    totals = accumulate(num_rows for _, num_rows in order)
    return [name for (name, _), total in zip(order, totals, strict=True) if total <= limit]
