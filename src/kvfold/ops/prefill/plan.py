"""Plan a chunk's attention: which kernel variants run, and on which tiles. Plain PyTorch.

Shapes as in `prefill`; U units of one class. A *unit* is a KV head's keys with up to 256 columns of
its values; a *class* is all units with the same padded widths: DK + EK of keys and DV of values.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, log2

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.ops.common.launch import upload
from kvfold.ops.common.plan import padded_width

WIDEST = 256  # value columns of a unit
WIDEST_ROWS = (256, 512)  # key and value rank
DTYPES = {torch.float16, torch.bfloat16}
NEVER = 2**31 - 1  # the position of a token that does not exist
LAST = NEVER - 1  # the position of a query that pads: it comes after all tokens that exist
Widths = tuple[int, int, int]  # DK, EK, DV


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Tile sizes and tuning of the kernel.

    pairs: (query, head) pairs of a tile; rows: tokens of a tile; stages: of the pipeline;
        registers: limit per thread.
    """

    pairs: int = 128
    rows: int = 64
    warps: int = 8
    stages: int = 3
    registers: int | None = None


@dataclass(frozen=True)
class UnitClass:
    """Units of equal padded widths.

    units: int64 [U, 8], see `prefill_kernel`; exact: whether no unit is padded; align: elements
        that divide all of their starts and ranks.
    """

    widths: Widths
    units: Tensor
    exact: bool
    align: int


def unsupported_reason(
    dtypes: frozenset[torch.dtype], key_ranks: tuple[int, ...], value_ranks: tuple[int, ...]
) -> str | None:
    """Why the kernel cannot read such keys and values, or None. It reads 16-bit numbers, with key
    and value ranks up to WIDEST_ROWS."""
    if len(dtypes) > 1 or not dtypes <= DTYPES:
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"numbers in {names}: the kernel reads float16 or bfloat16"
    for side, widest, most in (
        ("keys", max(key_ranks), WIDEST_ROWS[0]),
        ("values", max(value_ranks), WIDEST_ROWS[1]),
    ):
        if widest > most:
            return f"{side} of {widest} numbers: the kernel reads at most {most}"
    return None


def cut_for(widths: Widths, few: bool) -> Cut:
    """Return tile sizes with which a class's tiles stay in registers: two programs per
    multiprocessor for small widths, more and smaller programs for the smallest. few: tiles of 128
    pairs would leave multiprocessors idle."""
    keys, values = sum(widths[:2]), widths[2]
    rows = 64 if values <= 128 else 32
    if few or (keys <= 32 and values <= 64):
        return Cut(pairs=64, rows=rows, warps=4)
    return Cut(rows=rows, registers=128 if max(keys, values) <= 96 else None)


def rescaled_cut(widths: Widths, most: int) -> Cut:
    """Return the tile sizes of ZACK §5.3: B_r = 64 d_max / d_sum queries, so that tiles of all
    heads cost the same.

    d_sum = dk + dv + 1, and d_max is the layer's largest. Here (query, head) pairs, in powers of
    two up to 256. Used only as a baseline for `cut_for`.

    widths: of a class; most: the largest dk + dv of the layer.
    """
    times = 2 ** min(max(round(log2((most + 1) / (sum(widths) + 1))), 0), 2)
    return Cut(pairs=64 * times, warps=4 * min(times, 2))


def longest_first(
    units: Tensor,
    counts: Tensor,
    positions: Tensor | None,
    queries: Tensor,
    window: int | None,
    blocks: int,
) -> Tensor:
    """Return the items of a class, int64 [blocks * B * U], sorted by the number of tokens they
    visit, most first.

    Item numbers are those of the kernel: last tile of queries first, then by sequence, then by
        unit. Items of equal cost stay in that order, in which adjacent items read the same tokens.
    """
    rows = counts[:, units[:, 1]]  # [B, U]
    if positions is not None:
        cost = rows.expand(blocks, -1, -1)
    else:
        last = torch.arange(blocks, 0, -1, device=units.device) * queries.shape[1] // blocks - 1
        at = queries[:, last.clamp(min=0)].T[..., None] + 1  # [blocks, B, 1]
        cost = at.minimum(rows)
        if window is not None:
            cost = cost.clamp(max=window)
    return cost.flatten().argsort(descending=True, stable=True)


@lru_cache(maxsize=256)
def classes_of(
    key_starts: tuple[int, ...],
    key_ranks: tuple[int, ...],
    value_starts: tuple[int, ...],
    value_ranks: tuple[int, ...],
    owner: tuple[int, ...],
    device: torch.device,
) -> tuple[UnitClass, ...]:
    """Group all units by class, the largest class first. A unit's columns: see `prefill_kernel`."""
    by_widths: dict[Widths, list[list[int]]] = {}
    heads = zip(key_starts, key_ranks, value_starts, value_ranks, owner, strict=True)
    for head, (key, k_rank, value, v_rank, group) in enumerate(heads):
        for column in range(0, max(v_rank, 1), WIDEST):
            width = min(v_rank - column, WIDEST)
            unit = [head, group, key, k_rank, value + column, width, column, 0]
            by_widths.setdefault(widths_of(k_rank, width), []).append(unit)
    return tuple(
        UnitClass(
            widths,
            upload(np.array(by_widths[widths]), device),
            all((u[3], u[5]) == (sum(widths[:2]), widths[2]) for u in by_widths[widths]),
            gcd(8, *(n for u in by_widths[widths] for n in u[2:6])),
        )
        for widths in sorted(by_widths, key=sum, reverse=True)
    )


def widths_of(k_rank: int, v_rank: int) -> Widths:
    """Return the padded widths of a unit.

    Values are not split in two, and are padded to at least 64 or to the width of the keys' first
    part: on an H200, narrower tiles of values gave wrong numbers (Triton 3.6; ranks 16 to 256 of
    keys and values were tried, only these failed).
    """
    first, second = parts(k_rank)
    return first, second, max(padded_width(v_rank), min(first, 64))


def parts(rank: int) -> tuple[int, int]:
    """Split a rank into two powers of two that hold it, each at least 16, with the least padding;
    the second may be 0."""
    whole = padded_width(rank)
    half = whole // 2
    rest = padded_width(rank - half) if rank > half else 0
    return (half, rest) if half >= 16 and half + rest < whole else (whole, 0)


def ends_of_tiles(positions: Tensor, counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the earliest and the latest position in every tile of `rows` tokens, each int32
    [B, G, tiles].

    positions int32 [B, G, S], counts int [B, G]. A token that does not exist counts as NEVER.
    """
    exists = torch.arange(positions.shape[-1], device=positions.device) < counts[..., None]
    padded = F.pad(
        positions.masked_fill(~exists, NEVER), (0, -exists.shape[-1] % rows), value=NEVER
    )
    earliest, latest = padded.unflatten(-1, (-1, rows)).aminmax(dim=-1)
    return earliest, latest


def any_of_tile(counted: Tensor, rows: int) -> Tensor:
    """Return whether each tile of `rows` tokens has a nonzero entry: int8 [B, G, S] ->
    [B, G, tiles]."""
    return F.pad(counted, (0, -counted.shape[-1] % rows)).unflatten(-1, (-1, rows)).amax(-1)
