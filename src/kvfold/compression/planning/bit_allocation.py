"""Spend one budget of bits on dimensions and on their precision: reverse water-filling.

Dropping a dimension of singular value s costs s^2 / 2 nats, and so few bits of a number leave a
share of that. At the optimum bits are spent as long as they save more than a common price per bit;
they fall with s, so a latent is a few runs of equal bits, its tiers. Latents of a set are planned
as one and get the same tiers. Shapes: N sets of latents of one width w and rule; E places where a
tier may begin or end.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.layout import Tiers
from kvfold.layout.formats.integers import PLANES

# Squared error that `formats.integers.quantize` leaves of a unit Gaussian, 128 numbers to a scale,
# which rotated numbers resemble.
DISTORTION = {1: 0.361, 2: 0.117, 3: 0.0359, 4: 0.0102, 6: 0.00073, 8: 0.000042}
SCALE_BITS = 8  # one fp8 scale a token and tier
WIDE = 256  # numbers of a latent whose rows are read 16 bytes at a time, others 4
FALLS, FALL = 16, 0.8  # how often, and to what share, the price falls to spend what is left
CHEAPEST = 1e-20  # price of a bit, of the largest s^2: below what doubles tell apart
WORD = 16  # bits: what a tier is a multiple of, whatever the latent's width
LOAD = 16  # numbers of a load, which takes 16 bytes of 8 bits, or a part of 16 bytes of fewer


@dataclass(frozen=True, kw_only=True)
class TierRule:
    """What tiers a latent of `width` numbers may have.

    units: (bits, numbers), from the most bits on: a tier of these bits is whole multiples of so
    many numbers. most: numbers of all tiers. loose: the last tier may end where the latent does, in
    whole words. needed: there is at least one tier. odd: of an odd number of units each. loads: the
    most LOADs of 16 bytes that tiers take, each in whole ones (0: any number).
    """

    width: int
    units: tuple[tuple[int, int], ...]
    most: int
    loose: bool = False
    needed: bool = False
    odd: bool = False
    loads: int = 0

    @property
    def ends(self) -> list[int]:
        """Where tiers may begin or end."""
        top, step = min(self.width, self.most), min(numbers for _, numbers in self.units)
        return sorted({*range(0, top + 1, step), *([self.width] if self.loose else [])})

    @property
    def least(self) -> int:
        """Bits a token of the smallest tier."""
        sizes = (min(self.width, numbers) * bits for bits, numbers in self.units)
        return min(sizes) + SCALE_BITS


def any_tiers(width: int, levels: Sequence[int]) -> TierRule:
    """Tiers of any of `levels`, in whole units, but for the last one where the width is not."""
    units = tuple((bits, unit(width, bits)) for bits in sorted({*levels}, reverse=True))
    return TierRule(width=width, units=units, most=width, loose=True)


def plan_tiers(
    spectra: Sequence[Tensor],
    budget: int,
    rules: Sequence[TierRule],
    sets: Sequence[Hashable] | None = None,
) -> list[Tiers]:
    """Tiers of every latent, together at most `budget` bits a token, scales included.

    spectra: singular values [w] of each latent, descending; rules: what tiers each may have. sets:
    of every latent, the name of those that are to have the same tiers (None: each has its own); of
    one width and rule each. The price is found by bisection; as it falls further, single sets take
    what is left.
    """
    names = range(len(spectra)) if sets is None else sets
    members: dict[Hashable, list[Tensor]] = {}
    for name, s in zip(names, spectra, strict=True):
        members.setdefault(name, []).append(s.double())
    rule_of = dict(zip(names, rules, strict=True))
    own = [rule_of[name] for name in members]
    found = dict(zip(members, _plan_sets([*members.values()], own, budget), strict=True))
    return [found[name] for name in names]


def _plan_sets(
    sets: Sequence[Sequence[Tensor]], rules: Sequence[TierRule], budget: int
) -> list[Tiers]:
    """Tiers of every set, whose members' singular values these are."""
    sizes = [len(own) for own in sets]
    kinds = dict.fromkeys(rule for rule in rules if rule.width)
    menus = [_menu(sets, [i for i, x in enumerate(rules) if x == kind], kind) for kind in kinds]

    def plan(price: float) -> list[Tiers]:
        found: list[Tiers] = [()] * len(sets)
        for menu in menus:
            for index, tiers in zip(menu.sets, menu.choose(price), strict=True):
                found[index] = tiers
        return found

    def spent(planned: Sequence[Tiers]) -> int:
        return sum(size * cost(tiers) for size, tiers in zip(sizes, planned, strict=True))

    most = max((float(s[0] ** 2) for own in sets for s in own if len(s)), default=0.0)
    low, high = most * CHEAPEST, most  # at `high` nothing is worth a bit
    best: list[Tiers] = [() for _ in sets]
    for _ in range(48 if most else 0):
        price = (low * high) ** 0.5
        found = plan(price)
        if spent(found) <= budget:
            best, high = found, price
        else:
            low = price
    left = budget - spent(best)
    for fall in range(FALLS if left and most else 0):
        for index, tiers in enumerate(plan(high * FALL**fall)):
            more = sizes[index] * (cost(tiers) - cost(best[index]))
            if more <= left:
                best[index], left = tiers, left - more
    return best


def unit(width: int, bits: int) -> int:
    """Numbers of a latent of `width` whose codes fill what a kernel reads at once: 16 bytes where
    it is WIDE or wider, else 4, in each of their planes."""
    return 8 * (16 if width >= WIDE else 4) // min(PLANES[bits])


def even_tiers(width: int, levels: Sequence[int]) -> Tiers:
    """At most `width` numbers in tiers of every level, about as many in each."""
    share = width // len(levels)
    found = [(share - share % unit(width, bits), bits) for bits in sorted(levels, reverse=True)]
    return tuple((numbers, bits) for numbers, bits in found if numbers)


