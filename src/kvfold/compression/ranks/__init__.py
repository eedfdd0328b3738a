"""All rank methods by name. A rank method says how many dimensions each latent keeps."""

from kvfold.compression.ranks.allocate import allocate
from kvfold.compression.ranks.base import Candidates, LatentCandidate, RankMethod
from kvfold.compression.ranks.condition import Condition
from kvfold.compression.ranks.fisher import Fisher
from kvfold.compression.ranks.spectra import Energy, Greedy, Uniform
from kvfold.config import Recipe

__all__ = ["METHODS", "Candidates", "LatentCandidate", "RankMethod", "allocate", "method_of"]

METHODS: dict[str, type[RankMethod]] = {
    "uniform": Uniform,
    "energy": Energy,
    "fisher": Fisher,
    "condition": Condition,
    "greedy": Greedy,
}


def method_of(recipe: Recipe) -> RankMethod:
    """The rank method that a recipe names. Raises ValueError for an unknown method, and for
    settings that it does not read."""
    if recipe.ranks not in METHODS:
        raise ValueError(f"unknown ranks {recipe.ranks!r}; rank methods: {', '.join(METHODS)}")
    for name, method in METHODS.items():
        for setting in method.settings - METHODS[recipe.ranks].settings:
            if getattr(recipe, setting) != getattr(Recipe, setting):
                raise ValueError(
                    f"{setting} needs ranks={name!r}, got ranks={recipe.ranks!r}, which does not"
                    " read it: leave it out"
                )
    return METHODS[recipe.ranks](recipe)
