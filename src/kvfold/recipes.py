"""Recipes to choose from, the goals that they serve, and the table of all recipes by name.

A recipe says how a cache is compressed. Each is a function that returns a `Recipe`; those of papers
are in `kvfold.published`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from kvfold.config import Recipe
from kvfold.published import PUBLISHED
from kvfold.published import kvquant as kvquant
from kvfold.published import kvquant_z as kvquant_z
from kvfold.published import lorc as lorc
from kvfold.published import palu_g as palu_g
from kvfold.published import palu_j as palu_j
from kvfold.published import palu_m as palu_m
from kvfold.published import zack as zack
from kvfold.published import zdc as zdc

Goal = Literal["speed", "balanced", "memory"]


def fast() -> Recipe:
    """Keys after RoPE and values, a latent per head: decode reconstructs nothing. The one of these
    recipes that `hybrid` ratios and `repair` can use."""
    return Recipe(name="fast", basis="post_rope", ranks="energy", gradients=True)


def swift() -> Recipe:
    """Keys after RoPE, a latent per head; values, one latent per layer. Planned with bits. Decode
    reconstructs nothing. The default."""
    return replace(fast(), name="swift", values="joint", ranks="greedy")


def lean() -> Recipe:
    """Keys before RoPE, a latent per head; values, one latent per layer. Smaller than swift at the
    same loss, but decode reconstructs keys, one head at a time."""
    return Recipe(name="lean", basis="pre_rope", values="joint", gradients=True)


def small() -> Recipe:
    """One latent per layer for all keys and values. The fewest bytes at a loss; decode reconstructs
    keys from all of it, which is slow."""
    return Recipe(name="small", basis="pre_rope", keys="kv", values="kv", gradients=True)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "swift": swift,
    "lean": lean,
    "small": small,
    "fast": fast,
    **PUBLISHED,
}
# The recipe for what matters most. None: the default, which is swift planned with prefer="speed"
# where a GPU reads such a cache in one pass (`compression.planning.default`). A named recipe is
# planned with prefer="balanced" unless `prefer` says otherwise: `lean` and `small` of these goals
# are, and so is swift by `--recipe swift`, which therefore differs from the goal "speed".
GOALS: dict[Goal, str | None] = {"speed": None, "balanced": "lean", "memory": "small"}
# All names for people, those of papers apart.
NAMES = (
    f"{', '.join(name for name in RECIPES if name not in PUBLISHED)};"
    f" of papers: {', '.join(PUBLISHED)}"
)


def get(name: str) -> Recipe:
    """The recipe called `name`; `palu` is palu-g. Raises ValueError for an unknown name."""
    if name == "palu":
        name = "palu-g"  # the paper's default granularity
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; recipes: {NAMES}")
    return RECIPES[name]()
