"""Recipes of published methods, for comparison. Each is a function that returns a `Recipe`.

All of them fold their projections into the weights (`fold=True`). Those to choose from for use are
in `kvfold.recipes`, which also has the table of all recipes by name.
"""

from collections.abc import Callable
from dataclasses import replace

from kvfold.config import Recipe


def zack() -> Recipe:
    """ZACK: SVD of [Q; K] and [V; W_O] per head, one removal rate for all heads (§4.3, §5.2)."""
    return Recipe(name="zack", basis="zack", ranks="energy")


def zdc() -> Recipe:
    """ZDC: ZACK's basis from pruned, clustered vectors, the same ranks everywhere (§4.3, §5.1)."""
    return Recipe(name="zdc", basis="zack", ranks="uniform", reduce=True)


def kvquant() -> Recipe:
    """KVQuant: keys before RoPE and values without a change of basis, with calibrated ranges and
    quantisation levels for format kvquant. It drops no dimension, so keep is 1 (§3)."""
    return Recipe(name="kvquant", basis="channels", ranks="uniform", codebooks=True)


def kvquant_z() -> Recipe:
    """KVQuant-Z: KVQuant's ranges and levels for the latents of ZACK (ZACK §6.2)."""
    return replace(zack(), name="kvquant-z", codebooks=True)


def lorc() -> Recipe:
    """LoRC: SVD of W_K and W_V over all heads, ranks by cumulative condition number (§4).

    The first fifth of the layers stays whole, as of Llama-3-8B's (Table 2). Eq. 13 keeps about half
    of the cache or more; smaller shares are an extension (`ranks.condition`), and less than
    the whole layers is refused.
    """
    return Recipe(
        name="lorc", basis="lorc", keys="joint", values="joint", ranks="condition", whole_share=0.2
    )


def palu_m() -> Recipe:
    """Palu M-LRD: whitened SVD per head, Fisher ranks, one for all heads (§3.2.1, §3.3, §4.1)."""
    return Recipe(name="palu-m", basis="palu", ranks="fisher", equal_ranks=True)


def palu_g() -> Recipe:
    """Palu G-LRD: whitened SVD per group of four heads, Fisher ranks (§3.2.3, §3.3, §4.1)."""
    return replace(palu_m(), name="palu-g", keys="group", values="group")


def palu_j() -> Recipe:
    """Palu J-LRD: whitened SVD over all heads, Fisher ranks (§3.2.2, §3.3)."""
    return replace(palu_m(), name="palu-j", keys="joint", values="joint")


PUBLISHED: dict[str, Callable[[], Recipe]] = {
    "zack": zack,
    "zdc": zdc,
    "kvquant": kvquant,
    "kvquant-z": kvquant_z,
    "lorc": lorc,
    "palu-m": palu_m,
    "palu-g": palu_g,
    "palu-j": palu_j,
}
