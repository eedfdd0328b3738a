"""Which rows to evict, and how survivors move together so that whole pages come free.

Pure functions of tensors. Shapes: B sequences, Hq query heads, Hk KV heads, n queries, G groups of
one sequence (all layers; of one layer in `attention_mass`), T row slots, padded to the longest
group of all sequences, P rows of a page, E = ceil(T / P) blocks of a group, N = G * E. Rows of a
group fill slots 0..length-1 in any order of positions. A *block* is what must go for one more page
to come free.

The order of eviction does not depend on the budget: a smaller budget evicts the same blocks and
more; with a policy's `floor` it does, since what groups have for sure is a part of it. Sequences
are compressed together, and each as if it were alone. `select` waits for the device once a call,
`compaction` twice, the others never.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kvfold.cache.eviction.policies import Budget, Policy
from kvfold.cache.slabs import upload
from kvfold.spec.layout import UNIT

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
    recent: Tensor,
    sizes: Sequence[int],
    generator: torch.Generator | None = None,
    in_order: bool = False,
) -> Tensor:
    """What each row is worth: fp32 [B, G, T], +inf where it must stay and where there is no row.

    metrics fp32 [B, G, T] (summed `attention_mass`); positions int [B, G, T]; valid bool [B, G, T];
    recent int [B]: last tokens of every sequence that stay, `protected_recent` of its policy: the
    observation window slides on while tokens are generated; sizes: T of every sequence alone, by
    which `random` draws; generator: for `random`, on the metrics' device; in_order: positions
    ascend. Sinks stay too.
    Pooling (KV-Compress eq. 8) is done here, over all that was observed so far, so that metrics
    stay sums; eq. 20 adds generated queries after it.
    """
    if policy.score == "attention":
        worth = _max_pool(metrics, positions, valid, policy.pool, in_order)
    elif policy.score == "recency":
        worth = positions.float()
    else:
        worth = _draw(metrics, sizes, generator)
    last = positions.where(valid, -1).amax((1, 2))
    may_go = valid & (positions <= (last - recent)[:, None, None])
    if policy.sinks:
        may_go &= positions >= policy.sinks
    return worth.where(may_go, INF)


def _draw(like: Tensor, sizes: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """Random fp32 [B, G, T]. A sequence's do not depend on how long those beside it are."""
    num_groups, most = like.shape[1:]
    draws = (torch.rand(num_groups, x, generator=generator, device=like.device) for x in sizes)
    return torch.stack([F.pad(x, (0, most - x.shape[1])) for x in draws])


def _max_pool(
    metrics: Tensor, positions: Tensor, valid: Tensor, width: int, in_order: bool
) -> Tensor:
    """Largest metric of the `width` rows around each, in order of position, gaps closed."""
    if width == 1:
        return metrics
    known = metrics.where(valid, -INF)
    if in_order:
        return F.max_pool1d(known, width, stride=1, padding=width // 2)
    behind = torch.iinfo(positions.dtype).max  # slots without a row are nobody's neighbours
    order = positions.where(valid, behind).argsort(dim=-1)
    pooled = F.max_pool1d(known.gather(-1, order), width, stride=1, padding=width // 2)
    return torch.empty_like(metrics).scatter_(-1, order, pooled)


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
    per byte freed, cost / page_units, in the order that `policy.scope` gives, until the budget
    holds: exactly `pages`, or at most `bytes` by less than one page. Protected rows come first:
    where they need more, the least possible is kept, so compare the returned numbers. A group
    without protected rows may lose all its pages.
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
    by_cost = (costs / page_units[:, None]).flatten(1).argsort(dim=1, stable=True)
    order = by_cost if policy.scope == "all" else _in_turn(by_cost, pages, unit, share)
    about = costs, size, (pages * size).sum(1) - limits
    num_blocks = _first_blocks(order, *about)
    if policy.floor:
        each = torch.arange(len(unit), device=unit.device)
        share = _safeguarded(pages - num_blocks, unit, policy.floor)
        num_blocks = _first_blocks(_in_turn(by_cost, pages, each, share), *about)
    num_rows = (num_blocks * page - (-lengths % page)).clamp(min=0)
    evicted = _lowest(known, ascending, num_rows)
    kept = _num_pages(lengths - evicted.sum(2), page)
    return evicted, _checked(pages, kept, num_blocks, costs.isfinite().sum((1, 2)), budgets)


def _sorted(x: Tensor) -> Tensor:
    """Along the last dimension; NaN comes last. NumPy sorts rows some ten times faster on a CPU,
    because it need not say where each number was."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy()))
    return x.sort().values


def _lowest(scores: Tensor, ascending: Tensor, count: Tensor) -> Tensor:
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
    """Which unit a group belongs to, int64 [G], and its share of the budget, fp64 [G]."""
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
