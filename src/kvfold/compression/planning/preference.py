"""What a plan of dimensions and bits prefers: few bytes, fast steps, or both.

`balanced` and `size` plan every latent by itself, in LEVELS and in ALL_LEVELS. `speed` plans rows
that `ops.one_pass` reads in one pass: runs of the same bits and widths in all heads of a layer,
whose keys have a latent each, and values one of all heads. Keys that are rebuilt have at most so
many numbers that the layer's maps fit a multiprocessor's shared memory beside two pages.
"""

from collections.abc import Sequence

from kvfold.compression.bases import BasisBuilder, builder_of, recipes_where
from kvfold.compression.planning.bit_allocation import TierRule, any_tiers
from kvfold.config import ALL_LEVELS, LEVELS, Prefer, Recipe
from kvfold.layout import Geometry, KeyKind, Side
from kvfold.utils.errors import SettingError

KEY_LEVELS = (8, 4)  # of keys: the pass unpacks and multiplies them number by number
LITTLE = 0.1  # more predicted loss, which plans without keys in 2 bits may have
ITEM, ITEMS = 64, 12  # numbers of a row that a warp weighs, in 2 bits two warps, of values; warps
WIDE = 512  # numbers of a value latent that loses little where its runs are odd
WORDS = {"k": 32, "v": 128}  # bits that its runs are multiples of
REBUILT = (6, 5, 4, 3, 2, 1)  # most loads of a rebuilt key


def default_levels(prefer: Prefer) -> tuple[int, ...]:
    """Bits of planned numbers where none are named."""
    return ALL_LEVELS if prefer == "size" else LEVELS


def rule_of(
    prefer: Prefer, side: Side, width: int, levels: Sequence[int], keys: KeyKind
) -> TierRule:
    """What tiers a latent may have, of a layer whose keys are stored so."""
    if prefer != "speed":
        return any_tiers(width, levels)
    return one_pass_tiers(side, width, levels, key_limits(prefer, keys)[0])


def key_limits(prefer: Prefer, keys: KeyKind) -> tuple[int, ...]:
    """The most loads of a key that is rebuilt, of which the first that fits is to be taken (0: none
    is)."""
    return REBUILT if prefer == "speed" and keys == "pre_rope" else (0,)


def one_pass_tiers(
    side: Side, width: int, levels: Sequence[int] = LEVELS, loads: int = 0
) -> TierRule:
    """Runs of LEVELS, or some of them, that the kernel reads, at least one. Of values at most as
    many as its warps weigh, whatever part of the last one's a run leaves; of WIDE ones an odd
    number of 16 bytes each, so that rows lie in unlike banks of memory. loads: the most of a key
    that is rebuilt, whose map takes memory for each (0: keys are scored as they are stored)."""
    units = {bits: WORDS[side] // bits for bits in levels}
    most = width
    if side == "v":
        wasted = sum(ITEM * (2 if bits == 2 else 1) - units[bits] for bits in levels)
        most = min(width, ITEM * ITEMS - wasted)
    return TierRule(
        width=width,
        units=tuple(units.items()),
        most=most,
        needed=True,
        odd=side == "v" and width >= WIDE,
        loads=loads if side == "k" else 0,
    )


def in_one_pass(basis: BasisBuilder, geometry: Geometry) -> bool:
    """Whether plans for speed are of rows as a recipe stores them."""
    heads, sets = range(geometry.num_kv_heads), basis.head_sets(geometry)
    wanted = [("k", (head,)) for head in heads] + [("v", tuple(heads))]
    return basis.predicts_loss and sets == wanted


def check_speed(recipe: Recipe, geometry: Geometry) -> None:
    """Raises SettingError for a recipe whose rows no kernel reads in one pass."""
    if not in_one_pass(builder_of(recipe), geometry):
        names = recipes_where(lambda basis: in_one_pass(basis, geometry))
        raise SettingError(
            f"`prefer='speed'` plans keys of each head and values of all heads; recipe"
            f" {recipe.name!r} stores others: use {names}, or leave `prefer` out"
        )
