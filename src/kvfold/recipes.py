"""Named recipes: the published methods, and ours. Each is a plain function returning a config."""

from collections.abc import Callable
from dataclasses import replace

from kvfold.config import Recipe


def zack() -> Recipe:
    """ZACK: SVD of [Q; K] and [V; W_O] per head, one removal rate for all heads (§4.3, §5.2)."""
    return Recipe(name="zack", basis="zack", ranks="energy")


def zdc() -> Recipe:
    """ZDC: ZACK's basis from pruned, clustered rows, the same ranks everywhere (§4.3, §5.1)."""
    return Recipe(name="zdc", basis="zack", ranks="uniform", reduce=True)


def kvquant() -> Recipe:
    """KVQuant: keys before RoPE and values as they are, with levels and ranges for format kvquant,
    in which it is served: nothing is dropped, so keep is 1 (§3)."""
    return Recipe(name="kvquant", basis="channels", ranks="uniform", codebooks=True)


def kvquant_z() -> Recipe:
    """KVQuant-Z: the same for what ZACK stores, keys after RoPE (ZACK §6.2)."""
    return replace(zack(), name="kvquant-z", codebooks=True)


def lorc() -> Recipe:
    """LoRC: SVD of W_K and W_V over all heads, ranks by cumulative condition number (§4)."""
    return Recipe(name="lorc", basis="lorc", keys="joint", values="joint", ranks="condition")


def palu_m() -> Recipe:
    """Palu M-LRD: whitened SVD per head, Fisher ranks, one for all heads (§3.2.1, §3.3, §4.1)."""
    return Recipe(name="palu-m", basis="palu", ranks="fisher", equal_ranks=True)


def palu_g() -> Recipe:
    """Palu G-LRD: whitened SVD per group of four heads, Fisher ranks (§3.2.3, §3.3, §4.1)."""
    return replace(palu_m(), name="palu-g", keys="group", values="group")


def palu_j() -> Recipe:
    """Palu J-LRD: whitened SVD over all heads, Fisher ranks (§3.2.2, §3.3)."""
    return replace(palu_m(), name="palu-j", keys="joint", values="joint")


def fast() -> Recipe:
    """Ours: post-RoPE keys and values per head, loss-weighted. Nothing is rebuilt in decode."""
    return Recipe(name="fast", basis="post", ranks="energy", gradients=True)


def swift() -> Recipe:
    """Ours: post-RoPE keys per head, values joint over heads; made for bits. Nothing is rebuilt."""
    return replace(fast(), name="swift", values="joint", ranks="greedy")


def lean() -> Recipe:
    """Ours: pre-RoPE keys per head (rebuilt cheaply), values joint over heads and absorbed."""
    return Recipe(name="lean", basis="latent", values="joint", gradients=True)


def small() -> Recipe:
    """Ours: one latent a layer for all keys and values. Fewest bytes; rebuilding costs compute."""
    return Recipe(name="small", basis="latent", keys="kv", values="kv", gradients=True)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "zack": zack,
    "zdc": zdc,
    "kvquant": kvquant,
    "kvquant-z": kvquant_z,
    "lorc": lorc,
    "palu-m": palu_m,
    "palu-g": palu_g,
    "palu-j": palu_j,
    "fast": fast,
    "swift": swift,
    "lean": lean,
    "small": small,
}


def get(name: str) -> Recipe:
    """The recipe called `name`. Raises ValueError for an unknown one."""
    if name == "palu":
        name = "palu-g"  # the paper's default granularity
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; recipes: {', '.join(RECIPES)}")
    return RECIPES[name]()
