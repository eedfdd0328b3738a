"""Which sizes a recipe can have on a model. Checked before anything is calibrated."""

from kvfold.compression.bases import builder_of, recipes_where
from kvfold.compression.planning.preference import check_speed, rule_of
from kvfold.compression.planning.target import Target, check_align
from kvfold.config import Recipe
from kvfold.experimental.hybrid import check_recipe
from kvfold.layout import Geometry
from kvfold.utils.errors import SettingError


def aligned(geometry: Geometry, align: int | None) -> int:
    """The number that ranks are multiples of. By default 16, for tensor-core tiles, and 8 for heads
    of at most 64 numbers."""
    check_align(align)
    if align is None:
        return 16 if geometry.head_dim > 64 else 8
    return align


def factor_of(
    recipe: Recipe, geometry: Geometry, target: Target, align: int | None = None
) -> float | None:
    """How many times smaller a plan of bits is to make a token; None where only dimensions are
    planned.

    Raises ValueError for a size that the recipe cannot plan on the model, whatever calibration
    measures, and for one that is no smaller than the model's.
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
        name, value = target.named_size
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
    _check_smallest(recipe, geometry, target, factor, aligned(geometry, align))
    return factor


def _check_smallest(
    recipe: Recipe, geometry: Geometry, target: Target, factor: float | None, align: int
) -> None:
    """Raises SettingError for a size too small for the smallest latent in every layer."""
    basis = builder_of(recipe)
    sets, layers = basis.head_sets(geometry), geometry.num_layers
    widths = [len(heads) * geometry.head_width(side) for side, heads in sets]
    hint = "ask for a larger cache"
    if factor is not None:
        assert target.levels is not None
        rules = [
            rule_of(target.preference, side, width, target.levels, basis.key_kind(geometry))
            for (side, _), width in zip(sets, widths, strict=True)
        ]
        required, what = sum(rule.min_bits for rule in rules if rule.require_tier), "bits"
        budget, least = bits_of(factor, geometry), required or min(x.min_bits for x in rules)
    elif target.keep is not None:
        budget, least, what = numbers(target.keep, geometry), min([align, *widths]), "numbers"
        hint += f", or a smaller `align` than {align}"
    else:
        return
    if budget < layers * least:
        name, value = target.named_size
        raise SettingError(
            f"`{name}={value:g}` leaves {budget} {what} a token, and each of {layers} layers takes"
            f" at least {least}: {hint}"
        )


def numbers(keep: float, geometry: Geometry) -> int:
    """This share of the cache, in numbers per token."""
    return int(keep * geometry.full_numbers + 1e-6)


def bits_of(factor: float, geometry: Geometry) -> int:
    """Bits per token of a cache `factor` times smaller than at 16 bits."""
    return int(16 * geometry.full_numbers / factor)
