"""A basis builder: from a layer's weights and statistics to directions of its keys and values.

Shapes: Hk KV heads, d head dim, K = Hk * d, D width; n numbers a latent stands for.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvfold.calibration.statistics import Moment, Statistics
from kvfold.calibration.subspace import Subspace, subspace
from kvfold.compression.basis import Basis
from kvfold.config import Recipe, Share
from kvfold.layout import Geometry, KeyKind, Side
from kvfold.models.adapter import Family, Projections


@dataclass(frozen=True, kw_only=True)
class Source:
    """Everything a basis of one layer may read."""

    layer: int
    family: type[Family]
    attention: Any
    geometry: Geometry
    statistics: Statistics

    @cached_property
    def weights(self) -> Projections:
        return self.family.projections(self.attention, self.geometry)

    @cached_property
    def subspace(self) -> Subspace | None:
        return subspace(self.family, self.attention, self.geometry)

    def __getitem__(self, name: str) -> Moment:
        """A statistic of this layer. Raises ValueError where it was not measured."""
        return self.statistics[self.layer, name]

    def span(self, heads: tuple[int, ...], side: Side = "k") -> slice:
        """Where adjacent heads' keys, or values, are among those of all heads."""
        d = self.geometry.head_width(side)
        return slice(heads[0] * d, (heads[-1] + 1) * d)

    def output_gram(self) -> Tensor:
        """Sum over a KV head's query heads of W_O^h^T W_O^h, one block per KV head [K, K]."""
        g = self.geometry
        heads = self.weights.o.unflatten(1, (g.num_kv_heads, g.queries_per_kv, g.head_dim))
        return torch.block_diag(*torch.einsum("ohgd,ohge->hde", heads, heads))


class BasisBuilder(ABC):
    """A way to choose directions, for one recipe.

    key_shares, value_shares: what a Recipe may say of keys and values. after_rope: keys are
    rotated, then mapped. factors_weights: W_K's outputs are what is factored, so no norm may
    follow. reads_weights: of the projections around attention. predicts_loss: singular^2 / 2 is the
    predicted loss (nats a token), so that bits can be planned. whole: nothing is to be dropped.
    """

    key_shares: ClassVar[tuple[Share, ...]] = ("head", "group", "joint")
    value_shares: ClassVar[tuple[Share, ...]] = ("head", "group", "joint")
    after_rope: ClassVar[bool] = False
    factors_weights: ClassVar[bool] = False
    reads_weights: ClassVar[bool] = False
    predicts_loss: ClassVar[bool] = False
    whole: ClassVar[bool] = False

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @abstractmethod
    def needs(self) -> set[str]:
        """Names of the statistics (QUANTITIES) that `build` reads."""

    @abstractmethod
    def build(self, source: Source, side: Side, heads: tuple[int, ...]) -> Basis:
        """The basis of one latent of a layer, at full width."""

    def key_kind(self, geometry: Geometry) -> KeyKind:
        if not geometry.rope:
            return "absorbed"
        return "post_rope" if self.after_rope else "pre_rope"

    def head_sets(self, geometry: Geometry) -> list[tuple[Side, tuple[int, ...]]]:
        """Sets of heads that share a latent: key latents first, then value latents."""
        recipe, heads = self.recipe, tuple(range(geometry.num_kv_heads))
        if recipe.keys == "kv":
            return [("kv", heads)]
        size = {"head": 1, "group": min(recipe.group_size, len(heads)), "joint": len(heads)}
        sides: list[tuple[Side, str]] = [("k", recipe.keys), ("v", recipe.values)]
        return [
            (side, heads[i : i + size[share]])
            for side, share in sides
            for i in range(0, len(heads), size[share])
        ]
