"""Choose the entries to evict from their scores, so that whole pages become free.

Pure functions of tensors. Shapes: B sequences, G groups of one sequence (all layers), T entry
slots, padded to the longest group of all sequences, P entries of a page, E = ceil(T / P) blocks of
a group, N = G * E. Entries of a group fill slots 0..length-1 in any order of positions. A *block*
here is the set of entries whose eviction frees one more page of a group.

The order of eviction does not depend on the budget, so a smaller budget evicts the same blocks and
more; a policy with a `floor` is the exception, since the guaranteed share is part of the budget.
Sequences are compressed together, with the same result as one by one. `select` waits for the device
once a call, the other functions never.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kvfold.cache.eviction.base import EntriesView
from kvfold.cache.eviction.budget import Budget
from kvfold.cache.eviction.policy import Policy
from kvfold.layout.pages import UNIT
from kvfold.ops.common.launch import upload

PYRAMID = 20  # beta of PyramidKV: the last layer keeps 1 / beta of the average
INF = float("inf")


def scores(policy: Policy, view: EntriesView, recent: Tensor) -> Tensor:
    """The policy's scores fp32 [B, G, T], with +inf for protected entries and empty slots.

    recent int [B]: number of last tokens of each sequence that are protected (`protected_recent`).
    The window moves on while tokens are generated. Sinks are protected too.
    """
    raw, valid, positions = policy.scorer.score(view), view.valid, view.positions
    assert raw.shape == valid.shape, f"{policy.name}: {raw.shape} scores, {valid.shape} entries"
    last = positions.where(valid, -1).amax((1, 2))
    may_go = valid & (positions <= (last - recent)[:, None, None])
    if policy.sinks:
        may_go &= positions >= policy.sinks
    return raw.where(may_go, INF)


def select(
    scores: Tensor,
    lengths: Tensor,
    page: int,
    page_units: Tensor,
    layer_of_group: Tensor,
    policy: Policy,
    budgets: Sequence[Budget],
) -> tuple[Tensor, list[int]]:
    """Entries to evict, bool [B, G, T], and the number of pages that each sequence keeps.

    scores fp32 [B, G, T], +inf (or NaN) for protected entries; lengths int [B, G]; page_units int
    [G]; layer_of_group int [G], ascending; budgets: B of one kind.

    KV-Compress §4.2.2: entries are evicted in order of score, the first slot first if scores are
    equal. A group's first block is the partial last page (or a full one), later blocks are P
    entries. The cost of a block is its largest score (eq. 17). Blocks are evicted by cost per page
    freed, or per byte if the budget counts bytes, in the order that `policy.scope` gives, until the
    budget is met: exactly `pages`, or at most `bytes` by less than one page.

    Cost per byte supposes scores that add up; ranks and angles do not, and groups with large pages
    would lose everything. If the protected entries need more than the budget, only they are kept,
    so compare the returned numbers. A group without protected entries may lose all its pages.
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
    competitors, share = _units(layer_of_group, policy)
    by_cost = (costs / size[:, None]).flatten(1).argsort(dim=1, stable=True)
    order = by_cost if policy.scope == "all" else _in_turn(by_cost, pages, competitors, share)
    remaining = costs, size, (pages * size).sum(1) - limits
    num_blocks = _first_blocks(order, *remaining)
    if policy.floor:
        groups = torch.arange(len(competitors), device=competitors.device)
        share = _safeguarded(pages - num_blocks, competitors, policy.floor)
        num_blocks = _first_blocks(_in_turn(by_cost, pages, groups, share), *remaining)
    num_entries = (num_blocks * page - (-lengths % page)).clamp(min=0)
    evicted = lowest(known, ascending, num_entries)
    kept_pages = _num_pages(lengths - evicted.sum(2), page)
    return evicted, _checked(pages, kept_pages, num_blocks, costs.isfinite().sum((1, 2)), budgets)


