"""compress: statistics -> bases -> ranks -> fold."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvfold.compression import allocate, build
from kvfold.compression.statistics import Statistics
from kvfold.compression.support import support
from kvfold.compression.tiers import plan_tiers
from kvfold.config import Recipe
from kvfold.models.adapter import Family
from kvfold.models.fold import LatentMaps, fold_model
from kvfold.spec import CacheSpec, Geometry, Latent, LayerSpec, Tiers, plain_layer, value_kind

log = logging.getLogger(__name__)


def build_prospects(
    model: Any,
    family: type[Family],
    recipe: Recipe,
    statistics: Statistics,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[build.Prospect]]:
    """Every layer's latents with their full-width bases. Serves any budget."""
    geometry = family.geometry(model.config)
    build.check(recipe, geometry, model.config.model_type)
    layers = []
    for index, attention in enumerate(family.attentions(model)):
        source = build.Source(
            layer=index,
            geometry=geometry,
            weights=family.projections(attention, geometry),
            statistics=statistics,
            support=support(family, attention, geometry) if recipe.keys == "kv" else None,
            gradients=recipe.gradients,
            reduce=recipe.reduce,
        )
        layers.append(build.prospects(recipe, source))
        if progress is not None:
            progress(index + 1, geometry.num_layers)
    return layers


def candidates(
    recipe: Recipe,
    layers: Sequence[Sequence[build.Prospect]],
    statistics: Statistics,
    conditions: Sequence[float],
) -> list[allocate.Candidate]:
    """What the allocator sees of every prospect; conditions: `log_conditions`, or zeros."""
    found = []
    for index, prospects in enumerate(layers):
        for prospect in prospects:
            found.append(
                allocate.Candidate(
                    layer=index,
                    side=prospect.side,
                    heads=prospect.heads,
                    singular=prospect.basis.singular.cpu(),
                    loss=prospect.basis.loss.cpu(),
                    fisher=_fisher(recipe, prospect, statistics),
                    condition=conditions[index],
                    skip=_stays_whole(recipe, index, conditions[index]),
                    numbers=len(prospect.basis.mean),
                )
            )
    return found


def _fisher(recipe: Recipe, prospect: build.Prospect, statistics: Statistics) -> float:
    """Mean over the latent's elements of W, or with equal ranks over all of the layer's matrix."""
    if recipe.ranks != "fisher":
        return 1.0
    heads = statistics[prospect.layer, "fisher"].raw()[:, 0 if prospect.side == "k" else 1]
    return float((heads if recipe.equal_ranks else heads[list(prospect.heads)]).mean())


def _stays_whole(recipe: Recipe, layer: int, condition: float) -> bool:
    """Whether a layer is skipped. LoRC §6.2 sets thresholds of 30 and 90 on a product over tens of
    layers and names no unit: log10 is the one that fits its Table 2 (docs/methods.md).
    """
    threshold = recipe.skip_threshold
    above = threshold is not None and condition / math.log(10) > threshold
    return above or layer in recipe.skip_layers


def log_conditions(model: Any, family: type[Family], geometry: Geometry) -> list[float]:
    """LoRC eq. 12: log of the product of condition numbers of W_K and W_V from a layer upwards."""
    total, logs = 0.0, []
    for attention in reversed(list(family.attentions(model))):
        weights = family.projections(attention, geometry)
        for weight in (weights.k, weights.v):
            s = torch.linalg.svdvals(weight)
            total += float((s[0] / s[-1].clamp(min=1e-12 * s[0])).log())
        logs.append(total)
    return logs[::-1]


def plan(
    recipe: Recipe,
    geometry: Geometry,
    layers: Sequence[Sequence[build.Prospect]],
    found: Sequence[allocate.Candidate],
    keep: float,
    align: int,
) -> CacheSpec:
    """Ranks within the budget `keep` of the uncompressed cache, as a spec."""
    budget = int(keep * geometry.full_numbers + 1e-6)
    all_ranks = allocate.allocate(found, recipe.ranks, budget, align)
    ranks = [(r, None) for r, c in zip(all_ranks, found, strict=True) if not c.skip]
    return _spec(recipe, geometry, layers, found, ranks)


def plan_bits(
    recipe: Recipe,
    geometry: Geometry,
    layers: Sequence[Sequence[build.Prospect]],
    found: Sequence[allocate.Candidate],
    bits: int,
    align: int,
) -> CacheSpec:
    """Ranks and tiers that spend `bits` a token, scales included, for the least predicted loss.

    Raises ValueError where skipped layers do not fit, or a layer would store nothing.
    """
    own = [c for c in found if not c.skip]
    whole = 16 * sum(c.numbers for c in found if c.skip)
    if whole > bits:
        raise ValueError(
            f"skipped layers, at 16 bits a number, take {whole} bits a token of the {bits} that"
            " this factor allows; ask for a smaller factor, or skip fewer layers"
        )
    planned = plan_tiers([c.singular for c in own], bits - whole, align)
    empty = {c.layer for c in own} - {
        c.layer for c, tiers in zip(own, planned, strict=True) if tiers
    }
    if empty:
        raise ValueError(
            f"{bits} bits a token leave layers {sorted(empty)} with nothing; ask for a smaller "
            f"factor, or a smaller align than {align}"
        )
    ranks = [(sum(width for width, _ in tiers), tiers) for tiers in planned]
    return _spec(recipe, geometry, layers, found, ranks)


def _spec(
    recipe: Recipe,
    geometry: Geometry,
    layers: Sequence[Sequence[build.Prospect]],
    found: Sequence[allocate.Candidate],
    planned: Sequence[tuple[int, Tiers | None]],
) -> CacheSpec:
    """Ranks and tiers of all latents that are not skipped, in order, as a spec."""
    ranks = iter(planned)
    kind = build.key_kind(recipe, geometry)
    specs = []
    for index, prospects in enumerate(layers):
        if all(c.skip for c in found if c.layer == index):
            specs.append(plain_layer(geometry))
            continue
        latents = tuple(
            Latent(side=p.side, heads=p.heads, rank=rank, tiers=tiers)
            for p, (rank, tiers) in zip(prospects, ranks, strict=False)
        )
        values = value_kind(geometry, [x for x in latents if "v" in x.side])
        specs.append(LayerSpec(keys=kind, values=values, latents=latents))
    return CacheSpec(geometry=geometry, layers=tuple(specs))


def default_align(geometry: Geometry) -> int:
    """16 for tensor-core tiles; 8 where heads are narrow."""
    return 16 if geometry.head_dim > 64 else 8


def fold(
    model: Any, family: type[Family], spec: CacheSpec, layers: Sequence[Sequence[build.Prospect]]
) -> None:
    """Fold `model` in place to `spec`."""
    maps: list[list[LatentMaps | None]] = [
        [None] * len(layer.latents)
        if layer.keys == "plain"
        else [
            LatentMaps(*p.basis.truncated(latent.rank), p.basis.mean)
            for latent, p in zip(layer.latents, prospects, strict=True)
        ]
        for layer, prospects in zip(spec.layers, layers, strict=True)
    ]
    fold_model(model, family, spec, maps)


def check_keep(keep: float) -> None:
    """Raises ValueError for a share that is none."""
    if not 0 < keep <= 1:
        raise ValueError(f"keep must be in (0, 1], the share of the cache to keep; got {keep}")


def check_weights(model: torch.nn.Module) -> None:
    """Raises ValueError naming the first parameter that holds NaN or infinity."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter.detach().float().sum()):
            raise ValueError(
                f"parameter {name} holds NaN or infinite numbers; the checkpoint is damaged or was "
                "saved from a diverged run: use another one"
            )
