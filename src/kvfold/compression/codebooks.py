"""Calibrates codebooks: quantisation levels that are not evenly spaced (KVQuant §3.1-3.4).

Keys are quantised in fixed ranges of their channels, values in the range of each token's vector.
The levels of both come from k-means, weighted by the Fisher information. Shapes: N sampled tokens,
n numbers that a latent stands for, r numbers that it stores, L levels.
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
from kvfold.layout.formats.kvquant import split_outliers
from kvfold.models.fold import LatentMaps

INSIDE = 0.99  # share of a channel's numbers that its range holds
ROUNDS = 50  # of k-means
BITS = format_of("kvquant").widths


class Samples(NamedTuple):
    """Numbers that a latent stands for, of some tokens, and their gradients, fp64 [N, n]."""

    numbers: Tensor
    gradients: Tensor

    def stored(self, maps: LatentMaps) -> "Samples":
        """The stored numbers of these samples, and their gradients [N, r]."""
        return Samples((self.numbers - maps.mean) @ maps.down, self.gradients @ maps.up)


def with_codebooks(
    spec: CacheSpec, maps: Sequence[list[LatentMaps]], statistics: Statistics
) -> list[tuple[LayerSpec, list[LatentMaps]]]:
    """Every layer with `calibrated` codebooks, and its maps. Layers without maps stay as they
    are."""
    return [
        calibrated(layer, layer_maps, statistics[index, "samples"], spec.geometry)
        if layer_maps
        else (layer, layer_maps)
        for index, (layer, layer_maps) in enumerate(zip(spec.layers, maps, strict=True))
    ]


def calibrated(
    layer: LayerSpec, maps: Sequence[LatentMaps], sampled: Moment, geometry: Geometry
) -> tuple[LayerSpec, list[LatentMaps]]:
    """A layer with codebooks in its latents, and its maps; maps of keys scale them to their ranges.

    sampled: the statistic `samples` of the layer.
    """
    pairs = zip(layer.latents, maps, strict=True)
    ready = [_calibrated(layer, latent, x, sampled, geometry) for latent, x in pairs]
    books = {side: codebooks(side, [x for y, _, x in ready if y.side == side]) for side in SIDES}
    latents = tuple(replace(x, codebooks=books[x.side]) for x in layer.latents)
    return replace(layer, latents=latents), [scaled_maps for _, scaled_maps, _ in ready]


def _calibrated(
    layer: LayerSpec, latent: Latent, maps: LatentMaps, sampled: Moment, geometry: Geometry
) -> tuple[Latent, LatentMaps, Samples]:
    """A latent, its maps, and samples of the numbers that they store."""
    d, rotated = geometry.head_dim, layer.keys == "post_rope"
    where = slice(latent.heads[0] * d, (latent.heads[-1] + 1) * d)
    of = 1 if latent.side == "v" else 2 if rotated else 0
    parts = sampled.second.to(maps.down).chunk(6, -1)
    samples = Samples(parts[of][:, where], parts[3 + of][:, where])
    if latent.side == "k":
        # Decode adds no mean to rotated keys, since softmax cancels it. Capped scores do not.
        maps = in_range(maps, samples, around_zero=rotated and geometry.softcap is not None)
    return latent, maps, samples.stored(maps)


def in_range(maps: LatentMaps, samples: Samples, around_zero: bool = False) -> LatentMaps:
    """The maps scaled so that a share INSIDE of each stored number's values is in -1 .. 1, with as
    many outliers on either side. around_zero: keep the mean; then fewer are outliers."""
    low, high = _quantiles(samples.stored(maps).numbers)
    if around_zero:
        high = torch.maximum(high, -low)
        low = -high
    half, middle = (high - low) / 2, (high + low) / 2
    half = torch.where(half > 0, half, 1.0)
    return LatentMaps(maps.down / half, maps.up * half, maps.mean + maps.up @ middle)


def codebooks(side: Side, stored: Sequence[Samples]) -> Codebooks:
    """Levels for the latents of one side of a layer, for each of BITS, without outliers.

    Samples of keys are in range already; each token's values are scaled to their own range here.
    """
    pairs = [_inliers(side, x) for x in stored if x.numbers.shape[1]]
    if not pairs:
        return ()
    numbers, weights = (torch.cat([pair[i].flatten() for pair in pairs]) for i in (0, 1))
    order = numbers.argsort()
    numbers, weights = numbers[order], weights[order]
    return tuple(tuple(k_means(numbers, weights, 2**bits).tolist()) for bits in BITS)


def _inliers(side: Side, stored: Samples) -> tuple[Tensor, Tensor]:
    """Numbers in -1 .. 1, and their squared gradients; outliers have 0."""
    ranged = side == "v"
    where, half, middle = split_outliers(stored.numbers.float(), ranged)
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
    """Ascending levels [L] with a locally least weighted squared error.

    It starts from quantiles of the cube roots of the weights, as the best levels are dense by that
    measure (Panter and Dite 1951). numbers, ascending, and weights: fp64 [M].
    """
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
