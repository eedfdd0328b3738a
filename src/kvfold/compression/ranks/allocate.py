"""Spending a budget of numbers by the priority of every dimension. Pure functions of spectra.

One `_fill` spends the budget on the highest priorities, in steps of `align`, and keeps its rule:
never more than the target, and short of it by less than one step of one latent.
"""

from torch import Tensor

from kvfold.compression.ranks.base import Candidates, LatentCandidate, RankMethod

MAX_CLASSES = 4  # (key rank, value rank) pairs a layer: the kernels compile one body for each
Step = tuple[float, int]  # (priority, numbers it costs)
Steps = list[list[Step]]  # of every candidate, best first
_BULK_CLASSES = 3  # the fourth class is left to spend the last steps of the budget


def allocate(candidates: Candidates, method: RankMethod, budget: int, align: int) -> list[int]:
    """Ranks for every candidate: at most `budget` numbers a token in all, multiples of `align`.

    A last step narrower than `align` completes a latent whose width is no multiple of it. Every
    layer keeps at least one step. Raises ValueError where the budget cannot pay for that.
    """
    priorities = method.priorities(candidates, budget)
    steps = [_steps(c, p, align) for c, p in zip(candidates, priorities, strict=True)]
    _protect(candidates, steps)
    ranks = _fill(steps, budget)
    if sum(ranks) > budget or any(
        sum(r for c, r in zip(candidates, ranks, strict=True) if c.layer == layer) == 0
        for layer in {c.layer for c in candidates}
    ):
        needed = sum(s[0][1] for s in steps)
        raise ValueError(
            f"the budget of {budget} numbers a token leaves some layer with nothing; raise keep, or"
            f" lower align from {align} (one step of every latent takes {needed})"
        )
    return _limit_classes(candidates, steps, ranks, budget, align)


def _steps(candidate: LatentCandidate, priority: Tensor, align: int) -> list[Step]:
    """The candidate's dimensions in blocks of `align`, best first."""
    if candidate.skip:
        return [(float("inf"), candidate.numbers)]
    blocks = priority.split(align)
    return [(float(block.mean()), len(block)) for block in blocks]


def _protect(candidates: Candidates, steps: Steps) -> None:
    """A layer that stores nothing would have no rows to count: its best first step comes first."""
    for layer in {c.layer for c in candidates}:
        best = max(
            (i for i, c in enumerate(candidates) if c.layer == layer), key=lambda i: steps[i][0][0]
        )
        steps[best][0] = (float("inf"), steps[best][0][1])


def _fill(steps: Steps, budget: int) -> list[int]:
    """Take steps by priority (within a candidate in order) while the budget lasts."""
    ordered = sorted(
        (
            (-priority, position, index, cost)
            for index, own in enumerate(steps)
            for position, (priority, cost) in enumerate(own)
        ),
    )
    ranks, taken = [0] * len(steps), [0] * len(steps)
    for _, position, index, cost in ordered:
        if taken[index] == position and cost <= budget:
            ranks[index] += cost
            taken[index] += 1
            budget -= cost
    return ranks


def _limit_classes(
    candidates: Candidates, steps: Steps, ranks: list[int], budget: int, align: int
) -> list[int]:
    """At most MAX_CLASSES width classes a layer, at the least predicted cost, budget kept."""
    layers = {
        layer: [i for i, c in enumerate(candidates) if c.layer == layer]
        for layer in sorted({c.layer for c in candidates})
    }
    if all(_classes(candidates, own, ranks) <= MAX_CLASSES for own in layers.values()):
        return ranks
    for members in layers.values():
        while _classes(candidates, members, ranks) > _BULK_CLASSES:
            _merge(candidates, steps, members, ranks)
    left = _spend(candidates, steps, layers, ranks, budget - sum(ranks))
    for members in layers.values():
        if left < align:
            break
        while _classes(candidates, members, ranks) > _BULK_CLASSES:
            _merge(candidates, steps, members, ranks)
        left = _top_up(candidates, steps, members, ranks, budget - sum(ranks))
    return ranks


def _by_head(candidates: Candidates, members: list[int]) -> dict[int, list[int]]:
    heads: dict[int, list[int]] = {}
    for i in members:
        for head in candidates[i].heads:
            heads.setdefault(head, []).append(i)
    return heads


def _classes(candidates: Candidates, members: list[int], ranks: list[int]) -> int:
    heads = _by_head(candidates, members)
    return len({tuple(ranks[i] for i in own) for own in heads.values()})


def _merge(candidates: Candidates, steps: Steps, members: list[int], ranks: list[int]) -> None:
    """Lower two classes to their common floor where that drops the least priority."""
    heads = _by_head(candidates, members)
    classes = sorted({tuple(ranks[i] for i in own) for own in heads.values()})
    best: tuple[float, dict[int, int]] | None = None
    for a, first in enumerate(classes):
        for second in classes[a + 1 :]:
            floor = [min(x, y) for x, y in zip(first, second, strict=True)]
            change = {
                i: floor[side]
                for own in heads.values()
                if tuple(ranks[i] for i in own) in (first, second)
                for side, i in enumerate(own)
            }
            cost = sum(_dropped(steps[i], new, ranks[i]) for i, new in change.items())
            if best is None or cost < best[0]:
                best = (cost, change)
    assert best is not None
    for i, new in best[1].items():
        ranks[i] = new


def _dropped(steps: list[Step], low: int, high: int) -> float:
    """Priority times width of the steps between two ranks."""
    total, end = 0.0, 0
    for priority, cost in steps:
        end += cost
        if low < end <= high:
            total += min(priority, 1e30) * cost
    return total


def _spend(
    candidates: Candidates, steps: Steps, layers: dict[int, list[int]], ranks: list[int], left: int
) -> int:
    """Give freed numbers to the best steps that keep every layer within MAX_CLASSES; what is left
    when no single step does."""
    while True:
        options = sorted(
            ((step, i) for i in range(len(ranks)) if (step := _next(steps[i], ranks[i]))),
            key=lambda option: -option[0][0],
        )
        for (_, cost), i in options:
            if cost > left:
                continue
            ranks[i] += cost
            if _classes(candidates, layers[candidates[i].layer], ranks) <= MAX_CLASSES:
                left -= cost
                break
            ranks[i] -= cost
        else:
            return left


def _top_up(
    candidates: Candidates, steps: Steps, members: list[int], ranks: list[int], left: int
) -> int:
    """Spend `left` in one layer of at most _BULK_CLASSES: raise one class's heads one by one, so
    that a single transitional class exists at any time. Stops short of one step, or at the top."""
    while True:
        heads = _by_head(candidates, members)
        moves: dict[tuple[tuple[int, ...], int], set[int]] = {}
        for own in heads.values():
            for side, i in enumerate(own):
                if _next(steps[i], ranks[i]):
                    moves.setdefault((tuple(ranks[j] for j in own), side), set()).add(i)
        if not moves:
            return left
        best = max(moves.values(), key=lambda own: max(_priority(steps[i], ranks[i]) for i in own))
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
    end = 0
    for step in steps:
        if end == rank:
            return step
        end += step[1]
    return None
