"""All bases by name. A basis says which directions of keys and values are kept: a file each here.

The names are what `Recipe.basis` takes, and what a compressed model's provenance records.
"""

import warnings
from collections.abc import Callable, Iterable

from kvfold import recipes
from kvfold.compression.bases.base import BasisBuilder, Source
from kvfold.compression.bases.lorc import LoRC
from kvfold.compression.bases.palu import Palu
from kvfold.compression.bases.post_rope import PostRope
from kvfold.compression.bases.pre_rope import PreRope
from kvfold.compression.bases.sorted_channels import SortedChannels
from kvfold.compression.bases.zack import Zack
from kvfold.config import Recipe

__all__ = ["BASES", "BasisBuilder", "Source", "builder_of", "recipes_where"]

BASES: dict[str, type[BasisBuilder]] = {
    "post_rope": PostRope,
    "pre_rope": PreRope,
    "zack": Zack,
    "lorc": LoRC,
    "palu": Palu,
    "channels": SortedChannels,
}
EARLIER_NAMES = {"post": "post_rope", "latent": "pre_rope"}


def builder_of(recipe: Recipe) -> BasisBuilder:
    """The basis builder that a recipe names. Raises ValueError for an unknown basis, and for heads
    that share latents in a way that the basis cannot build."""
    name = recipe.basis
    if name in EARLIER_NAMES:
        name = EARLIER_NAMES[name]
        message = f"Recipe(basis={recipe.basis!r}) is called {name!r} now"
        warnings.warn(message, FutureWarning, stacklevel=2)
    if name not in BASES:
        raise ValueError(f"unknown basis {name!r}; bases: {', '.join(BASES)}")
    builder = BASES[name]
    for field, legal_shares in (("keys", "key_shares"), ("values", "value_shares")):
        share, legal = getattr(recipe, field), getattr(builder, legal_shares)
        if share not in legal:
            others = [
                repr(x) for x, other in BASES.items() if share in getattr(other, legal_shares)
            ]
            raise ValueError(
                f"basis {name!r} has {field} per {_either(legal)}, got {field}={share!r}:"
                f" leave it out, or use basis {_either(others)}"
            )
    return builder(recipe)


def recipes_where(suits: Callable[[BasisBuilder], bool]) -> str:
    """Names of the recipes whose basis suits, such as "swift, lean, small or fast". Recipes with
    codebooks are left out, since they serve one number format."""
    named = ((name, recipe()) for name, recipe in recipes.RECIPES.items())
    return _either(name for name, x in named if not x.codebooks and suits(builder_of(x)))


def _either(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
