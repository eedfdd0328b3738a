"""Rows that go, from what they are worth.

Pure functions of tensors. Shapes: B sequences, G groups of one sequence (all layers), T row slots,
padded to the longest group of all sequences, P rows of a page, E = ceil(T / P) blocks of a group,
N = G * E. Rows of a group fill slots 0..length-1 in any order of positions. A *block* is what must
go for one more page to come free.

The order of eviction does not depend on the budget: a smaller budget evicts the same blocks and
more; with a policy's `floor` it does, since what groups have for sure is a part of it. Sequences
are compressed together, and each as if it were alone. `select` waits for the device once a call,
the others never.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kvfold.cache.eviction.base import Policy, RowsView
from kvfold.cache.eviction.budget import Budget
from kvfold.ops.common.launch import upload
from kvfold.spec.layout import UNIT

PYRAMID = 20  # beta of PyramidKV: the last layer keeps 1 / beta of the average
INF = float("inf")


def scores(policy: Policy, view: RowsView, recent: Tensor) -> Tensor:
    """The policy's scores fp32 [B, G, T], +inf where a row must stay and where there is none.

    recent int [B]: last tokens of every sequence that stay, `protected_recent` of its policy: the
    observation window slides on while tokens are generated. Sinks stay too.
    """
    worth, valid, positions = policy.score(view), view.valid, view.positions
    assert worth.shape == valid.shape, f"{policy.name}: {worth.shape} scores, {valid.shape} rows"
    last = positions.where(valid, -1).amax((1, 2))
    may_go = valid & (positions <= (last - recent)[:, None, None])
    if policy.sinks:
        may_go &= positions >= policy.sinks
    return worth.where(may_go, INF)


def select(
    scores: Tensor,
    lengths: Tensor,
    page: int,
    page_units: Tensor,
    layer_of_group: Tensor,
    policy: Policy,
    budgets: Sequence[Budget],
) -> tuple[Tensor, list[int]]:
    """Rows to evict, bool [B, G, T], and how many pages every sequence then keeps.

    scores fp32 [B, G, T], +inf (or NaN) for rows that stay; lengths int [B, G]; page_units int [G];
    layer_of_group int [G], ascending; budgets: B of one kind. KV-Compress §4.2.2: rows go in order
    of score, the first slot first where equal; a group's first block is its partial last page (or a
    whole one), later blocks are P rows; a block costs its largest score (eq. 17). Blocks go by cost
    per page freed, or per byte if the budget counts bytes, in the order that `policy.scope` gives,
    until it holds: exactly `pages`, or at most `bytes` by less than one page. Per byte supposes
    scores that add up: ranks and angles do not, and would all go where pages are large. Protected
    rows come first: where they need more, the least possible is kept, so compare the returned
    numbers. A group without protected rows may lose all its pages.
    """
    by_bytes = budgets[0].bytes is not None
    assert all((x.bytes is not None) == by_bytes for x in budgets), f"of two kinds: {budgets}"
    slots = torch.arange(scores.shape[2], device=scores.device, dtype=torch.int32)
    known, lengths = scores.where(slots < lengths[..., None], INF), lengths.long()
    ascending = _sorted(known)
    costs = _block_costs(ascending, lengths, page)
    pages = _num_pages(lengths, page)
    size = page_units.long() * UNIT if by_bytes else torch.ones_like(page_units)
    limits = upload(np.array([x.limit for x in budgets]), scores.device)
    unit, share = _units(layer_of_group, policy)
    by_cost = (costs / size[:, None]).flatten(1).argsort(dim=1, stable=True)
    order = by_cost if policy.scope == "all" else _in_turn(by_cost, pages, unit, share)
    about = costs, size, (pages * size).sum(1) - limits
    num_blocks = _first_blocks(order, *about)
    if policy.floor:
        each = torch.arange(len(unit), device=unit.device)
        share = _safeguarded(pages - num_blocks, unit, policy.floor)
        num_blocks = _first_blocks(_in_turn(by_cost, pages, each, share), *about)
    num_rows = (num_blocks * page - (-lengths % page)).clamp(min=0)
    evicted = lowest(known, ascending, num_rows)
    kept = _num_pages(lengths - evicted.sum(2), page)
    return evicted, _checked(pages, kept, num_blocks, costs.isfinite().sum((1, 2)), budgets)


def _sorted(x: Tensor) -> Tensor:
    """Along the last dimension; NaN comes last. NumPy sorts rows some ten times faster on a CPU,
    because it need not say where each number was."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy()))
    return x.sort().values


def lowest(scores: Tensor, ascending: Tensor, count: Tensor) -> Tensor:
    """bool [B, G, T]: the `count` [B, G] lowest scores of every group, the first of equal ones."""
    most = ascending.gather(2, (count - 1).clamp(min=0)[..., None])
    most = most.masked_fill(count[..., None] == 0, -INF)
    num_below = torch.searchsorted(ascending, most)
    equal = scores == most
    first = equal.cumsum(2, dtype=torch.int32) <= count[..., None] - num_below
    return (scores < most) | (equal & first)


