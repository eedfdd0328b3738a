"""The base class of rank methods, which say how many dimensions each latent keeps.

A method gives every dimension of every latent a priority, falling within a latent. `allocate`
spends the budget on the highest priorities. Plans of bits (`planning.bit_allocation`) use the
method's `scores` and `stays_whole` alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfold.compression.bases.base import Source
from kvfold.compression.basis import Basis
from kvfold.config import Recipe
from kvfold.layout import Side


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentCandidate:
    """One latent of a layer, which can keep 0 to `width` dimensions of its basis.

    score: what the rank method measured of it, else 1. skip: it stays uncompressed.
    """

    layer: int
    side: Side
    heads: tuple[int, ...]
    basis: Basis
    score: float = 1.0
    skip: bool = False

    @property
    def width(self) -> int:
        return self.basis.width

    @property
    def numbers(self) -> int:
        """Numbers of a token that it stands for, n."""
        return len(self.basis.mean)

    @property
    def singular(self) -> Tensor:
        """Singular values of the basis [width], descending, on the CPU."""
        return self.basis.singular.cpu()

    @property
    def loss(self) -> Tensor:
        """Predicted loss of dropping each dimension [width], on the CPU."""
        return self.basis.loss.cpu()


Candidates = Sequence[LatentCandidate]


class RankMethod(ABC):
    """A way to spend a budget of numbers, for one recipe.

    settings: fields of `Recipe` that only this method reads; other methods refuse them.
    """

    settings: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def needs(self) -> set[str]:
        """Names of the statistics (keys of QUANTITIES) that `scores` reads."""
        return set()

    def scores(self, candidates: Candidates, sources: Iterable[Source]) -> list[float]:
        """A score of every candidate, from the weights and statistics of its layer.

        sources: one per layer, in order.
        """
        return [candidate.score for candidate in candidates]

    def stays_whole(self, layer: int, num_layers: int, score: float) -> bool:
        """Whether a latent with this score, of one of the model's layers, stays uncompressed."""
        return layer in self.recipe.skip_layers

    @abstractmethod
    def priorities(self, candidates: Candidates, budget: int) -> list[Tensor]:
        """Priorities [width] of every candidate's dimensions. budget: numbers per token, of all
        layers together."""

    def of_block(self, priorities: Tensor) -> Tensor:
        """The priority of adjacent dimensions that are kept or dropped together."""
        return priorities.mean()
