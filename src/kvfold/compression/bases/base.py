"""The base class of basis builders, and the layer data that they read.

A builder takes a layer's weights and calibration statistics, and returns directions of its keys or
values. Shapes: Hk KV heads, d head dim, K = Hk * d, D model width; n numbers that a latent stands
for.
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
    """What a basis may read of one layer: its weights and its statistics."""

    layer: int
    family: type[Family]
    attention: Any
    geometry: Geometry
    statistics: Statistics

    @cached_property
    def weights(self) -> Projections:
        """The layer's projections in fp64."""
        return self.family.projections(self.attention, self.geometry)

    @cached_property
    def subspace(self) -> Subspace | None:
        """The subspace that the layer's keys and values lie in; None where it is all of 2 K."""
        return subspace(self.family, self.attention, self.geometry)

    def __getitem__(self, name: str) -> Moment:
        """A statistic of this layer. Raises ValueError where it was not measured."""
        return self.statistics[self.layer, name]

    def span(self, heads: tuple[int, ...], side: Side = "k") -> slice:
        """Columns of adjacent heads' keys, or values, among those of all heads."""
        d = self.geometry.head_width(side)
        return slice(heads[0] * d, (heads[-1] + 1) * d)

    def output_gram(self) -> Tensor:
        """Sum over a KV head's query heads of W_O^h^T W_O^h, one block per KV head [K, K]."""
        g = self.geometry
        heads = self.weights.o.unflatten(1, (g.num_kv_heads, g.queries_per_kv, g.head_dim))
        return torch.block_diag(*torch.einsum("ohgd,ohge->hde", heads, heads))


class BasisBuilder(ABC):
    """Builds the basis of each latent, as one recipe asks for. Subclasses set:

    key_shares, value_shares: how many heads may share a latent, as `Recipe.keys` and `.values`.
    after_rope: keys are stored as they are after RoPE, so decode need not reconstruct them.
    makes_maps: `build` reads statistics of attention alone, not `Source.weights`, so the basis also
    serves as maps beside the weights of any model. Recipes of other bases need `fold=True`.
    factors_weights: `build` factors the outputs of W_K, so no norm may follow W_K.
    predicts_loss: a direction's singular^2 / 2 is the predicted increase in cross-entropy
    (nats/token) of dropping it, so that bits can be planned.
    drops_nothing: the basis is meant for keep = 1 only.
    """

    key_shares: ClassVar[tuple[Share, ...]] = ("head", "group", "joint")
    value_shares: ClassVar[tuple[Share, ...]] = ("head", "group", "joint")
    after_rope: ClassVar[bool] = False
    makes_maps: ClassVar[bool] = False
    factors_weights: ClassVar[bool] = False
    predicts_loss: ClassVar[bool] = False
    drops_nothing: ClassVar[bool] = False

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @abstractmethod
    def needs(self) -> set[str]:
        """Names of the statistics (keys of QUANTITIES) that `build` reads."""

    @abstractmethod
    def build(self, source: Source, side: Side, heads: tuple[int, ...]) -> Basis:
        """The basis of one latent of a layer, with all its directions, best first."""

    def key_kind(self, geometry: Geometry) -> KeyKind:
        """How keys are stored: "absorbed" in models without RoPE, else after or before RoPE."""
        if not geometry.rope:
            return "absorbed"
        return "post_rope" if self.after_rope else "pre_rope"

    def head_sets(self, geometry: Geometry) -> list[tuple[Side, tuple[int, ...]]]:
        """Side and heads of every latent of a layer: key latents first, then value latents."""
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
