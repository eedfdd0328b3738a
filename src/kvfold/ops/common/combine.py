"""Merge the partial results of items that several slices share (split-K): the last launch of decode
attention.

Shapes: I items, P partial results (see `plan`), HQ query heads, `heads` of an item, padded to GP;
DV columns of a partial result.
"""
# mypy: allow-untyped-defs

import triton.language as tl
from torch import Tensor

from kvfold.ops.common.launch import launch_options
from kvfold.ops.common.plan import Slices, cdiv, power_of_two
from kvfold.ops.common.recording import launch
from kvfold.ops.common.step_kernel import step_kernel
from kvfold.ops.decode.kernels import after_launch

TILE = 2048  # numbers of parts that a program, of one warp, merges at a time
MOST, NARROWEST = 128, 32  # parts at a time; columns


def cut(parts: int, items: int, width: int) -> dict[str, int]:
    """Tuning of the merge: about as many partial results at a time as an item has. The more they
    are, the fewer columns a program takes, since few items make few programs. One warp needs no
    barrier for its sums."""
    block = min(MOST, max(4, power_of_two(cdiv(parts, items))))
    return {"BLOCK": block, "COLUMNS": min(width, max(NARROWEST, TILE // block)), "num_warps": 1}


def combine(
    out: Tensor, lse: Tensor, part: Tensor, part_ml: Tensor, table: Tensor, slices: Slices,
    heads: int, width: int, padding: tuple[int, int] = (1, 1),
) -> None:  # fmt: skip
    """Write out [B, HQ, DO] and lse fp32 [B, HQ] (log2) of the items that several slices share.

    part fp32 [P, GP, width]; part_ml fp32 [P, 2, GP]: maximum scores and softmax sums. table int32
    [G, .]: of groups or of value tiles, see the kernel. padding: query heads per KV head, as stored
    and as in the partial results.
    """
    items = slices.counts.shape[0]
    how = cut(slices.starts.shape[0], items, width)
    launch(
        combine_kernel, (items, heads, width // how["COLUMNS"]),
        out, lse, part, part_ml, table, slices.firsts, slices.counts,
        slices.firsts if slices.order is None else slices.order,
        G=len(table), HQ=out.shape[1], GP=part_ml.shape[2], DO=out.shape[2], DV=width,
        N=padding[0], NP=padding[1], FIELDS=table.shape[1], ORDER=slices.order is not None, **how,
        **launch_options(out.device),
    )  # fmt: skip


@step_kernel
def combine_kernel(
    out, lse, part, part_ml, groups, firsts, counts, order,
    G: tl.constexpr, HQ: tl.constexpr, GP: tl.constexpr, DO: tl.constexpr, DV: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, FIELDS: tl.constexpr, ORDER: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Merge COLUMNS columns of an item's partial results for one query head, BLOCK results at a
    time. Items with one partial result need no merge.

    groups int32 [G, FIELDS]: one line per group, or per value tile, which covers some columns of
    its heads.
    """
    item, head = tl.program_id(0), tl.program_id(1)
    after_launch(PDL)
    count = tl.load(counts + item)
    first = (tl.load(firsts + item) + item).to(tl.int64)
    which = item
    if ORDER:
        which = tl.load(order + item)
    b, g = which // G, which % G
    group_row = groups + FIELDS * g
    row, value_width = b * HQ + tl.load(group_row + 7) + head, tl.load(group_row + 1)
    query_column = head // N * NP + head % N  # in parts
    if count != 1:
        first_column = tl.program_id(2) * COLUMNS
        column, number = first_column + tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
        top, mass = float("-inf"), 0.0
        acc = tl.zeros([COLUMNS], tl.float32)
        for begin in range(0, count, BLOCK):
            in_range = begin + number < count
            index = first + begin + number
            ml = part_ml + index * 2 * GP + query_column
            m = tl.load(ml, in_range, float("-inf"))
            weight = tl.load(ml + GP, in_range, 0.0)
            at = part + (index * GP + query_column)[:, None] * DV + column[None, :]
            x = tl.load(at, in_range[:, None] & (column < value_width)[None, :], 0.0)
            peak = tl.maximum(top, tl.max(m, 0))
            fade, scale = tl.exp2(top - peak), tl.exp2(m - peak)
            mass = mass * fade + tl.sum(scale * weight, 0)
            acc = acc * fade + tl.sum(x * scale[:, None], 0)
            top = peak
        acc = tl.where((column < value_width) & (count > 0), acc / mass, 0.0)
        to, in_range, leads = out + row * DO + column, column < DO, first_column == 0
        if FIELDS > 8:
            to, in_range = to + tl.load(group_row + 8), column < value_width
            leads = leads & (tl.load(group_row + 10) > 0)
        tl.store(to, acc, in_range)
        tl.store(lse + row, top + tl.log2(mass) if count > 0 else float("-inf"), leads)
