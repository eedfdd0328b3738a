"""The recipe and the size where none is given, chosen before calibration, by the model's config."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvfold import recipes
from kvfold.compression.bases import builder_of
from kvfold.compression.planning.bit_allocation import even_tiers
from kvfold.compression.planning.preference import one_pass_tiers
from kvfold.compression.planning.step_time import load_of, predict
from kvfold.compression.planning.target import Target
from kvfold.config import DEFAULT_KEEP, LEVELS, Recipe
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
from kvfold.models.kernels import fastest_layout, in_one_pass

SERVED = "swift"  # its decode step reconstructs nothing
REBUILT = ("small", "lean")  # lose less than SERVED where no bits are planned, the best first
HYBRID = "zdc"
FACTOR = 4.0  # times smaller where no size is given, of recipes that plan bits
Sizes = Callable[[Side, int], tuple[int, Tiers | None]]  # rank and tiers by a latent's side, width


def chosen(
    given: str | Recipe | None, config: Any, target: Target
) -> tuple[Recipe, Target, str | None]:
    """The recipe, the size, and why this recipe where none is given. config: of the model.

    Where bits are planned, SERVED, for speed if a Hopper GPU reads such entries of this model in
    one pass and nothing else is asked for. Where dimensions alone are dropped, the first of REBUILT
    whose decode step is predicted to take no longer than the original's, else SERVED. HYBRID where
    entries have two widths. Without a size, FACTOR, or DEFAULT_KEEP of a recipe that plans no bits.
    Raises ValueError for an unknown name or family.
    """
    if given is not None:
        recipe = recipes.get(given) if isinstance(given, str) else given
        return recipe, _complete(target, recipe), None
    if target.hybrid is not None:
        name, why = HYBRID, "hybrid ratios are of its sorted directions"
    elif target.keep is not None or target.budget is not None:
        name, why = _of_dimensions(config, target.keep or DEFAULT_KEEP)
    else:
        name, prefer, why = _of_bits(family_of(config), config, target)
        target = replace(target, prefer=prefer)
    recipe = recipes.get(name)
    return recipe, _complete(target, recipe), why


def chosen_beside(
    given: str | Recipe | None, family: type[Family], config: Any, target: Target
) -> tuple[Recipe, Target, str | None]:
    """The same for maps beside the weights of a model of any family: SERVED where no recipe is
    given."""
    if given is not None or target.keep is not None or target.budget is not None:
        recipe, target, _ = chosen(given or SERVED, config, target)
        return recipe, target, None
    name, prefer, why = _of_bits(family, config, target)
    recipe = recipes.get(name)
    return recipe, _complete(replace(target, prefer=prefer), recipe), why


def _complete(target: Target, recipe: Recipe) -> Target:
    """With a size, and with what a plan is for."""
    target = replace(target, prefer=target.plans_for)
    if target.sized:
        return target
    if builder_of(recipe).predicts_loss:
        return replace(target, factor=FACTOR)
    return replace(target, keep=DEFAULT_KEEP)


def _of_bits(family: type[Family], config: Any, target: Target) -> tuple[str, Any, str]:
    """Name, what to plan for, and why, where bits are planned."""
    why = "a decode step reconstructs no keys"
    if target.prefer is not None or target.levels not in (None, LEVELS):
        return SERVED, target.prefer, why
    spec = speed_spec(recipes.get(SERVED), family.geometry(config))
    windows = family.windows(config)
    if fastest_layout(config, spec, windows=windows) is not None:
        why += ", and a Hopper GPU reads the cache in one pass: planned for speed"
        return SERVED, "speed", why
    reason = in_one_pass(config, spec, windows).removeprefix("no: ")
    return (
        SERVED,
        None,
        f"{why}; not planned for speed, as no kernel reads it in one pass: {reason}",
    )


def _of_dimensions(config: Any, keep: float) -> tuple[str, str]:
    """Name, and why, where dimensions alone are dropped."""
    geometry, load = family_of(config).geometry(config), load_of(config)
    whole = predict(config, plain_spec(geometry), load)
    passed: list[str] = []
    for name in REBUILT:
        own = predict(config, even_spec(recipes.get(name), geometry, keep), load)
        if whole and own and own.ms <= whole.ms:
            others = f"; not {', '.join(passed)}" if passed else ""
            return name, (
                "loses least of those whose decode step is predicted to take no longer than the"
                f" original's: {own.ms:.1f} and {whole.ms:.1f} ms ({load} on an {own.device})"
                f"{others}"
            )
        passed.append(f"{name} ({own.ms:.1f} ms)" if own else f"{name} (has no kernels)")
    beside = f" beside the original's {whole.ms:.1f} ms" if whole else ""
    return SERVED, f"a decode step reconstructs no keys; not {', '.join(passed)}{beside}"


def speed_spec(recipe: Recipe, geometry: Geometry) -> CacheSpec:
    """What a recipe may store when it is planned for speed: as much as fits, in 4 bits."""

    def size(side: Side, width: int) -> tuple[int, Tiers]:
        rule = one_pass_tiers(side, width, (4,))
        ((bits, step),) = rule.units
        units = rule.most // step
        units -= rule.odd and units % 2 == 0
        return units * step, ((units * step, bits),)

    return _spec(recipe, geometry, size)


def even_spec(
    recipe: Recipe, geometry: Geometry, share: float, levels: Sequence[int] | None = None
) -> CacheSpec:
    """What a recipe stores that keeps `share` of every latent's numbers, in all layers; with
    levels, in tiers of each of them that are about as wide."""

    def size(side: Side, width: int) -> tuple[int, Tiers | None]:
        rank = int(share * width)
        if levels is None:
            return rank, None
        tiers = even_tiers(rank, levels)
        return sum(own for own, _ in tiers), tiers

    return _spec(recipe, geometry, size)


def _spec(recipe: Recipe, geometry: Geometry, size: Sizes) -> CacheSpec:
    """Of equal layers."""
    basis, latents = builder_of(recipe), []
    for side, heads in basis.head_sets(geometry):
        rank, tiers = size(side, len(heads) * geometry.head_width(side))
        latents.append(Latent(side=side, heads=heads, rank=rank, tiers=tiers))
    values = value_kind(geometry, [latent for latent in latents if "v" in latent.side])
    layer = LayerSpec(keys=basis.key_kind(geometry), values=values, latents=tuple(latents))
    return CacheSpec(geometry=geometry, layers=(layer,) * geometry.num_layers)
