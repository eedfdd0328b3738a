"""Which rows to evict, and how survivors move together so that whole pages come free.

Pure functions of tensors. Shapes: B sequences, Hq query heads, Hk KV heads, n queries, G groups of
one sequence (all layers; of one layer in `attention_mass`), T row slots, padded to the longest
group, P rows of a page, E = ceil(T / P) blocks of a group, N = G * E. Rows of a group fill slots
0..length-1 in any order of positions. A *block* is what must go for one more page to come free.

The order of eviction does not depend on the budget: a smaller budget evicts the same blocks and
more. All but `attention_mass` run once per compression, and may wait for the device.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kvfold.cache.layout import UNIT
from kvfold.cache.policies import Budget, Policy

PYRAMID = 20  # beta of PyramidKV: the last layer keeps 1 / beta of the average
INF = float("inf")

Id = TypeVar("Id")


def attention_mass(
    weights: Tensor,
    key_positions: Tensor,
    query_positions: Tensor,
    prompt_lengths: Tensor,
    policy: Policy,
    groups: Sequence[tuple[int, ...]],
) -> Tensor:
    """What these queries add to the metrics of one layer's rows: fp32 [B, G, T].

    weights [B, Hq, n, T]: attention probabilities, zero where nothing is attended; key_positions
    int [B, Hk, T]; query_positions int [B, n], negative for padding; prompt_lengths int [B];
    groups: the KV heads of each of the layer's groups. Summed over the counted queries and over
    all query heads of the group's KV heads: the cache is not repeated (KV-Compress §4.1, eq. 9-11,
    19, 20). Prompts may come in chunks, whose masses add up. Never waits for the device.
    """
    heads = key_positions.shape[1]
    counted = observed(query_positions, prompt_lengths, policy)[:, None, :, None]
    if policy.exclude:
        distance = query_positions[:, None, :, None] - key_positions[:, :, None]
        counted = counted & (distance >= policy.exclude)
    powers = weights.detach().float() ** policy.power
    by_head = powers.reshape(len(weights), heads, -1, *weights.shape[2:]).sum(2)
    mass = by_head.where(counted, 0.0).sum(2)
    return F.pad(mass, (0, 0, 0, 1))[:, _members(tuple(groups), heads, mass.device)].sum(2)


def observed(query_positions: Tensor, prompt_lengths: Tensor, policy: Policy) -> Tensor:
    """bool [B, n]: queries in the prompt's observation window, and generated ones if continual."""
    window = prompt_lengths if policy.window is None else policy.window
    first = (prompt_lengths - window).clamp(min=0)
    seen = query_positions >= first[:, None]
    return seen if policy.continual else seen & (query_positions < prompt_lengths[:, None])


@lru_cache
def _members(groups: tuple[tuple[int, ...], ...], heads: int, device: torch.device) -> Tensor:
    """int64 [G, most heads of a group], padded with `heads`. Cached, as the copy waits."""
    widest = max(map(len, groups))
    padded = [[*group, *[heads] * (widest - len(group))] for group in groups]
    return torch.tensor(padded, device=device)


def scores(
    metrics: Tensor,
    positions: Tensor,
    valid: Tensor,
    policy: Policy,
    generator: torch.Generator | None = None,
    in_order: bool = False,
) -> Tensor:
    """What each row is worth: fp32 [G, T], +inf where it must stay and where there is no row.

    metrics fp32 [G, T] (summed `attention_mass`); positions int [G, T]; valid bool [G, T];
    generator: for `random`, on the metrics' device; in_order: positions ascend. Sinks and the
    sequence's last tokens stay: `recent` ones and as many as the observation window, which slides
    on while tokens are generated.
    Pooling (KV-Compress eq. 8) is done here, over all that was observed so far, so that metrics
    stay sums; eq. 20 adds generated queries after it.
    """
    if policy.score == "attention":
        worth = _max_pool(metrics, positions, valid, policy.pool, in_order)
    elif policy.score == "recency":
        worth = positions.float()
    else:
        worth = torch.rand(metrics.shape, generator=generator, device=metrics.device)
    last = positions.masked_fill(~valid, -1).amax()
    stays = (positions < policy.sinks) | (positions > last - policy.protected_recent)
    return worth.masked_fill(stays | ~valid, INF)


