"""Codebooks: levels for few bits that are not even, by what errors of the numbers cost.

KVQuant §3.1-3.4: keys are quantised in ranges of their channels that are known beforehand, values
in the range of each row; both at levels that k-means finds, weighted by the Fisher information.
Shapes: N sampled tokens, n numbers a latent stands for, r that it stores, L levels.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.calibration.statistics import Moment, Statistics
from kvfold.layout import (
    SIDES,
    CacheSpec,
    Geometry,
    Latent,
    LayerSpec,
    Side,
)
from kvfold.layout.formats import Codebooks, format_of
from kvfold.layout.formats.kvquant import split
from kvfold.models.fold import LatentMaps

INSIDE = 0.99  # share of a channel's numbers that its range holds
ROUNDS = 50  # of k-means
BITS = format_of("kvquant").widths


class Samples(NamedTuple):
    """Of some tokens, what a latent stands for, and the loss's gradient there, fp64 [N, n]."""

    numbers: Tensor
    gradients: Tensor

    def stored(self, maps: LatentMaps) -> "Samples":
        """The same of what is stored [N, r]."""
        return Samples((self.numbers - maps.mean) @ maps.down, self.gradients @ maps.up)


def with_codebooks(
    spec: CacheSpec, maps: Sequence[list[LatentMaps]], statistics: Statistics
) -> list[tuple[LayerSpec, list[LatentMaps]]]:
    """As `calibrated`, layer by layer; one without maps as it is."""
    return [
        calibrated(layer, own, statistics[index, "samples"], spec.geometry) if own else (layer, own)
        for index, (layer, own) in enumerate(zip(spec.layers, maps, strict=True))
    ]


def calibrated(
    layer: LayerSpec, maps: Sequence[LatentMaps], sampled: Moment, geometry: Geometry
) -> tuple[LayerSpec, list[LatentMaps]]:
    """A layer with codebooks in its latents, and their maps, those of keys with ranges in them.
    sampled: the statistic `samples` of the layer."""
    each = zip(layer.latents, maps, strict=True)
    found = [_calibrated(layer, latent, own, sampled, geometry) for latent, own in each]
    books = {side: codebooks(side, [x for y, _, x in found if y.side == side]) for side in SIDES}
    latents = tuple(replace(x, codebooks=books[x.side]) for x in layer.latents)
    return replace(layer, latents=latents), [own for _, own, _ in found]


def _calibrated(
    layer: LayerSpec, latent: Latent, maps: LatentMaps, sampled: Moment, geometry: Geometry
) -> tuple[Latent, LatentMaps, Samples]:
    """A latent, its maps, and samples of what is stored by them."""
    d, rotated = geometry.head_dim, layer.keys == "post_rope"
    where = slice(latent.heads[0] * d, (latent.heads[-1] + 1) * d)
    of = 1 if latent.side == "v" else 2 if rotated else 0
    parts = sampled.second.to(maps.down).chunk(6, -1)
    samples = Samples(parts[of][:, where], parts[3 + of][:, where])
    if latent.side == "k":
        # Of rotated keys no middle comes back, since softmax drops it, but not a cap of scores.
        maps = in_range(maps, samples, around_zero=rotated and geometry.softcap is not None)
    return latent, maps, samples.stored(maps)


def in_range(maps: LatentMaps, samples: Samples, around_zero: bool = False) -> LatentMaps:
    """The maps with INSIDE of every stored number in -1 .. 1, half of the others on either side;
    around_zero: without another mean, and so with fewer others."""
    low, high = _quantiles(samples.stored(maps).numbers)
    if around_zero:
        high = torch.maximum(high, -low)
        low = -high
    half, middle = (high - low) / 2, (high + low) / 2
    half = torch.where(half > 0, half, 1.0)
    return LatentMaps(maps.down / half, maps.up * half, maps.mean + maps.up @ middle)


def codebooks(side: Side, stored: Sequence[Samples]) -> Codebooks:
    """Levels for the latents of one side of a layer, for each of BITS: of keys, which are in range,
    or values, each row of which is put into its own; less outliers."""
    pairs = [_inliers(side, x) for x in stored if x.numbers.shape[1]]
    if not pairs:
        return ()
    numbers, weights = (torch.cat([pair[i].flatten() for pair in pairs]) for i in (0, 1))
    order = numbers.argsort()
    numbers, weights = numbers[order], weights[order]
    return tuple(tuple(k_means(numbers, weights, 2**bits).tolist()) for bits in BITS)


def _inliers(side: Side, stored: Samples) -> tuple[Tensor, Tensor]:
    """Numbers in -1 .. 1 and the squared gradients there, 0 of outliers."""
    ranged = side == "v"
    where, half, middle = split(stored.numbers.float(), ranged)
    scale = half.double()[:, None]
    inside = (stored.numbers - middle.double()[:, None]) / scale.clamp(min=1e-30)
    weights = (stored.gradients * scale).square().scatter(1, where, 0.0)
    return inside.clamp(-1, 1), weights.where(inside.abs() <= 1, 0.0)


def _quantiles(x: Tensor) -> tuple[Tensor, Tensor]:
    """The two quantiles [r] between which INSIDE of x [N, r] lies."""
    ordered = x.sort(0).values
    out = int(len(x) * (1 - INSIDE) / 2)
    return ordered[out], ordered[len(x) - 1 - out]


def k_means(numbers: Tensor, weights: Tensor, count: int) -> Tensor:
    """Ascending levels [L] of least weighted squared error near those it starts from: as many
    quantiles of the weights' cube roots, which are dense where that error is made (Panter and Dite
    1951). numbers ascending, and weights, fp64 [M]."""
    mass = weights.pow(1 / 3).cumsum(0)
    ends = (torch.arange(count, device=mass.device) + 0.5) / count * mass[-1]
    levels = numbers[torch.searchsorted(mass, ends).clamp(max=len(numbers) - 1)]
    sums = torch.stack((weights, weights * numbers)).cumsum(1)
    sums = torch.nn.functional.pad(sums, (1, 0))
    for _ in range(ROUNDS):
        borders = torch.searchsorted(numbers, (levels[1:] + levels[:-1]) / 2)
        edges = torch.nn.functional.pad(borders, (1, 1))
        edges[-1] = len(numbers)
        mass, total = sums[:, edges].diff(dim=1)
        levels = torch.where(mass > 0, total / mass.clamp(min=1e-300), levels)
    return levels.sort().values
