"""Chooses the recipe and the size that the user left open, before calibration, by the model's
config."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvfold import recipes
from kvfold.compression.bases import builder_of
from kvfold.compression.planning.bit_allocation import even_tiers
from kvfold.compression.planning.preference import one_pass_tiers
from kvfold.compression.planning.step_time import load_of, predict
from kvfold.compression.planning.target import Target
from kvfold.config import DEFAULT_KEEP, LEVELS, Prefer, Recipe
from kvfold.layout import (
    CacheSpec,
    Geometry,
    Latent,
    LayerSpec,
    Side,
    Tiers,
    value_kind,
)
from kvfold.layout.pages import plain_spec
from kvfold.models.adapter import Family
from kvfold.models.families import family_of
from kvfold.models.kernels import fastest_layout, one_pass_summary

SERVED = "swift"  # its decode step reconstructs no keys
REBUILT = ("small", "lean")  # lose less than SERVED where no bits are planned; best first
HYBRID = "zdc"
FACTOR = 4.0  # default factor of recipes that plan bits
SizeOfLatent = Callable[[Side, int], tuple[int, Tiers | None]]  # (side, width) -> (rank, tiers)


def choose_recipe(
    named: str | Recipe | None, config: Any, target: Target
) -> tuple[Recipe, Target, str | None]:
    """The recipe and size to fold a model by, and the reason for the recipe (None: it was named).

    config: the model's. With planned bits the recipe is SERVED, planned for speed if a Hopper GPU
    reads such entries in one pass and the user prefers nothing else. With fewer dimensions alone it
    is the first of REBUILT whose decode step is predicted to take no longer than the original's,
    else SERVED. With two ranks it is HYBRID. The default size is FACTOR, or DEFAULT_KEEP for a
    recipe that plans no bits. Raises ValueError for an unknown recipe or family.
    """
    if named is not None:
        recipe = recipes.get(named) if isinstance(named, str) else named
        return recipe, _complete(target, recipe), None
    if target.hybrid is not None:
        name, reason = HYBRID, "hybrid ratios are of its sorted directions"
    elif target.keep is not None or target.budget is not None:
        name, reason = _for_dimensions(config, target.keep or DEFAULT_KEEP)
    else:
        name, prefer, reason = _for_bits(family_of(config), config, target)
        target = replace(target, prefer=prefer)
    recipe = recipes.get(name)
    return recipe, _complete(target, recipe), reason


def choose_for_maps(
    named: str | Recipe | None, family: type[Family], config: Any, target: Target
) -> tuple[Recipe, Target, str | None]:
    """As `choose_recipe`, for maps beside the weights of a model of any family.

    Without a recipe it is SERVED.
    """
    if named is not None or target.keep is not None or target.budget is not None:
        recipe, target, _ = choose_recipe(named or SERVED, config, target)
        return recipe, target, None
    name, prefer, reason = _for_bits(family, config, target)
    recipe = recipes.get(name)
    return recipe, _complete(replace(target, prefer=prefer), recipe), reason


def _complete(target: Target, recipe: Recipe) -> Target:
    """The target with the default size and preference where it has none."""
    target = replace(target, prefer=target.preference)
    if target.has_size:
        return target
    if builder_of(recipe).predicts_loss:
        return replace(target, factor=FACTOR)
    return replace(target, keep=DEFAULT_KEEP)


def _for_bits(family: type[Family], config: Any, target: Target) -> tuple[str, Prefer | None, str]:
    """Recipe, preference and reason where bits are planned."""
    reason = "a decode step reconstructs no keys"
    if target.prefer is not None or target.levels not in (None, LEVELS):
        return SERVED, target.prefer, reason
    spec = speed_spec(recipes.get(SERVED), family.geometry(config))
    windows = family.windows(config)
    if fastest_layout(config, spec, windows=windows) is not None:
        reason += ", and a Hopper GPU reads the cache in one pass: planned for speed"
        return SERVED, "speed", reason
    obstacle = one_pass_summary(config, spec, windows).removeprefix("no: ")
    return (
        SERVED,
        None,
        f"{reason}; not planned for speed, as no kernel reads it in one pass: {obstacle}",
    )


def _for_dimensions(config: Any, keep: float) -> tuple[str, str]:
    """Recipe and reason where the size is fewer dimensions, without planned bits."""
    geometry, load = family_of(config).geometry(config), load_of(config)
    original = predict(config, plain_spec(geometry), load)
    slower: list[str] = []
    for name in REBUILT:
        step = predict(config, even_spec(recipes.get(name), geometry, keep), load)
        if original and step and step.ms <= original.ms:
            others = f"; not {', '.join(slower)}" if slower else ""
            return name, (
                "loses least of those whose decode step is predicted to take no longer than the"
                f" original's: {step.ms:.1f} and {original.ms:.1f} ms ({load} on an {step.device})"
                f"{others}"
            )
        slower.append(f"{name} ({step.ms:.1f} ms)" if step else f"{name} (has no kernels)")
    comparison = f" beside the original's {original.ms:.1f} ms" if original else ""
    return SERVED, f"a decode step reconstructs no keys; not {', '.join(slower)}{comparison}"


def speed_spec(recipe: Recipe, geometry: Geometry) -> CacheSpec:
    """The largest plan for speed of a recipe, all in 4 bits: to ask whether kernels read it."""

    def size(side: Side, width: int) -> tuple[int, Tiers]:
        rule = one_pass_tiers(side, width, (4,))
        ((bits, unit),) = rule.units
        num_units = rule.max_rank // unit
        num_units -= rule.odd_units and num_units % 2 == 0
        return num_units * unit, ((num_units * unit, bits),)

    return _spec(recipe, geometry, size)


def even_spec(
    recipe: Recipe, geometry: Geometry, share: float, levels: Sequence[int] | None = None
) -> CacheSpec:
    """A plan that keeps `share` of every latent's numbers in all layers. levels: split each latent
    into about equally wide tiers of these bits; None: no bits are planned."""

    def size(side: Side, width: int) -> tuple[int, Tiers | None]:
        rank = int(share * width)
        if levels is None:
            return rank, None
        tiers = even_tiers(rank, levels)
        return sum(tier_width for tier_width, _ in tiers), tiers

    return _spec(recipe, geometry, size)


def _spec(recipe: Recipe, geometry: Geometry, size: SizeOfLatent) -> CacheSpec:
    """A plan whose layers are all alike."""
    basis, latents = builder_of(recipe), []
    for side, heads in basis.head_sets(geometry):
        rank, tiers = size(side, len(heads) * geometry.head_width(side))
        latents.append(Latent(side=side, heads=heads, rank=rank, tiers=tiers))
    values = value_kind(geometry, [latent for latent in latents if "v" in latent.side])
    layer = LayerSpec(keys=basis.key_kind(geometry), values=values, latents=tuple(latents))
    return CacheSpec(geometry=geometry, layers=(layer,) * geometry.num_layers)
