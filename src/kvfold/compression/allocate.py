"""Ranks: how many dimensions each latent keeps. Pure functions of spectra.

Every method is a *priority* for each dimension of each latent, falling within a latent; one `fill`
spends the budget on the highest priorities, in steps of `align`, and keeps its rule: never more
than the target, and short of it by less than one step of one latent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.spec import Side

MAX_CLASSES = 4  # (key rank, value rank) pairs a layer: the kernels compile one body for each
FISHER_FLOOR = 32  # Palu's release: ranks in steps of 32, at least one
_BEFORE_ALL = 1e12  # priority of what a latent never goes without; still below a layer's only step
_BULK_CLASSES = 3  # the fourth class is left to spend the last steps of the budget


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One latent that can keep 0..width dimensions.

    singular, loss [width] descending: the basis's spectrum and predicted losses. fisher: root mean
    square gradient of the weights behind it. condition: log of the layer's cumulative condition
    number. skip: never compressed, all its `numbers` stay.
    """

    layer: int
    side: Side
    heads: tuple[int, ...]
    singular: Tensor
    loss: Tensor
    fisher: float = 1.0
    condition: float = 0.0
    skip: bool = False
    numbers: int = 0

    @property
    def width(self) -> int:
        return len(self.singular)


def uniform(candidates: Sequence[Candidate], budget: int) -> list[Tensor]:
    """The same share of every latent."""
    return [-torch.arange(c.width).double() / c.width for c in candidates]


def energy(candidates: Sequence[Candidate], budget: int) -> list[Tensor]:
    """ZACK eq. 6: one rate r for all heads; a dimension goes when the tail from it is <= r of the
    sum of singular values. Filling by that tail share is F_p, the bisection of r to a target."""
    return [
        c.singular.flip(0).cumsum(0).flip(0) / c.singular.sum().clamp(min=1e-300)
        for c in candidates
    ]


def fisher(candidates: Sequence[Candidate], budget: int) -> list[Tensor]:
    """Palu §3.3 and its release: ranks in proportion to Fisher information, from a floor to width.

    A latent's ideal rank is budget f / sum f (f per element, times its width where widths differ).
    What a full width leaves over goes to the others in equal parts, and what floors take is taken
    from them alike, so that the rank is clamp(ideal + c, floor, width) with one c for all: the
    priority of dimension j is ideal - j, and `allocate` finds c as it spends the budget. In steps
    that is the release's rounding to the nearest multiple, repaired to the budget.
    """
    free = [c for c in candidates if not c.skip]
    budget -= sum(c.numbers for c in candidates if c.skip)
    share = budget / max(1, sum(c.width for c in free))
    mean = sum(c.fisher * c.width for c in free) / max(1, sum(c.width for c in free))
    widest = max(c.width for c in candidates)
    found = []
    for c in candidates:
        ideal = share * c.width * (c.fisher / mean if mean > 0 else 1.0)
        priority = widest + ideal - torch.arange(c.width).double()
        priority[: _floor(c.width, share)] += _BEFORE_ALL
        found.append(priority)
    return found


def _floor(width: int, share: float) -> int:
    """Fewest dimensions of a latent: FISHER_FLOOR, or a quarter of a narrow one's, as far as the
    budget pays for that everywhere."""
    return int(min(FISHER_FLOOR, width / 4, width * share))


def condition(candidates: Sequence[Candidate], budget: int) -> list[Tensor]:
    """LoRC eq. 13: d_l = d_max (1 - u_l (1 - d_min / d_max)); d_min falls until the target is met.

    u_l in [0, 1] is how far the layer's log cumulative condition number (eq. 12) lies below the
    largest one, so dimension j of layer l goes when d_max - d_min exceeds (d_max - j) / u_l.
    """
    logs = torch.tensor([c.condition for c in candidates]).double()
    span = (logs.max() - logs.min()).clamp(min=1e-12)
    below = ((logs.max() - logs) / span).clamp(min=1e-12)
    return [
        (c.width - torch.arange(c.width).double()) / u
        for c, u in zip(candidates, below, strict=True)
    ]


def greedy(candidates: Sequence[Candidate], budget: int) -> list[Tensor]:
    """Ours: the largest predicted losses of all layers, heads, keys and values."""
    return [c.loss for c in candidates]


METHODS: dict[str, Callable[[Sequence[Candidate], int], list[Tensor]]] = {
    "uniform": uniform,
    "energy": energy,
    "fisher": fisher,
    "condition": condition,
    "greedy": greedy,
}


def allocate(candidates: Sequence[Candidate], method: str, budget: int, align: int) -> list[int]:
    """Ranks for every candidate: at most `budget` numbers a token in all, multiples of `align`.

    A last step narrower than `align` completes a latent whose width is no multiple of it. Every
    layer keeps at least one step. Raises ValueError where the budget cannot pay for that.
    """
    priorities = METHODS[method](candidates, budget)
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


Step = tuple[float, int]  # (priority, numbers it costs)


def _steps(candidate: Candidate, priority: Tensor, align: int) -> list[Step]:
    """The candidate's dimensions in blocks of `align`, best first."""
    if candidate.skip:
        return [(float("inf"), candidate.numbers)]
    blocks = priority.split(align)
    return [(float(block.mean()), len(block)) for block in blocks]


def _protect(candidates: Sequence[Candidate], steps: list[list[Step]]) -> None:
    """A layer that stores nothing would have no rows to count: its best first step comes first."""
    for layer in {c.layer for c in candidates}:
        best = max(
            (i for i, c in enumerate(candidates) if c.layer == layer), key=lambda i: steps[i][0][0]
        )
        steps[best][0] = (float("inf"), steps[best][0][1])


def _fill(steps: list[list[Step]], budget: int) -> list[int]:
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
    candidates: Sequence[Candidate],
    steps: list[list[Step]],
    ranks: list[int],
    budget: int,
    align: int,
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


def _by_head(candidates: Sequence[Candidate], members: list[int]) -> dict[int, list[int]]:
    heads: dict[int, list[int]] = {}
    for i in members:
        for head in candidates[i].heads:
            heads.setdefault(head, []).append(i)
    return heads


def _classes(candidates: Sequence[Candidate], members: list[int], ranks: list[int]) -> int:
    heads = _by_head(candidates, members)
    return len({tuple(ranks[i] for i in own) for own in heads.values()})


def _merge(
    candidates: Sequence[Candidate], steps: list[list[Step]], members: list[int], ranks: list[int]
) -> None:
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
    candidates: Sequence[Candidate],
    steps: list[list[Step]],
    layers: dict[int, list[int]],
    ranks: list[int],
    left: int,
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
    candidates: Sequence[Candidate],
    steps: list[list[Step]],
    members: list[int],
    ranks: list[int],
    left: int,
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
