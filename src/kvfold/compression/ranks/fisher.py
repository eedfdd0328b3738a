"""Rank method `fisher`: in proportion to the Fisher information of W_K and W_V (Palu)."""

from collections.abc import Iterable

import torch
from torch import Tensor

from kvfold.compression.bases.base import Source
from kvfold.compression.ranks.base import Candidates, RankMethod

FLOOR = 32  # Palu's release: ranks in steps of 32, at least one
_FLOOR_PRIORITY = 1e12  # of dimensions below the floor; a layer's best step has infinity


class Fisher(RankMethod):
    """Palu §3.3 and its release: ranks in proportion to Fisher information, from a floor to the
    width.

    A latent's ideal rank is budget f / sum f, with f per element, times the width where widths
    differ. Latents at their full width or at the floor leave more or less to the others, in equal
    parts; so the rank is clamp(ideal + c, floor, width) with one c for all. The priority of
    dimension j is ideal - j, and `allocate` finds c as it spends the budget. In steps this is the
    release's rounding to the nearest multiple, corrected to meet the budget.
    """

    settings = frozenset({"equal_ranks"})

    def needs(self) -> set[str]:
        return {"fisher"}

    def scores(self, candidates: Candidates, sources: Iterable[Source]) -> list[float]:
        """Mean over the elements of W of the latent's heads, or of all heads with equal ranks."""
        by_layer = [source["fisher"].raw() for source in sources]
        scores = []
        for c in candidates:
            all_heads = by_layer[c.layer][:, 0 if c.side == "k" else 1]
            heads = all_heads if self.recipe.equal_ranks else all_heads[list(c.heads)]
            scores.append(float(heads.mean()))
        return scores

    def priorities(self, candidates: Candidates, budget: int) -> list[Tensor]:
        free = [c for c in candidates if not c.skip]
        budget -= sum(c.numbers for c in candidates if c.skip)
        share = budget / max(1, sum(c.width for c in free))
        mean = sum(c.score * c.width for c in free) / max(1, sum(c.width for c in free))
        widest = max(c.width for c in candidates)
        priorities = []
        for c in candidates:
            ideal = share * c.width * (c.score / mean if mean > 0 else 1.0)
            priority = widest + ideal - torch.arange(c.width).double()
            priority[: _floor(c.width, share)] += _FLOOR_PRIORITY
            priorities.append(priority)
        return priorities


def _floor(width: int, share: float) -> int:
    """Fewest dimensions of a latent: FLOOR, but at most a quarter of its width, and at most what
    the budget allows in every latent."""
    return int(min(FLOOR, width / 4, width * share))
