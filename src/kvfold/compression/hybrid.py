"""Rows of two widths, planned: ratios to ranks, and which layers rank tokens alike (ZDC §5.2)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np

from kvfold.compression.bases import builder_of
from kvfold.config import Ratios, Recipe
from kvfold.layout import CacheSpec, Geometry, Hybrid, Latent
from kvfold.layout.pages import Ints
from kvfold.layout.saved import unsplit
from kvfold.utils.errors import SettingError

ALIKE = 0.95  # layers share a ranking whose important tokens agree by more


def rank_of(removed: float, width: int, align: int) -> int:
    """Numbers of `width` that stay, the nearest multiple of `align`."""
    return min(max(round((1 - removed) * width / align), 0) * align, width)


def with_narrow(spec: CacheSpec, ratios: Ratios, align: int) -> CacheSpec:
    """A spec with the narrow rows that ratios ask for; every layer ranks tokens by itself. Raises
    SettingError for one whose rows have no narrow form."""
    if reason := unsplit(spec.layers):
        refuse(reason)
    width, layers = spec.geometry.head_dim, spec.geometry.num_layers

    def narrow(latent: Latent) -> int:
        removed = ratios.narrow_keys if latent.side == "k" else ratios.narrow_values
        return min(rank_of(removed, width, align), latent.rank)

    important = np.linspace(ratios.important, ratios.important_last, layers)
    hybrid = Hybrid(
        ranks=tuple(tuple(map(narrow, layer.latents)) for layer in spec.layers),
        important=tuple(float(share) for share in important),
        leaders=tuple(range(layers)),
        by=ratios.by,
    )
    if not all(latent.rank for layer in spec.layers for latent in layer.latents):
        raise SettingError(
            "`hybrid` leaves important tokens no number of a head: lower `keys` or `values`"
        )
    if not any(map(sum, hybrid.ranks)):
        raise SettingError(
            "`hybrid` leaves unimportant tokens no number: lower `narrow_keys` or `narrow_values`"
        )
    return replace(spec, hybrid=hybrid)


def check_recipe(recipe: Recipe, geometry: Geometry) -> None:
    """Raises SettingError for a recipe whose rows have no narrow form, before it is calibrated."""
    kind = builder_of(recipe).key_kind(geometry)
    if kind not in ("post_rope", "absorbed"):
        refuse(f"recipe {recipe.name!r} stores {kind} keys")
    if {recipe.keys, recipe.values} != {"head"}:
        refuse(f"heads of recipe {recipe.name!r} share latents")


def refuse(reason: str) -> NoReturn:
    raise SettingError(
        f"`hybrid`: {reason}, and a narrow row is the first numbers of keys and values per head in "
        "score space: take recipe zdc, zack or fast"
    )


def with_leaders(spec: CacheSpec, order: Sequence[Ints]) -> CacheSpec:
    """The same where adjacent layers whose important sets agree by more than ALIKE are ranked by
    the first of them, whose share of tokens they take too.

    order: of every text, int64 [L, T], each layer's tokens from the most important on.
    """
    hybrid = spec.hybrid
    assert hybrid is not None
    leaders: list[int] = []
    for layer, share in enumerate(hybrid.important):
        leader = leaders[-1] if layer else 0
        alike = layer > 0 and agreement(order, leader, layer, share) > ALIKE
        leaders.append(leader if alike else layer)
    important = tuple(hybrid.important[leader] for leader in leaders)
    return replace(spec, hybrid=replace(hybrid, leaders=tuple(leaders), important=important))


def agreement(order: Sequence[Ints], a: int, b: int, share: float) -> float:
    """The part of a layer's important tokens that are another's too, over all texts."""
    both = total = 0
    for own in order:
        size = round(share * own.shape[1])
        both, total = both + len(np.intersect1d(own[a, :size], own[b, :size])), total + size
    return both / max(total, 1)
