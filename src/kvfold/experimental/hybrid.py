"""Plans cache entries of two ranks: full-rank for important tokens, low-rank for the others (ZDC
§5.2).

Here ratios become ranks, and layers that rank tokens alike are found. What engines need to read
such entries is elsewhere: the saved plan is `layout.MixedRanks`, attention is `attention.hybrid`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np

from kvfold.config import Ratios, Recipe
from kvfold.layout import CacheSpec, KeyKind, Latent, MixedRanks
from kvfold.layout.pages import Ints
from kvfold.layout.saved import why_not_mixed_ranks
from kvfold.utils.errors import SettingError

MIN_AGREEMENT = 0.95  # layers share a ranking if more than this of their important tokens agree


def rank_of(removed: float, width: int, align: int) -> int:
    """The multiple of `align` nearest to the numbers of `width` that stay, in [0, width]."""
    return min(max(round((1 - removed) * width / align), 0) * align, width)


def with_low_rank(spec: CacheSpec, ratios: Ratios, align: int) -> CacheSpec:
    """A plan with the low-rank entries that ratios ask for; every layer ranks tokens by itself.

    Raises SettingError for a plan whose entries have no low-rank form, and for ratios that leave
    important or unimportant tokens nothing.
    """
    if reason := why_not_mixed_ranks(spec.layers):
        refuse(reason)
    width, layers = spec.geometry.head_dim, spec.geometry.num_layers

    def low_rank(latent: Latent) -> int:
        removed = ratios.low_rank_keys if latent.side == "k" else ratios.low_rank_values
        return min(rank_of(removed, width, align), latent.rank)

    important = np.linspace(ratios.important, ratios.important_last, layers)
    hybrid = MixedRanks(
        ranks=tuple(tuple(map(low_rank, layer.latents)) for layer in spec.layers),
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
            "`hybrid` leaves unimportant tokens no number: lower `low_rank_keys` or"
            " `low_rank_values`"
        )
    return replace(spec, hybrid=hybrid)


def check_recipe(recipe: Recipe, keys: KeyKind) -> None:
    """Raises SettingError, before calibration, for a recipe whose entries have no low-rank form.

    keys: how the recipe stores keys of the model.
    """
    if keys not in ("post_rope", "absorbed"):
        refuse(f"recipe {recipe.name!r} stores {keys} keys")
    if {recipe.keys, recipe.values} != {"head"}:
        refuse(f"heads of recipe {recipe.name!r} share latents")


def refuse(reason: str) -> NoReturn:
    """Raise the SettingError for entries without a low-rank form."""
    raise SettingError(
        f"`hybrid`: {reason}, but a low-rank entry is the first numbers of each head's keys and"
        " values, as they are scored: take recipe zdc, zack or fast"
    )


def with_leaders(spec: CacheSpec, order: Sequence[Ints]) -> CacheSpec:
    """The plan in which adjacent layers whose important tokens agree by more than MIN_AGREEMENT
    take the ranking, and the share of important tokens, of the first of them (its leader).

    order: for each text int64 [L, T], each layer's tokens from the most important on.
    """
    hybrid = spec.hybrid
    assert hybrid is not None
    leaders: list[int] = []
    for layer, share in enumerate(hybrid.important):
        leader = leaders[-1] if layer else 0
        agrees = layer > 0 and agreement(order, leader, layer, share) > MIN_AGREEMENT
        leaders.append(leader if agrees else layer)
    important = tuple(hybrid.important[leader] for leader in leaders)
    return replace(spec, hybrid=replace(hybrid, leaders=tuple(leaders), important=important))


def agreement(order: Sequence[Ints], a: int, b: int, share: float) -> float:
    """The fraction of layer a's important tokens that layer b's contain too, over all texts."""
    both = total = 0
    for ranking in order:
        size = round(share * ranking.shape[1])
        common = np.intersect1d(ranking[a, :size], ranking[b, :size])
        both, total = both + len(common), total + size
    return both / max(total, 1)