def _max_pool(
    metrics: Tensor, positions: Tensor, valid: Tensor, width: int, in_order: bool
) -> Tensor:
    """Largest metric of the `width` rows around each, in order of position, gaps closed."""
    if width == 1:
        return metrics
    if in_order:
        known = metrics.masked_fill(~valid, -INF)
        return F.max_pool1d(known, width, stride=1, padding=width // 2)
    behind = torch.iinfo(positions.dtype).max  # slots without a row are nobody's neighbours
    order = positions.masked_fill(~valid, behind).argsort(dim=1)
    sorted_metrics = metrics.masked_fill(~valid, -INF).gather(1, order)
    pooled = F.max_pool1d(sorted_metrics, width, stride=1, padding=width // 2)
    return torch.empty_like(metrics).scatter_(1, order, pooled)


def select(
    scores: Tensor,
    lengths: Tensor,
    page: int,
    page_units: Tensor,
    layer_of_group: Tensor,
    policy: Policy,
    budget: Budget,
) -> tuple[Tensor, int]:
    """Rows of one sequence to evict, bool [G, T], and how many pages are then kept.

    scores fp32 [G, T], +inf (or NaN) for rows that stay; lengths, page_units, layer_of_group int
    [G]. KV-Compress §4.2.2: rows go in order of score; a group's first block is its partial last
    page (or a whole one), later blocks are P rows; a block costs its largest score (eq. 17). Blocks
    go by cost per byte freed, cost / page_units, in the order that `policy.scope` gives, until the
    budget holds: exactly `pages`, or at most `bytes` by less than one page. Protected rows come
    first: where they need more, the least possible is kept, so compare the returned number. A
    group without protected rows may lose all its pages.
    """
    lengths, ranks = lengths.long(), torch.arange(scores.shape[1], device=scores.device)
    ascending = scores.masked_fill(ranks >= lengths[:, None], INF).sort(dim=1, stable=True)
    costs = _block_costs(ascending.values, lengths, page)
    pages = _num_pages(lengths, page)
    size = torch.ones_like(pages) if budget.bytes is None else page_units.long() * UNIT
    order = _order(costs / page_units[:, None], pages, layer_of_group, policy)
    num_blocks = _first_blocks(order, costs, size, (pages * size).sum() - budget.limit)
    num_rows = num_blocks * page - (-lengths % page)
    evicted = torch.zeros_like(scores, dtype=torch.bool)
    evicted.scatter_(1, ascending.indices, ranks < num_rows[:, None])
    kept = _num_pages(lengths - evicted.sum(1), page)
    return evicted, _checked(pages, kept, num_blocks, costs.isfinite().sum(), budget)


def _num_pages(lengths: Tensor, page: int) -> Tensor:
    return (lengths + page - 1) // page


def _block_costs(ascending: Tensor, lengths: Tensor, page: int) -> Tensor:
    """[G, E] largest score of each block, rising along a group; inf where there is no block.

    Empty slots of the last page count as the cheapest rows, so block e ends at rank
    (e + 1) P - empty - 1 of the sorted rows.
    """
    num_blocks = -(-ascending.shape[1] // page)
    ends = torch.arange(1, num_blocks + 1, device=lengths.device) * page
    last = ends - 1 - (-lengths % page)[:, None]
    costs = ascending.gather(1, last.clamp(max=ascending.shape[1] - 1))
    return costs.masked_fill(last >= lengths[:, None], INF)


def _order(costs: Tensor, pages: Tensor, layer_of_group: Tensor, policy: Policy) -> Tensor:
    """int64 [N] block numbers (group * E + block) in the order in which they go.

    Groups that compete form a unit, whose cheapest block goes next. Of several units the one that
    keeps most for its share gives way, (pages left - 1/2) / share, the cheaper block on a tie: the
    rounding of Webster, which meets any budget exactly and skips units that have nothing to give.
    """
    by_cost = costs.flatten().argsort(stable=True)
    if policy.scope == "all":
        return by_cost
    unit, share = _units(layer_of_group, policy)
    left, shares = (torch.zeros_like(x).index_add_(0, unit, x) for x in (pages, share))
    own = unit.repeat_interleave(costs.shape[1])[by_cost]
    excess = ((left[own] - _rank_within(own)).double() - 0.5) / shares[own]
    return by_cost[excess.argsort(descending=True, stable=True)]


def _units(layer_of_group: Tensor, policy: Policy) -> tuple[Tensor, Tensor]:
    """Which unit a group belongs to, int64 [G], and its share of the budget, fp64 [G]."""
    layers = torch.unique(layer_of_group, return_inverse=True)[1]
    share = torch.ones_like(layers, dtype=torch.float64)
    if policy.scope == "layer":
        return layers, share
    if policy.scope == "pyramid":
        depth = layers.double() / layers.max().clamp(min=1)
        share = 2 - 1 / PYRAMID - (2 - 2 / PYRAMID) * depth
    return torch.arange(len(layers), device=layers.device), share


def _rank_within(own: Tensor) -> Tensor:
    """int64 [N]: how many earlier entries of `own` are the same."""
    ascending = own.sort(stable=True)
    first = torch.searchsorted(ascending.values, ascending.values)
    ranks = torch.arange(len(own), device=own.device) - first
    return torch.empty_like(own).scatter_(0, ascending.indices, ranks)


def _first_blocks(order: Tensor, costs: Tensor, size: Tensor, excess: Tensor) -> Tensor:
    """int64 [G] blocks that go from each group: the first in `order` that free `excess`."""
    freed = torch.where(costs.isfinite(), size[:, None], 0).flatten()[order]
    goes = (freed.cumsum(0) - freed < excess) & (freed > 0)
    return torch.empty_like(goes).scatter_(0, order, goes).view_as(costs).sum(1)


def _checked(
    pages: Tensor, kept: Tensor, num_blocks: Tensor, evictable: Tensor, budget: Budget
) -> int:
    """Pages kept in all. Asserts that every evicted block frees a page, and the budget in pages."""
    assert torch.equal(kept, pages - num_blocks), f"{pages} pages - {num_blocks} != {kept} kept"
    present, num_kept, most = torch.stack([pages.sum(), kept.sum(), evictable]).tolist()
    if budget.pages is not None:
        expected = max(min(budget.pages, present), present - most)
        assert num_kept == expected, (
            f"{num_kept} pages kept != {expected}: budget {budget.pages} of {present} pages,"
            f" {most} of them evictable"
        )
    return int(num_kept)


def compaction(evicted: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Moves that close the holes: group, source and target slots, int64 [M]; new lengths [G].

    evicted bool [G, T]; lengths int [G]. KV-Compress Algorithm 1 in parallel: survivors beyond the
    new length take the evicted slots before it, so sources and targets never meet and the moves
    can be made at once, in any order.
    """
    slots = torch.arange(evicted.shape[1], device=evicted.device)
    survives = ~evicted & (slots < lengths[:, None])
    new_lengths = survives.sum(1)
    inside = slots < new_lengths[:, None]
    group, source = (survives & ~inside).nonzero(as_tuple=True)
    _, target = (~survives & inside).nonzero(as_tuple=True)
    return group, source, target, new_lengths.to(lengths.dtype)


def capped(order: Sequence[tuple[Id, int]], limit: int) -> list[Id]:
    """Sequences to compress in this round: the first whose rows stay within `limit` together.

    order: (sequence id, rows in all groups), never compressed first, then by the time of the last
    compression. Stops at the first that would exceed the limit (KV-Compress §4.2.3): one with more
    rows than `limit` is never compressed, nor are those behind it.
    """
    totals = accumulate(num_rows for _, num_rows in order)
    return [name for (name, _), total in zip(order, totals, strict=True) if total <= limit]
