"""A rank method: how many dimensions each latent keeps.

Every method is a *priority* for each dimension of each latent, falling within a latent; `allocate`
spends the budget on the highest.
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
    """One latent of a layer that can keep 0..width dimensions of its basis.

    score: the rank method's own of this latent, 1 where it has none. skip: never compressed, all
    its `numbers` stay.
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
        """Numbers it stands for."""
        return len(self.basis.mean)

    @property
    def singular(self) -> Tensor:
        """The basis's spectrum [width], descending."""
        return self.basis.singular.cpu()

    @property
    def loss(self) -> Tensor:
        """Predicted cost of dropping each dimension [width]."""
        return self.basis.loss.cpu()


Candidates = Sequence[LatentCandidate]


class RankMethod(ABC):
    """A way to spend a budget, for one recipe.

    settings: fields of a Recipe that this method alone reads.
    """

    settings: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def needs(self) -> set[str]:
        """Names of the statistics (QUANTITIES) that `scores` reads."""
        return set()

    def scores(self, candidates: Candidates, sources: Iterable[Source]) -> list[float]:
        """Of every candidate, from its layer's weights and statistics; sources: layers in order."""
        return [candidate.score for candidate in candidates]

    def stays_whole(self, layer: int, score: float) -> bool:
        """Whether a layer's latent with this score is skipped."""
        return layer in self.recipe.skip_layers

    @abstractmethod
    def priorities(self, candidates: Candidates, budget: int) -> list[Tensor]:
        """Of every dimension of every candidate [width]; budget: numbers a token, all layers."""

    def of_block(self, priorities: Tensor) -> Tensor:
        """Of adjacent dimensions that are kept or dropped together."""
        return priorities.mean()
