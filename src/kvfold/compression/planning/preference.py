"""Which tiers a plan may use, by what it prefers: few bytes (`size`), fast steps (`speed`), or both
(`balanced`).

`balanced` and `size` plan every latent by itself, in LEVELS and in ALL_LEVELS. `speed` plans
entries that the kernel `ops.one_pass` reads in one pass: all heads of a layer have the same tiers,
keys have a latent each, and values one latent of all heads. Keys that are reconstructed are limited
in size, so that a layer's maps fit into a multiprocessor's shared memory beside two pages.

A preference (`Prefer`) is not a goal (`recipes.GOALS`): a goal chooses the recipe, a preference the
bits of its plan. The goal "speed" alone leaves the preference open; of the others it is `balanced`,
also of the goal "memory".
"""

from collections.abc import Sequence

from kvfold.compression.bases import BasisBuilder, builder_of, recipes_where
from kvfold.compression.planning.bit_allocation import TierRule, any_tiers
from kvfold.config import ALL_LEVELS, LEVELS, Prefer, Recipe
from kvfold.layout import Geometry, KeyKind, Side
from kvfold.utils.errors import SettingError

# Most bit-width layouts of a plan for speed: its predicted loss is 4 to 11 % more than without.
MAX_LAYOUTS = 4
KEY_LEVELS = (8, 4)  # faster than 2 bits for keys, which the kernel unpacks number by number
MAX_EXTRA_LOSS = 0.1  # relative extra predicted loss accepted for keys without 2-bit tiers
VALUES_PER_WARP, VALUE_WARPS = 64, 12  # values that a warp accumulates (2-bit ones take two warps)
WIDE_VALUES = 512  # value latents of so many numbers lose little by tiers of odd numbers of units
SEGMENT_BITS = {"k": 32, "v": 128}  # tiers are multiples of so many bits
RECONSTRUCTED_LOADS = (6, 5, 4, 3, 2, 1)  # limits of a reconstructed key's vector loads, to try


def default_layouts(prefer: Prefer) -> int | None:
    """Most bit-width layouts of a model where the user names none (None: no limit), see
    `few_layouts`."""
    return MAX_LAYOUTS if prefer == "speed" else None


def default_levels(prefer: Prefer) -> tuple[int, ...]:
    """The bits that planned numbers may have where the user names none."""
    return ALL_LEVELS if prefer == "size" else LEVELS


def rule_of(
    prefer: Prefer, side: Side, width: int, levels: Sequence[int], keys: KeyKind
) -> TierRule:
    """The tiers that a latent may have. keys: how its layer stores keys."""
    if prefer != "speed":
        return any_tiers(width, levels)
    return one_pass_tiers(side, width, levels, key_limits(prefer, keys)[0])


def key_limits(prefer: Prefer, keys: KeyKind) -> tuple[int, ...]:
    """Limits of a reconstructed key's vector loads; the first that a kernel can read is to be used.
    (0,): no limit."""
    return RECONSTRUCTED_LOADS if prefer == "speed" and keys == "pre_rope" else (0,)


def one_pass_tiers(
    side: Side, width: int, levels: Sequence[int] = LEVELS, loads: int = 0
) -> TierRule:
    """The tiers that the one-pass kernel reads: at least one, of `levels`, which are all or some of
    LEVELS.

    Values have at most the numbers that VALUE_WARPS accumulate, partly filled warps counted in
    full. In WIDE_VALUES value latents each tier is an odd multiple of 16 bytes, to avoid
    shared-memory bank conflicts. loads: the most vector loads of a reconstructed key, as each takes
    shared memory for its map (0: keys are scored as they are stored).
    """
    units = {bits: SEGMENT_BITS[side] // bits for bits in levels}
    max_rank = width
    if side == "v":
        wasted = sum(VALUES_PER_WARP * (2 if bits == 2 else 1) - units[bits] for bits in levels)
        max_rank = min(width, VALUES_PER_WARP * VALUE_WARPS - wasted)
    return TierRule(
        width=width,
        units=tuple(units.items()),
        max_rank=max_rank,
        require_tier=True,
        odd_units=side == "v" and width >= WIDE_VALUES,
        max_loads=loads if side == "k" else 0,
    )


def plans_for_speed(basis: BasisBuilder, geometry: Geometry) -> bool:
    """Whether a recipe can be planned for speed: keys per head, one latent of all heads' values."""
    heads, sets = range(geometry.num_kv_heads), basis.head_sets(geometry)
    wanted = [("k", (head,)) for head in heads] + [("v", tuple(heads))]
    return basis.predicts_loss and sets == wanted


def check_speed(recipe: Recipe, geometry: Geometry) -> None:
    """Raises SettingError for a recipe that cannot be planned for speed."""
    if not plans_for_speed(builder_of(recipe), geometry):
        names = recipes_where(lambda basis: plans_for_speed(basis, geometry))
        raise SettingError(
            f"`prefer='speed'` plans a latent of keys per head and one of all heads' values, and"
            f" recipe {recipe.name!r} has others: use {names}, or leave `prefer` out"
        )
