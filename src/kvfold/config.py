"""Recipes and run settings as frozen dataclasses; the CLI is generated from them."""

from dataclasses import dataclass
from typing import Literal

BasisName = Literal["zack", "lorc", "palu", "latent", "post"]
Share = Literal["head", "group", "joint", "kv"]
RankName = Literal["uniform", "energy", "fisher", "condition", "greedy"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a cache is compressed along its dimensions.

    basis: which directions (see compress.basis). keys, values: how many heads share a latent: one
    (`head`), `group_size` (`group`), all (`joint`), or all heads' keys and values together (`kv`,
    set on both). ranks: how the budget is spent (see compress.allocate). gradients: weigh errors
    by the loss's gradient. reduce: prune and cluster rows before the SVD (ZDC §5.1).
    skip_threshold: layers whose cumulative condition number is above it stay whole (LoRC §6.2).
    """

    name: str
    basis: BasisName
    keys: Share = "head"
    values: Share = "head"
    ranks: RankName = "greedy"
    group_size: int = 4
    gradients: bool = False
    reduce: bool = False
    skip_threshold: float | None = None

    def __post_init__(self) -> None:
        if (self.keys == "kv") != (self.values == "kv"):
            raise ValueError("keys='kv' and values='kv' go together: one latent serves both")
        if self.keys == "kv" and self.basis != "latent":
            raise ValueError(f"only basis 'latent' shares keys and values, not {self.basis!r}")
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")
