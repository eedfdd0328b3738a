"""The sizes that a recipe can have on a model, before anything is calibrated."""

from kvfold.compression.bases import builder_of, recipes_where
from kvfold.compression.planning.preference import check_speed, rule_of
from kvfold.compression.planning.target import Target, check_align
from kvfold.config import Recipe
from kvfold.experimental.hybrid import check_recipe
from kvfold.layout import Geometry
from kvfold.utils.errors import SettingError


def aligned(geometry: Geometry, given: int | None) -> int:
    """A divisor of all ranks: by default 16 for tensor-core tiles, 8 for narrow heads."""
    check_align(given)
    if given is None:
        return 16 if geometry.head_dim > 64 else 8
    return given


def factor_of(
    recipe: Recipe, geometry: Geometry, target: Target, align: int | None = None
) -> float | None:
    """How many times smaller bits are to make a token; None where only dimensions are planned.

    Raises ValueError for a size that the recipe cannot plan, whatever calibration finds, or the
    model already has.
    """
    target.check_align(align)
    factor, full = target.factor, 2 * geometry.full_numbers
    if target.bytes_per_token is not None:
        if target.bytes_per_token > full:
            raise SettingError(
                f"`bytes_per_token` must be at most {full}, what the uncompressed cache takes"
                f" at 16 bits; got {target.bytes_per_token:g}"
            )
        factor = full / target.bytes_per_token
    if target.hybrid is not None:
        check_recipe(recipe, builder_of(recipe).key_kind(geometry))
    if builder_of(recipe).drops_nothing and (factor or target.limit or target.keep != 1):
        name, value = target.size
        raise SettingError(
            f"recipe {recipe.name!r} drops nothing, got `{name}={value}`: set `keep=1`, and serve "
            "the result with format='kvquant' and bits of 4, 3 or 2, which make it small"
        )
    if factor is not None and not builder_of(recipe).predicts_loss:
        raise ValueError(
            f"recipe {recipe.name!r} predicts no losses to weigh bits by; use "
            + recipes_where(lambda basis: basis.predicts_loss)
        )
    if target.prefer == "speed":
        check_speed(recipe, geometry)
    _check_room(recipe, geometry, target, factor, aligned(geometry, align))
    return factor


def _check_room(
    recipe: Recipe, geometry: Geometry, target: Target, factor: float | None, align: int
) -> None:
    """Raises SettingError for a size that has no room for one step of one latent of every layer."""
    basis = builder_of(recipe)
    sets, layers = basis.head_sets(geometry), geometry.num_layers
    widths = [len(heads) * geometry.head_width(side) for side, heads in sets]
    hint = "ask for a larger cache"
    if factor is not None:
        assert target.levels is not None
        found = [
            rule_of(target.plans_for, side, width, target.levels, basis.key_kind(geometry))
            for (side, _), width in zip(sets, widths, strict=True)
        ]
        needed, what = sum(rule.least for rule in found if rule.needed), "bits"
        room, least = bits_of(factor, geometry), needed or min(rule.least for rule in found)
    elif target.keep is not None:
        room, least, what = numbers(target.keep, geometry), min([align, *widths]), "numbers"
        hint += f", or a smaller `align` than {align}"
    else:
        return
    if room < layers * least:
        name, value = target.size
        raise SettingError(
            f"`{name}={value:g}` leaves {room} {what} a token, and each of {layers} layers takes at"
            f" least {least}: {hint}"
        )


def numbers(keep: float, geometry: Geometry) -> int:
    """Numbers a token that are this share of the cache."""
    return int(keep * geometry.full_numbers + 1e-6)


def bits_of(factor: float, geometry: Geometry) -> int:
    """Bits a token of a cache so many times smaller than at 16 bits."""
    return int(16 * geometry.full_numbers / factor)
