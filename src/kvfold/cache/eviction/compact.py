"""Move the remaining entries together so that whole pages become free, and choose which
sequences are compressed in a round.

Pure functions. Shapes: B sequences, G groups, T entry slots, M entries moved. `compaction` waits
for the device twice a call.
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
    """Moves that fill the evicted slots, (sequence, group, source slot, target slot), int64 [M]
    each; and the new lengths [B, G].

    evicted bool [B, G, T]; lengths int [B, G]. KV-Compress Algorithm 1 in parallel: remaining
    entries beyond the new length move to evicted slots before it, so no slot is both source and
    target, and the moves can run at once in any order.
    """
    slots = torch.arange(evicted.shape[2], device=evicted.device, dtype=torch.int32)
    survives = ~evicted & (slots < lengths[..., None])
    new_lengths = survives.sum(2, dtype=torch.int32)
    inside = slots < new_lengths[..., None]
    sequence, group, source = (survives & ~inside).nonzero(as_tuple=True)
    *_, target = (inside & ~survives).nonzero(as_tuple=True)
    return (sequence, group, source, target), new_lengths.to(lengths.dtype)


def sequences_within(order: Sequence[tuple[Id, int]], limit: int) -> list[Id]:
    """The sequences to compress in this round: as many of the first as have at most `limit` entries
    together.

    order: (sequence id, entries in all groups), sorted by the time of the last compression, never
        compressed ones first. Stops at the first sequence that would exceed the limit (KV-Compress
        §4.2.3): a sequence with more entries than `limit` is never compressed, nor are those after
        it.
    """
    totals = accumulate(num_entries for _, num_entries in order)
    return [name for (name, _), total in zip(order, totals, strict=True) if total <= limit]
