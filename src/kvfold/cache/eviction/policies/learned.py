"""What a second reading would make of a row, guessed from the token's hidden states."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.cache.eviction.base import Need, Policy, RowsView


@dataclass(frozen=True, kw_only=True)
class Learned(Policy):
    """Rows are scored as they are stored, prompts' and generated ones alike."""

    needs = frozenset[Need]({"learned"})

    def score(self, view: RowsView) -> Tensor:
        return view.metrics.where(view.metrics > 0, torch.inf)


def learned() -> Learned:
    """After KVzap (Jégou and Jeblick 2026, arXiv 2601.07891), its linear kind: to a budget where
    that has a threshold, with fewer recent rows."""
    return Learned(name="learned", scope="all", sinks=4, recent_share=0.125)
