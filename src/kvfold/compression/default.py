"""The recipe where none is named: the best of ours that kernels serve, before calibration."""

from collections.abc import Sequence
from typing import Any

import torch

from kvfold import recipes
from kvfold.compression.bases import builder_of
from kvfold.compression.bit_allocation import even_tiers
from kvfold.compression.target import Target
from kvfold.config import Recipe
from kvfold.models.families import family_of
from kvfold.models.kernels import kernels_of
from kvfold.spec import CacheSpec, Geometry, Latent, LayerSpec, value_kind

PREFERENCE = ("small", "lean", "fast")  # by what they lose at one size: docs/quality.md
FOR_SPEED = "swift"  # of rows that one pass reads
HYBRID = "zdc"
SLOW = 512  # numbers of a latent: of more, keys take several times as long to rebuild as to read
SLACK = 2  # how much more than its even share of the budget a latent may get


def chosen(given: str | Recipe | None, config: Any, target: Target) -> tuple[Recipe, str | None]:
    """A recipe, and why it was chosen, where none is given; config: of the model.

    HYBRID where rows have two widths, FOR_SPEED where plans are for speed. Else the first of
    PREFERENCE that gives every layer kernels on a GPU and rebuilds keys of no latent wider than
    SLOW, though each latent keep SLACK times its even share of the budget, or its whole width where
    that is less or no share is asked for; the very first where none does. Raises ValueError for an
    unknown name or family.
    """
    if given is not None:
        return recipes.get(given) if isinstance(given, str) else given, None
    if target.hybrid is not None:
        return recipes.get(HYBRID), "hybrid ratios are of its sorted directions"
    if target.prefer == "speed":
        return recipes.get(FOR_SPEED), "one pass reads keys that nothing rebuilds and joint values"
    passed: list[str] = []
    for recipe in map(recipes.get, PREFERENCE):
        spec = widest_spec(recipe, config, target)
        if not slow(spec) and kernels_of(config, spec, torch.bfloat16).complete:
            others = f"; not {', '.join(passed)}" if passed else ""
            return recipe, f"the best of ours with fast kernels on a GPU at this size{others}"
        passed.append(recipe.name)
    why = "the best of ours; none has fast kernels on a GPU at this size"
    return recipes.get(PREFERENCE[0]), why


def slow(spec: CacheSpec) -> bool:
    """Whether keys of a layer are rebuilt from latents wider than SLOW."""
    keys = (x for layer in spec.layers if layer.keys == "pre_rope" for x in layer.key_latents)
    return any(latent.rank > SLOW for latent in keys)


def widest_spec(recipe: Recipe, config: Any, target: Target) -> CacheSpec:
    """What a recipe stores if every latent is as wide as it may well become; where bits are to be
    planned, in tiers of every level."""
    geometry = family_of(config).geometry(config)
    share = 1.0 if target.keep is None else min(1.0, SLACK * target.keep)
    return even_spec(recipe, geometry, share, target.levels)


def even_spec(
    recipe: Recipe, geometry: Geometry, share: float, levels: Sequence[int] | None = None
) -> CacheSpec:
    """What a recipe stores that keeps `share` of every latent's numbers, in all layers; with
    levels, in tiers of each of them that are about as wide."""
    basis, latents = builder_of(recipe), []
    for side, heads in basis.head_sets(geometry):
        rank, tiers = int(share * len(side) * len(heads) * geometry.head_dim), None
        if levels is not None:
            tiers = even_tiers(rank, levels)
            rank = sum(width for width, _ in tiers)
        latents.append(Latent(side=side, heads=heads, rank=rank, tiers=tiers))
    values = value_kind(geometry, [latent for latent in latents if "v" in latent.side])
    layer = LayerSpec(keys=basis.key_kind(geometry), values=values, latents=tuple(latents))
    return CacheSpec(geometry=geometry, layers=(layer,) * geometry.num_layers)
