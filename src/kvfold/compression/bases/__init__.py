"""Bases: one file each, and a line here."""

from collections.abc import Callable, Iterable

from kvfold import recipes
from kvfold.compression.bases.base import BasisBuilder, Source
from kvfold.compression.bases.channels import Channels
from kvfold.compression.bases.lorc import LoRC
from kvfold.compression.bases.palu import Palu
from kvfold.compression.bases.post_rope import PostRope
from kvfold.compression.bases.pre_rope import PreRope
from kvfold.compression.bases.zack import Zack
from kvfold.config import Recipe

__all__ = ["BASES", "BasisBuilder", "Source", "builder_of", "recipes_where"]

# Names are those of recipes and of saved provenance.
BASES: dict[str, type[BasisBuilder]] = {
    "zack": Zack,
    "lorc": LoRC,
    "palu": Palu,
    "post": PostRope,
    "latent": PreRope,
    "channels": Channels,
}


def builder_of(recipe: Recipe) -> BasisBuilder:
    """The builder a recipe names. Raises ValueError for an unknown one, or shares it has not."""
    if recipe.basis not in BASES:
        raise ValueError(f"unknown basis {recipe.basis!r}; bases: {', '.join(BASES)}")
    found = BASES[recipe.basis]
    for name, shares in (("keys", "key_shares"), ("values", "value_shares")):
        share, legal = getattr(recipe, name), getattr(found, shares)
        if share not in legal:
            others = [repr(other) for other, x in BASES.items() if share in getattr(x, shares)]
            raise ValueError(
                f"basis {recipe.basis!r} has {name} per {_either(legal)}, got {name}={share!r}:"
                f" leave it out, or use basis {_either(others)}"
            )
    return found(recipe)


def recipes_where(suits: Callable[[BasisBuilder], bool]) -> str:
    """Named recipes whose basis suits, such as "fast, swift, lean or small", but those for one
    format."""
    made = ((name, recipe()) for name, recipe in recipes.RECIPES.items())
    return _either(name for name, x in made if not x.codebooks and suits(builder_of(x)))


def _either(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
