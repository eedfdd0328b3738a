"""Palu's ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor

from kvfold.compression.bases.base import Source
from kvfold.compression.ranks.base import Candidates, RankMethod

FLOOR = 32  # Palu's release: ranks in steps of 32, at least one
_BEFORE_ALL = 1e12  # priority of what a latent never goes without; still below a layer's only step


class Fisher(RankMethod):
    """Palu §3.3 and its release: ranks in proportion to Fisher information, from a floor to width.

    A latent's ideal rank is budget f / sum f (f per element, times its width where widths differ).
    What a full width leaves over goes to the others in equal parts, and what floors take is taken
    from them alike, so that the rank is clamp(ideal + c, floor, width) with one c for all: the
    priority of dimension j is ideal - j, and `allocate` finds c as it spends the budget. In steps
    that is the release's rounding to the nearest multiple, repaired to the budget.
    """

    settings = frozenset({"equal_ranks"})

    def needs(self) -> set[str]:
        return {"fisher"}

    def scores(self, candidates: Candidates, sources: Iterable[Source]) -> list[float]:
        """Mean over the latent's elements of W, or with equal ranks over all of the layer's."""
        by_layer = [source["fisher"].raw() for source in sources]
        found = []
        for c in candidates:
            heads = by_layer[c.layer][:, 0 if c.side == "k" else 1]
            own = heads if self.recipe.equal_ranks else heads[list(c.heads)]
            found.append(float(own.mean()))
        return found

    def priorities(self, candidates: Candidates, budget: int) -> list[Tensor]:
        free = [c for c in candidates if not c.skip]
        budget -= sum(c.numbers for c in candidates if c.skip)
        share = budget / max(1, sum(c.width for c in free))
        mean = sum(c.score * c.width for c in free) / max(1, sum(c.width for c in free))
        widest = max(c.width for c in candidates)
        found = []
        for c in candidates:
            ideal = share * c.width * (c.score / mean if mean > 0 else 1.0)
            priority = widest + ideal - torch.arange(c.width).double()
            priority[: _floor(c.width, share)] += _BEFORE_ALL
            found.append(priority)
        return found


def _floor(width: int, share: float) -> int:
    """Fewest dimensions of a latent: FLOOR, or a quarter of a narrow one's, as far as the budget
    pays for that everywhere."""
    return int(min(FLOOR, width / 4, width * share))