def _num_pages(lengths: Tensor, page: int) -> Tensor:
    return (lengths + page - 1) // page


def _block_costs(ascending: Tensor, lengths: Tensor, page: int) -> Tensor:
    """[B, G, E] largest score of each block, rising along a group; inf where there is no block.

    Empty slots of the last page count as the cheapest rows, so block e ends at rank
    (e + 1) P - empty - 1 of the sorted rows.
    """
    num_blocks = -(-ascending.shape[2] // page)
    ends = torch.arange(1, num_blocks + 1, device=lengths.device) * page
    last = ends - 1 - (-lengths % page)[..., None]
    costs = ascending.gather(2, last.clamp(max=ascending.shape[2] - 1))
    return costs.masked_fill(last >= lengths[..., None], INF)


def _in_turn(by_cost: Tensor, pages: Tensor, unit: Tensor, share: Tensor) -> Tensor:
    """Blocks int64 [B, N] (group * E + block), cheapest first, in the order in which they go.

    pages int64 [B, G]; unit int64 [G]; share fp64 [B, G] or [G]. Groups that compete form a unit,
    whose cheapest block goes next. Of several units the one that keeps most for its share gives
    way, (pages left - 1/2) / share, the cheaper block on a tie: the rounding of Webster, which
    meets any budget exactly and skips units that have nothing to give.
    """
    left = torch.zeros_like(pages).index_add_(1, unit, pages)
    shares = share.new_zeros(pages.shape).index_add_(1, unit, share.expand(pages.shape))
    own = unit.repeat_interleave(by_cost.shape[1] // len(unit))[by_cost]
    # fp64, since in fp32 two units' numbers may seem equal: one in P rows has one.
    excess = ((left.gather(1, own) - _rank_within(own)).double() - 0.5) / shares.gather(1, own)
    return by_cost.gather(1, excess.argsort(dim=1, descending=True, stable=True))


def _units(layer_of_group: Tensor, policy: Policy) -> tuple[Tensor, Tensor]:
    """The unit a group belongs to, int64 [G], and its share of the budget, fp64 [G]."""
    layers = F.pad(layer_of_group.diff().sign().cumsum(0), (1, 0))
    share = torch.ones_like(layers, dtype=torch.float64)
    if policy.scope == "all":
        return torch.zeros_like(layers), share
    if policy.scope == "layer":
        return layers, share
    if policy.scope == "pyramid":
        depth = layers.double() / layers.max().clamp(min=1)
        share = 2 - 1 / PYRAMID - (2 - 2 / PYRAMID) * depth
    return torch.arange(len(layers), device=layers.device), share


def _safeguarded(kept: Tensor, unit: Tensor, floor: float) -> Tensor:
    """Shares of groups, fp64 [B, G], that came to keep `kept` [B, G] pages by competing in their
    units [G]: `floor` of each unit's pages is shared evenly instead (`floor_alpha` of Ada-KV)."""
    both = torch.stack((kept, torch.ones_like(kept))).double()
    total, count = torch.zeros_like(both).index_add_(2, unit, both)[..., unit]
    return floor * (total / count) + (1 - floor) * both[0]


def _rank_within(own: Tensor) -> Tensor:
    """int64 [B, N]: how many earlier entries of a row of `own` are the same."""
    ascending = own.sort(dim=1, stable=True)
    first = torch.searchsorted(ascending.values, ascending.values)
    ranks = torch.arange(own.shape[1], device=own.device) - first
    return torch.empty_like(own).scatter_(1, ascending.indices, ranks)


def _first_blocks(order: Tensor, costs: Tensor, size: Tensor, excess: Tensor) -> Tensor:
    """int64 [B, G] blocks that go from each group: the first in `order` that free `excess` [B]."""
    freed = torch.where(costs.isfinite(), size[:, None], 0).flatten(1).gather(1, order)
    goes = (freed.cumsum(1) - freed < excess[:, None]) & (freed > 0)
    return torch.empty_like(goes).scatter_(1, order, goes).view_as(costs).sum(2)


def _checked(
    pages: Tensor, kept: Tensor, num_blocks: Tensor, evictable: Tensor, budgets: Sequence[Budget]
) -> list[int]:
    """Pages kept of every sequence. Asserts that every evicted block frees a page, and budgets in
    pages."""
    freed = num_blocks.sum(1).where((kept == pages - num_blocks).all(1), -1)
    columns = torch.stack((pages.sum(1), kept.sum(1), evictable, freed)).tolist()
    for budget, present, num_kept, most, num_freed in zip(budgets, *columns, strict=True):
        assert num_kept == present - num_freed, (
            f"{present} pages - {num_freed} freed != {num_kept} kept (-1: differs by group)"
        )
        if budget.pages is not None:
            expected = max(min(budget.pages, present), present - most)
            assert num_kept == expected, (
                f"{num_kept} pages kept != {expected}: budget {budget.pages} of {present} pages,"
                f" {most} of them evictable"
            )
    return columns[1]