def cost(tiers: Tiers) -> int:
    """Bits a token."""
    return sum(width * bits + SCALE_BITS for width, bits in tiers)


def predicted_loss(spectrum: Tensor, tiers: Tiers) -> float:
    """Nats a token of a latent with these singular values [w]: a tier's rotation spreads its error
    evenly over its numbers, and what is dropped costs all that it holds."""
    lost, start = 0.0, 0
    for width, bits in tiers:
        total = float(spectrum[start : start + width].double().sum())
        lost, start = lost + DISTORTION[bits] * total**2 / width / 2, start + width
    return lost + float(spectrum[start:].double().square().sum()) / 2


@dataclass(frozen=True, kw_only=True)
class _Menu:
    """What sets of latents of one width may become. sets: their numbers; ends: the places E; by
    bits from the most on: nats lost [N, E, E] in a tier from one place to another, infinite where
    there may be none, its bits a token [N, E, E], and what it loads int64 [E, E], at most `most` of
    all tiers; dropped [N, E]: nats lost behind a place."""

    sets: list[int]
    ends: Tensor
    levels: list[int]
    lost: list[Tensor]
    bits: list[Tensor]
    loads: list[Tensor]
    most: int
    dropped: Tensor

    def choose(self, price: float) -> list[Tiers]:
        """Tiers of each set that cost least at `price` nats a bit, by dynamic programming: the
        best way to each place, having loaded so much, in tiers of so many bits or more."""
        best = torch.full_like(self.dropped, torch.inf)[:, None].repeat(1, self.most + 1, 1)
        best[:, 0, 0] = 0
        origins = []
        for lost, bits, loads in zip(self.lost, self.bits, self.loads, strict=True):
            best, origin = _extended(best, lost + price * bits, loads)
            origins.append(origin.tolist())
        last = (best + self.dropped[:, None]).flatten(1).argmin(1).tolist()
        return [self._trace([x[i] for x in origins], at) for i, at in enumerate(last)]

    def _trace(self, origins: list[list[list[int]]], last: int) -> Tiers:
        """The tiers that end at a place: of every level, where the one that ends there began."""
        tiers: list[tuple[int, int]] = []
        load, end = divmod(last, len(self.ends))
        levels = zip(origins, self.levels, self.loads, strict=True)
        for origin, bits, loads in reversed([*levels]):
            if (start := origin[load][end]) >= 0:
                tiers.append((int(self.ends[end] - self.ends[start]), bits))
                load, end = load - int(loads[start, end]), start
        return tuple(reversed(tiers))


def _extended(best: Tensor, cost: Tensor, loads: Tensor) -> tuple[Tensor, Tensor]:
    """What is best [N, loaded, E], with a tier [N, E, E] more where that is better, and the place
    where this began, else -1."""
    found, origin = best.clone(), torch.full_like(best, -1, dtype=torch.int64)
    for load in set(loads.flatten().tolist()) & set(range(best.shape[1])):
        own = cost.masked_fill(loads != load, torch.inf)[:, None]
        least, start = (best[:, : best.shape[1] - load, :, None] + own).min(2)
        better = least < found[:, load:]
        found[:, load:] = torch.where(better, least, found[:, load:])
        origin[:, load:] = torch.where(better, start, origin[:, load:])
    return found, origin


def _menu(sets: Sequence[Sequence[Tensor]], own: list[int], rule: TierRule) -> _Menu:
    """Of the sets whose numbers are `own`."""
    s = torch.stack([member for i in own for member in sets[i]])
    sizes = torch.tensor([len(sets[i]) for i in own])
    ends = torch.tensor(rule.ends)
    total, squares = ((s**power).cumsum(1) for power in (1, 2))
    total, squares = (torch.cat((torch.zeros_like(x[:, :1]), x), 1) for x in (total, squares))
    total, dropped = total[:, ends], (squares[:, -1:] - squares[:, ends]) / 2
    numbers = ends[None, :] - ends[:, None]
    # A tier's rotation spreads its error evenly over its numbers.
    spread = (total[:, None, :] - total[:, :, None]).square() / (2 * numbers.clamp(min=1))
    spread, dropped = (
        torch.stack([each.sum(0) for each in x.split(sizes.tolist())]) for x in (spread, dropped)
    )
    if rule.needed:
        dropped[:, 0] = torch.inf
    return _Menu(
        sets=own,
        ends=ends,
        levels=[bits for bits, _ in rule.units],
        lost=[
            (DISTORTION[bits] * spread).masked_fill(~_allowed(ends, rule, bits, step), torch.inf)
            for bits, step in rule.units
        ],
        bits=[
            sizes[:, None, None] * (numbers * bits + SCALE_BITS).double() for bits, _ in rule.units
        ],
        loads=[_loads(numbers, bits) * (rule.loads > 0) for bits, _ in rule.units],
        most=rule.loads,
        dropped=dropped,
    )


def _loads(numbers: Tensor, bits: int) -> Tensor:
    """What tiers of so many numbers load."""
    return -(-numbers.clamp(min=0) * bits // (8 * LOAD)) * (8 // bits)


def _allowed(ends: Tensor, rule: TierRule, bits: int, step: int) -> Tensor:
    """Whether a tier of these bits, in whole `step` numbers, may go from one place to another
    [E, E]."""
    numbers = ends[None, :] - ends[:, None]
    words = numbers * min(PLANES[bits]) % WORD == 0
    forced = (ends == rule.width) & words & (rule.width % step != 0) & rule.loose
    whole = numbers % (2 * step) == step if rule.odd else numbers % step == 0
    return (numbers > 0) & (whole | forced)
