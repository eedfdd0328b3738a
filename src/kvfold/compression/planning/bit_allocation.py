"""Spends one budget of bits on dimensions and on their precision (reverse water-filling).

Dropping a dimension with singular value s costs s^2 / 2 nats; quantising it to b bits costs
DISTORTION[b] of that. In the optimum all latents pay the same price per bit: a bit is spent where
it saves more nats than that. Smaller singular values get fewer bits, so a latent falls into a few
segments of equal bits, its tiers: 128 numbers may be 16 at 8 bits, 64 at 4 and 48 dropped. Latents
of a set get the same tiers. Shapes: N sets of latents of one width w and one rule; E positions in a
latent where a tier may begin or end.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvfold.layout import Tiers
from kvfold.layout.formats.integers import PLANES

# Squared error of `formats.integers.quantize` on a unit Gaussian, 128 numbers to a scale. Rotated
# numbers are close to Gaussian.
DISTORTION = {1: 0.361, 2: 0.117, 3: 0.0359, 4: 0.0102, 6: 0.00073, 8: 0.000042}
SCALE_BITS = 8  # one fp8 scale a token and tier
WIDE = 256  # latents of at least so many numbers are read 16 bytes at a time, others 4
MAX_REFINE_STEPS, PRICE_DECAY = 16, 0.8  # price cuts, by this factor each, to spend what is left
LOWEST_PRICE = 1e-20  # of a bit, over the largest s^2: smaller ones are lost in fp64 rounding
WORD = 16  # bits: every tier is a multiple of them
LOAD = 16  # numbers of one vector load: 16 bytes at 8 bits, fewer bytes at fewer bits


@dataclass(frozen=True, kw_only=True)
class TierRule:
    """The tiers that a latent of `width` numbers may have.

    units: (bits, numbers) from the most bits to the fewest; a tier of these bits is a multiple of
    so many numbers. max_rank: most numbers of all tiers together. partial_last: the last tier may
    end where the latent does, in multiples of WORD. require_tier: there must be a tier. odd_units:
    each tier has an odd number of units. max_loads: most vector loads (see LOAD) of all tiers
    together (0: no limit).
    """

    width: int
    units: tuple[tuple[int, int], ...]
    max_rank: int
    partial_last: bool = False
    require_tier: bool = False
    odd_units: bool = False
    max_loads: int = 0

    @property
    def boundaries(self) -> list[int]:
        """Positions where tiers may begin or end."""
        top, step = min(self.width, self.max_rank), min(numbers for _, numbers in self.units)
        return sorted({*range(0, top + 1, step), *([self.width] if self.partial_last else [])})

    @property
    def min_bits(self) -> int:
        """Bits of the smallest tier, per token."""
        sizes = (min(self.width, numbers) * bits for bits, numbers in self.units)
        return min(sizes) + SCALE_BITS


def any_tiers(width: int, levels: Sequence[int]) -> TierRule:
    """Tiers of any of `levels`, in whole units; the last one may be shorter."""
    units = tuple((bits, unit(width, bits)) for bits in sorted({*levels}, reverse=True))
    return TierRule(width=width, units=units, max_rank=width, partial_last=True)


def plan_tiers(
    spectra: Sequence[Tensor],
    budget: int,
    rules: Sequence[TierRule],
    sets: Sequence[Hashable] | None = None,
) -> list[Tiers]:
    """Tiers of every latent, with the least predicted loss in `budget` bits per token, scales
    included.

    spectra: singular values [w] of each latent, descending. rules: the tiers that each may have.
    sets: for every latent a name; latents of one name get the same tiers, and have one width and
    one rule (None: every latent by itself). The price of a bit is found by bisection; then it is
    lowered in steps, and single sets spend what is left of the budget.
    """
    return priced_tiers(spectra, budget, rules, sets)[0]


def priced_tiers(
    spectra: Sequence[Tensor],
    budget: int,
    rules: Sequence[TierRule],
    sets: Sequence[Hashable] | None = None,
) -> tuple[list[Tiers], float]:
    """As `plan_tiers`; also returns the price of a bit in nats."""
    names = range(len(spectra)) if sets is None else sets
    members: dict[Hashable, list[Tensor]] = {}
    for name, s in zip(names, spectra, strict=True):
        members.setdefault(name, []).append(s.double())
    rule_of = dict(zip(names, rules, strict=True))
    set_rules = [rule_of[name] for name in members]
    planned, price = _plan_sets([*members.values()], set_rules, budget)
    tiers_of = dict(zip(members, planned, strict=True))
    return [tiers_of[name] for name in names], price


def _plan_sets(
    sets: Sequence[Sequence[Tensor]], rules: Sequence[TierRule], budget: int
) -> tuple[list[Tiers], float]:
    """Tiers of every set, and the price of a bit in nats. sets: the singular values, in fp64, of
    each set's members."""
    sizes = [len(members) for members in sets]
    distinct = dict.fromkeys(rule for rule in rules if rule.width)
    options = [
        options_of(sets, [i for i, x in enumerate(rules) if x == rule], rule) for rule in distinct
    ]

    def plan(price: float) -> list[Tiers]:
        planned: list[Tiers] = [()] * len(sets)
        for option in options:
            for index, tiers in zip(option.sets, option.choose(price), strict=True):
                planned[index] = tiers
        return planned

    def spent(planned: Sequence[Tiers]) -> int:
        return sum(size * cost(tiers) for size, tiers in zip(sizes, planned, strict=True))

    largest = max((float(s[0] ** 2) for members in sets for s in members if len(s)), default=0.0)
    low, high = largest * LOWEST_PRICE, largest  # at `high` nothing is worth a bit
    best: list[Tiers] = [() for _ in sets]
    for _ in range(48 if largest else 0):
        price = (low * high) ** 0.5
        candidate = plan(price)
        if spent(candidate) <= budget:
            best, high = candidate, price
        else:
            low = price
    left = budget - spent(best)
    for step in range(MAX_REFINE_STEPS if left and largest else 0):
        for index, tiers in enumerate(plan(high * PRICE_DECAY**step)):
            more = sizes[index] * (cost(tiers) - cost(best[index]))
            if more <= left:
                best[index], left = tiers, left - more
    return best, high


