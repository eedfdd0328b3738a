"""Spends a budget of numbers by the priority of every dimension. Pure functions.

`_fill` spends it on the highest priorities, in steps of `align`: never more than the budget, and
less than it by less than one step of one latent.
"""

import math
from itertools import combinations

from torch import Tensor

from kvfold.compression.ranks.base import Candidates, LatentCandidate, RankMethod
from kvfold.utils.errors import SettingError

MAX_CLASSES = 4  # (key rank, value rank) pairs per layer: kernels compile one body for each
Step = tuple[float, int]  # (priority, numbers it costs)
Steps = list[list[Step]]  # the steps of every candidate, best first
Heads = list[list[int]]  # for every head of a layer, the indices of its candidates
_BULK_CLASSES = 3  # the fourth class remains for the last steps of the budget


def allocate(candidates: Candidates, method: RankMethod, budget: int, align: int) -> list[int]:
    """The rank of every candidate: multiples of `align`, together at most `budget` numbers per
    token.

    A latent whose width is no multiple of `align` has a shorter last step. Skipped candidates stay
    whole, and every other layer keeps at least one step; raises SettingError where the budget is
    too small for that.
    """
    priorities = method.priorities(candidates, budget)
    steps = [_steps(c, p, method, align) for c, p in zip(candidates, priorities, strict=True)]
    layers = _layers(candidates)
    required = {i for i, c in enumerate(candidates) if c.skip}
    for heads in layers:  # a layer that stores nothing would have no entries to count
        best = max({i for indices in heads for i in indices}, key=lambda i: steps[i][0][0])
        steps[best][0] = (float("inf"), steps[best][0][1])
        required.add(best)
    _check(candidates, sum(steps[i][0][1] for i in required), budget, align)
    ranks = _fill(steps, budget)
    return _limit_classes(layers, steps, ranks, budget, align)


def _check(candidates: Candidates, required: int, budget: int, align: int) -> None:
    """Raises SettingError for a budget below `required` numbers per token."""
    if required <= budget:
        return
    whole = sum(c.numbers for c in candidates if c.skip)
    keep = math.ceil(1000 * required / sum(c.numbers for c in candidates)) / 1000
    raise SettingError(
        f"the smallest cache takes {required} numbers a token"
        + (f" ({whole} in layers that stay whole)" if whole else "")
        + f", and the budget is {budget}: raise `keep` to at least {keep:g}, or lower `align` from"
        f" {align}" + (", or skip fewer layers in the recipe" if whole else "")
    )


def _steps(
    candidate: LatentCandidate, priority: Tensor, method: RankMethod, align: int
) -> list[Step]:
    """The candidate's dimensions in steps of `align`, best first."""
    if candidate.skip:
        return [(float("inf"), candidate.numbers)]
    blocks = priority.split(align)
    return [(float(method.of_block(block)), len(block)) for block in blocks]


def _layers(candidates: Candidates) -> list[Heads]:
    """For every layer in order, the candidates of each of its heads."""
    layers: dict[int, dict[int, list[int]]] = {}
    for i, c in enumerate(candidates):
        for head in c.heads:
            layers.setdefault(c.layer, {}).setdefault(head, []).append(i)
    return [list(heads.values()) for _, heads in sorted(layers.items())]


def _fill(steps: Steps, budget: int) -> list[int]:
    """Ranks from taking steps by priority, within a candidate in order, while the budget lasts."""
    ordered = sorted(
        (-priority, position, index, cost)
        for index, candidate_steps in enumerate(steps)
        for position, (priority, cost) in enumerate(candidate_steps)
    )
    ranks, taken = [0] * len(steps), [0] * len(steps)
    for _, position, index, cost in ordered:
        if taken[index] == position and cost <= budget:
            ranks[index] += cost
            taken[index] += 1
            budget -= cost
    return ranks


