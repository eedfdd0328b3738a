"""Spend one budget of bits on dimensions and on their precision: reverse water-filling.

Dropping a dimension of singular value s costs s^2 / 2 nats; b bits leave the share D(b) of that. At
the optimum every dimension gets more bits as long as they save more than a common price per bit, so
bits fall with s, and a latent splits into runs of equal bits: its tiers. Shapes: w directions.
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from kvfold.spec import Tiers

# Squared error that `formats.integers.quantize` leaves of a unit Gaussian, 128 numbers to a scale,
# which rotated numbers resemble; 0 bits: the dimension is dropped.
DISTORTION = {0: 1.0, 1: 0.361, 2: 0.117, 3: 0.0359, 4: 0.0102, 6: 0.00073, 8: 0.000042}
SCALE_BITS = 8  # one fp8 scale a token and tier


def plan_tiers(spectra: Sequence[Tensor], budget: int, align: int) -> list[Tiers]:
    """Tiers of every latent, together at most `budget` bits a token, scales included.

    spectra: singular values [w] of each latent, descending. Tier widths are multiples of `align`,
    but for the last dimensions of a latent. The price is found by bisection; what rounding leaves
    is not spent.
    """
    most = max((float(s[0] ** 2) for s in spectra if len(s)), default=0.0)
    low, high = most * 1e-12, most  # at `high` nothing is worth a bit
    best: list[Tiers] = [() for _ in spectra]
    for _ in range(60 if most else 0):
        price = (low * high) ** 0.5
        found = [_tiers(s, price, align) for s in spectra]
        if sum(map(cost, found)) <= budget:
            best, high = found, price
        else:
            low = price
    return best


def cost(tiers: Tiers) -> int:
    """Bits a token."""
    return sum(width * bits + SCALE_BITS for width, bits in tiers)


def _tiers(spectrum: Tensor, price: float, align: int) -> Tiers:
    """Bits of every dimension at `price` nats a bit, in runs rounded to `align`."""
    levels, loss = sorted(DISTORTION), spectrum.square() / 2
    ends = []  # how many dimensions have at least so many bits
    for fewer, more in pairwise(levels):
        saved = (DISTORTION[fewer] - DISTORTION[more]) / (more - fewer)
        count = int((loss * saved > price).sum())
        ends.append(min(-(-count // align) * align, len(spectrum)) if count else 0)
    starts = [*ends[1:], 0]
    runs = [(end - start, bits) for end, start, bits in zip(ends, starts, levels[1:], strict=True)]
    return _merged([(width, bits) for width, bits in reversed(runs) if width > 0])


def _merged(runs: list[tuple[int, int]]) -> Tiers:
    """A run joins the one before, of more bits, where that costs no more than its own scale."""
    merged: list[tuple[int, int]] = []
    for width, bits in runs:
        if merged and width * (merged[-1][1] - bits) <= SCALE_BITS:
            merged[-1] = (merged[-1][0] + width, merged[-1][1])
        else:
            merged.append((width, bits))
    return tuple(merged)