def unit(width: int, bits: int) -> int:
    """Fewest numbers of a tier: in each of their bit planes, their codes fill one read of a kernel,
    16 bytes for latents of WIDE numbers or more, else 4."""
    return 8 * (16 if width >= WIDE else 4) // min(PLANES[bits])


def even_tiers(width: int, levels: Sequence[int]) -> Tiers:
    """At most `width` numbers in one tier of every level, about equally wide."""
    share = width // len(levels)
    tiers = [(share - share % unit(width, bits), bits) for bits in sorted(levels, reverse=True)]
    return tuple((numbers, bits) for numbers, bits in tiers if numbers)


def cost(tiers: Tiers) -> int:
    """Bits per token, scales included."""
    return sum(width * bits + SCALE_BITS for width, bits in tiers)


def predicted_loss(spectrum: Tensor, tiers: Tiers) -> float:
    """Predicted increase in cross-entropy (nats/token) of a latent with these singular values [w].

    A tier's rotation spreads its quantisation error evenly over its numbers. Dropped numbers cost
    s^2 / 2 each.
    """
    lost, start = 0.0, 0
    for width, bits in tiers:
        total = float(spectrum[start : start + width].double().sum())
        lost, start = lost + DISTORTION[bits] * total**2 / width / 2, start + width
    return lost + float(spectrum[start:].double().square().sum()) / 2


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """The tiers that sets of latents of one width and rule may have, with their costs.

    sets: indices of the sets. boundaries: the positions [E] where a tier may begin or end. By
    level, from the most bits to the fewest: lost [N, E, E], nats lost in a tier from one position
    to another (infinite: not allowed); bits [N, E, E], its bits per token; loads int64 [E, E], its
    vector loads. max_loads: of all tiers together. dropped [N, E]: nats lost after a position.
    """

    sets: list[int]
    boundaries: Tensor
    levels: list[int]
    lost: list[Tensor]
    bits: list[Tensor]
    loads: list[Tensor]
    max_loads: int
    dropped: Tensor

    @cached_property
    def other_loads(self) -> list[dict[int, Tensor]]:
        """By level, and by the vector loads that its tiers may have: whether a tier has another
        number of loads, bool [E, E]."""
        legal = set(range(self.max_loads + 1))
        return [
            {load: loads != load for load in set(loads.flatten().tolist()) & legal}
            for loads in self.loads
        ]

    def choose(self, price: float) -> list[Tiers]:
        """Each set's tiers of least cost, where a bit costs `price` nats.

        Dynamic programming over levels: the least cost of reaching each position with each number
        of loads, in tiers of the levels so far.
        """
        costs, steps = self._costs(price)
        origins = [origin.tolist() for origin in steps]
        last = costs.argmin(1).tolist()
        return [self._trace([x[i] for x in origins], end) for i, end in enumerate(last)]

    def least_costs(self, price: float) -> Tensor:
        """Each set's least cost fp64 [N], where a bit costs `price` nats."""
        return self._costs(price)[0].amin(1)

    def combined(self, members: Sequence[Sequence[int]]) -> "TierOptions":
        """The options of unions of these sets. members: of each union, by index."""

        def total(x: Tensor) -> Tensor:
            return torch.stack([x[[*union]].sum(0) for union in members])

        return replace(
            self,
            sets=[*range(len(members))],
            lost=[*map(total, self.lost)],
            bits=[*map(total, self.bits)],
            dropped=total(self.dropped),
        )

    def _costs(self, price: float) -> tuple[Tensor, list[Tensor]]:
        """The least cost of every end state (loads, position), flattened to [N, loads * E], and
        each level's back-pointers."""
        best = torch.full_like(self.dropped, torch.inf)[:, None].repeat(1, self.max_loads + 1, 1)
        best[:, 0, 0] = 0
        origins = []
        for lost, bits, other in zip(self.lost, self.bits, self.other_loads, strict=True):
            best, origin = _extended(best, lost + price * bits, other)
            origins.append(origin)
        return (best + self.dropped[:, None]).flatten(1), origins

    def _trace(self, origins: list[list[list[int]]], last: int) -> Tiers:
        """The tiers on the way to state `last` (loads, position), by each level's back-pointers."""
        tiers: list[tuple[int, int]] = []
        load, end = divmod(last, len(self.boundaries))
        levels = zip(origins, self.levels, self.loads, strict=True)
        for origin, bits, loads in reversed([*levels]):
            if (start := origin[load][end]) >= 0:
                tiers.append((int(self.boundaries[end] - self.boundaries[start]), bits))
                load, end = load - int(loads[start, end]), start
        return tuple(reversed(tiers))


