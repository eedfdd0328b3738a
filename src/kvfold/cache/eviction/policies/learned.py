"""The learned policy: a linear map of a token's hidden states predicts its score in a re-scoring
pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.cache.eviction.base import Need, Policy, RowsView


@dataclass(frozen=True, kw_only=True)
class Learned(Policy):
    """The metric of a row is predicted when the row is stored, for prompt and generated tokens
    alike."""

    needs = frozenset[Need]({"learned"})

    def score(self, view: RowsView) -> Tensor:
        return view.metrics.where(view.metrics > 0, torch.inf)


def learned() -> Learned:
    """After KVzap (Jégou and Jeblick 2026, arXiv 2601.07891), its linear variant, but with a budget
    instead of a threshold and fewer recent rows."""
    return Learned(name="learned", scope="all", sinks=4, recent_share=0.125)