def _limit_classes(
    layers: list[Heads], steps: Steps, ranks: list[int], budget: int, align: int
) -> list[int]:
    """Ranks with at most MAX_CLASSES rank pairs per layer, at the least loss of priority, within
    the budget."""
    if all(len(_classes(heads, ranks)) <= MAX_CLASSES for heads in layers):
        return ranks
    for heads in layers:
        _merge(heads, steps, ranks)
    left = _spend(layers, steps, ranks, budget - sum(ranks))
    for heads in layers:
        if left < align:
            break
        _merge(heads, steps, ranks)
        left = _top_up(heads, steps, ranks, budget - sum(ranks))
    return ranks


def _classes(heads: Heads, ranks: list[int]) -> list[tuple[int, ...]]:
    """The different rank pairs of a layer's heads."""
    return sorted({tuple(ranks[i] for i in indices) for indices in heads})


def _merge(heads: Heads, steps: Steps, ranks: list[int]) -> None:
    """Lower two classes to the minimum of both, where that loses the least priority, until a layer
    has _BULK_CLASSES."""
    while len(classes := _classes(heads, ranks)) > _BULK_CLASSES:
        best: tuple[float, dict[int, int]] | None = None
        for first, second in combinations(classes, 2):
            floor = [min(x, y) for x, y in zip(first, second, strict=True)]
            change = {
                i: floor[side]
                for indices in heads
                if tuple(ranks[i] for i in indices) in (first, second)
                for side, i in enumerate(indices)
            }
            cost = sum(_dropped(steps[i], new, ranks[i]) for i, new in change.items())
            if best is None or cost < best[0]:
                best = (cost, change)
        assert best is not None
        for i, new in best[1].items():
            ranks[i] = new


def _dropped(steps: list[Step], low: int, high: int) -> float:
    """The sum of priority times width of the steps between two ranks."""
    total, end = 0.0, 0
    for priority, cost in steps:
        end += cost
        if low < end <= high:
            total += min(priority, 1e30) * cost
    return total


def _spend(layers: list[Heads], steps: Steps, ranks: list[int], left: int) -> int:
    """Spend `left` numbers on the best steps that keep every layer within MAX_CLASSES. Returns what
    is left when no single step does."""
    layer_of = {i: heads for heads in layers for indices in heads for i in indices}
    while True:
        options = sorted(
            ((step, i) for i in range(len(ranks)) if (step := _next(steps[i], ranks[i]))),
            key=lambda option: -option[0][0],
        )
        for (_, cost), i in options:
            if cost > left:
                continue
            ranks[i] += cost
            if len(_classes(layer_of[i], ranks)) <= MAX_CLASSES:
                left -= cost
                break
            ranks[i] -= cost
        else:
            return left


def _top_up(heads: Heads, steps: Steps, ranks: list[int], left: int) -> int:
    """Spend `left` numbers in one layer of at most _BULK_CLASSES. Returns what is left.

    The heads of a class are raised one by one, so that there is one additional class at any time.
    Stops when less than a step is left, or all ranks are full.
    """
    while True:
        moves: dict[tuple[tuple[int, ...], int], set[int]] = {}
        for indices in heads:
            for side, i in enumerate(indices):
                if _next(steps[i], ranks[i]):
                    moves.setdefault((tuple(ranks[j] for j in indices), side), set()).add(i)
        if not moves:
            return left
        best = max(
            moves.values(), key=lambda move: max(_priority(steps[i], ranks[i]) for i in move)
        )
        for i in sorted(best, key=lambda i: -_priority(steps[i], ranks[i])):
            step = _next(steps[i], ranks[i])
            if step is None or step[1] > left:
                return left
            ranks[i] += step[1]
            left -= step[1]


def _priority(steps: list[Step], rank: int) -> float:
    step = _next(steps, rank)
    return -float("inf") if step is None else step[0]


def _next(steps: list[Step], rank: int) -> Step | None:
    """The step that begins at `rank`; None at the full width."""
    end = 0
    for step in steps:
        if end == rank:
            return step
        end += step[1]
    return None