def _extended(
    best: Tensor, cost: Tensor, other_loads: Mapping[int, Tensor]
) -> tuple[Tensor, Tensor]:
    """One step of dynamic programming: add a tier of one level where that lowers the cost.

    best [N, loads, E]: the least cost of each state. cost [N, E, E]: of a tier from one position to
    another. other_loads: by the loads to try, whether a tier has others, bool [E, E]. Returns the
    new costs, and the positions where the added tiers begin (-1: none was added).
    """
    extended, origin = best.clone(), torch.full_like(best, -1, dtype=torch.int64)
    for load, other in other_loads.items():
        tier_cost = cost.masked_fill(other, torch.inf)[:, None]
        least, start = (best[:, : best.shape[1] - load, :, None] + tier_cost).min(2)
        better = least < extended[:, load:]
        extended[:, load:] = torch.where(better, least, extended[:, load:])
        origin[:, load:] = torch.where(better, start, origin[:, load:])
    return extended, origin


def options_of(sets: Sequence[Sequence[Tensor]], indices: list[int], rule: TierRule) -> TierOptions:
    """The options of the sets of these indices, which have one rule."""
    s = torch.stack([member for i in indices for member in sets[i]])
    sizes = torch.tensor([len(sets[i]) for i in indices])
    ends = torch.tensor(rule.boundaries)
    total, squares = ((s**power).cumsum(1) for power in (1, 2))
    total, squares = (torch.cat((torch.zeros_like(x[:, :1]), x), 1) for x in (total, squares))
    total, dropped = total[:, ends], (squares[:, -1:] - squares[:, ends]) / 2
    numbers = ends[None, :] - ends[:, None]
    # A tier's rotation spreads its error evenly over its numbers.
    spread = (total[:, None, :] - total[:, :, None]).square() / (2 * numbers.clamp(min=1))
    spread, dropped = (
        torch.stack([members.sum(0) for members in x.split(sizes.tolist())])
        for x in (spread, dropped)
    )
    if rule.require_tier:
        dropped[:, 0] = torch.inf
    return TierOptions(
        sets=indices,
        boundaries=ends,
        levels=[bits for bits, _ in rule.units],
        lost=[
            (DISTORTION[bits] * spread).masked_fill(~_allowed(ends, rule, bits, step), torch.inf)
            for bits, step in rule.units
        ],
        bits=[
            sizes[:, None, None] * (numbers * bits + SCALE_BITS).double() for bits, _ in rule.units
        ],
        loads=[_loads(numbers, bits) * (rule.max_loads > 0) for bits, _ in rule.units],
        max_loads=rule.max_loads,
        dropped=dropped,
    )


def _loads(numbers: Tensor, bits: int) -> Tensor:
    """Vector loads of tiers of so many numbers (see LOAD)."""
    return -(-numbers.clamp(min=0) * bits // (8 * LOAD)) * (8 // bits)


def _allowed(ends: Tensor, rule: TierRule, bits: int, step: int) -> Tensor:
    """Whether a tier of these bits, in units of `step` numbers, may go from one position to another
    [E, E]."""
    numbers = ends[None, :] - ends[:, None]
    words = numbers * min(PLANES[bits]) % WORD == 0
    partial = (ends == rule.width) & words & (rule.width % step != 0) & rule.partial_last
    in_units = numbers % (2 * step) == step if rule.odd_units else numbers % step == 0
    return (numbers > 0) & (in_units | partial)