def _sorted(x: Tensor) -> Tensor:
    """Sort along the last dimension, NaN last. NumPy sorts about 10x faster than torch on a CPU,
    because it returns no indices."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy()))
    return x.sort().values


def lowest(scores: Tensor, ascending: Tensor, count: Tensor) -> Tensor:
    """bool [B, G, T]: the `count` [B, G] lowest scores of each group, the first slots if scores are
    equal."""
    most = ascending.gather(2, (count - 1).clamp(min=0)[..., None])
    most = most.masked_fill(count[..., None] == 0, -INF)
    num_below = torch.searchsorted(ascending, most)
    equal = scores == most
    first = equal.cumsum(2, dtype=torch.int32) <= count[..., None] - num_below
    return (scores < most) | (equal & first)


def _num_pages(lengths: Tensor, page: int) -> Tensor:
    return (lengths + page - 1) // page


def _block_costs(ascending: Tensor, lengths: Tensor, page: int) -> Tensor:
    """Largest score of each block [B, G, E], ascending within a group; inf where there is no block.

    Empty slots of the last page count as the cheapest entries, so block e ends at rank (e + 1) P -
    empty - 1 of the sorted entries.
    """
    num_blocks = -(-ascending.shape[2] // page)
    ends = torch.arange(1, num_blocks + 1, device=lengths.device) * page
    last = ends - 1 - (-lengths % page)[..., None]
    costs = ascending.gather(2, last.clamp(max=ascending.shape[2] - 1))
    return costs.masked_fill(last >= lengths[..., None], INF)


def _in_turn(by_cost: Tensor, pages: Tensor, unit: Tensor, share: Tensor) -> Tensor:
    """Blocks int64 [B, N] (group * E + block) in the order of eviction, for groups that compete in
    units.

    by_cost: blocks, cheapest first; pages int64 [B, G]; unit int64 [G], the unit of each group;
        share fp64 [B, G] or [G]. The cheapest block of a unit is its next one. Among units, the
        next one is the unit with the most pages for its share, (pages left - 1/2) / share, or with
        the cheaper block on a tie. This is Webster's rounding: it meets any budget exactly and
        skips units that have nothing to evict.
    """
    pages_left = torch.zeros_like(pages).index_add_(1, unit, pages)
    shares = share.new_zeros(pages.shape).index_add_(1, unit, share.expand(pages.shape))
    unit_of = unit.repeat_interleave(by_cost.shape[1] // len(unit))[by_cost]
    # fp64, because two units' numbers can round to the same fp32 number.
    excess = (
        (pages_left.gather(1, unit_of) - _rank_within(unit_of)).double() - 0.5
    ) / shares.gather(1, unit_of)
    return by_cost.gather(1, excess.argsort(dim=1, descending=True, stable=True))


def _units(layer_of_group: Tensor, policy: Policy) -> tuple[Tensor, Tensor]:
    """The unit in which each group competes, int64 [G], and the group's share of the budget, fp64
    [G]."""
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


def _safeguarded(pages: Tensor, unit: Tensor, floor: float) -> Tensor:
    """Shares fp64 [B, G] of groups to which competition in their units [G] gave `pages` [B, G]
    pages: `floor` of a unit's pages is divided evenly instead (`floor_alpha` of Ada-KV)."""
    stacked = torch.stack((pages, torch.ones_like(pages))).double()
    total, count = torch.zeros_like(stacked).index_add_(2, unit, stacked)[..., unit]
    return floor * (total / count) + (1 - floor) * stacked[0]


def _rank_within(labels: Tensor) -> Tensor:
    """For each element of labels [B, N], how many earlier elements [b] are equal: int64
    [B, N]."""
    ascending = labels.sort(dim=1, stable=True)
    first = torch.searchsorted(ascending.values, ascending.values)
    ranks = torch.arange(labels.shape[1], device=labels.device) - first
    return torch.empty_like(labels).scatter_(1, ascending.indices, ranks)


def _first_blocks(order: Tensor, costs: Tensor, size: Tensor, excess: Tensor) -> Tensor:
    """Number of blocks evicted from each group, int64 [B, G]: the first in `order` that free
    `excess` [B]."""
    freed = torch.where(costs.isfinite(), size[:, None], 0).flatten(1).gather(1, order)
    goes = (freed.cumsum(1) - freed < excess[:, None]) & (freed > 0)
    return torch.empty_like(goes).scatter_(1, order, goes).view_as(costs).sum(2)


def _checked(
    pages: Tensor,
    kept_pages: Tensor,
    num_blocks: Tensor,
    evictable: Tensor,
    budgets: Sequence[Budget],
) -> list[int]:
    """Pages kept per sequence. Asserts that every evicted block frees a page, and that budgets in
    pages are met exactly."""
    freed = num_blocks.sum(1).where((kept_pages == pages - num_blocks).all(1), -1)
    columns = torch.stack((pages.sum(1), kept_pages.sum(1), evictable, freed)).tolist()
    for budget, present, num_kept, num_evictable, num_freed in zip(budgets, *columns, strict=True):
        assert num_kept == present - num_freed, (
            f"{present} pages - {num_freed} freed != {num_kept} kept (-1: differs by group)"
        )
        if budget.pages is not None:
            expected = max(min(budget.pages, present), present - num_evictable)
            assert num_kept == expected, (
                f"{num_kept} pages kept != {expected}: budget {budget.pages} of {present} pages,"
                f" {num_evictable} of them evictable"
            )
    return columns[1]
