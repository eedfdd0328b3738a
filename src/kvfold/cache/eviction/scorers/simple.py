"""Scorers that need no attention of the prompt: age, chance, and scores that a model has learned.

Shapes: B sequences, G groups, T entry slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvfold.cache.eviction.base import EntriesView, Need, Scorer


class Recency(Scorer):
    """The position of the token: the oldest entry is evicted first."""

    def score(self, view: EntriesView) -> Tensor:
        return view.positions.float()


class Random(Scorer):
    """Uniform random numbers: the baseline, which any other scorer has to beat."""

    def score(self, view: EntriesView) -> Tensor:
        """Random numbers per sequence, the same whatever the lengths of the other sequences in the
        batch."""
        num_groups, num_slots = view.valid.shape[1:]
        generator, device = view.generator, view.valid.device
        draws = (torch.rand(num_groups, x, generator=generator, device=device) for x in view.sizes)
        return torch.stack([F.pad(x, (0, num_slots - x.shape[1])) for x in draws])


@dataclass(frozen=True, kw_only=True)
class Learned(Scorer):
    """A linear map of the token's hidden states, which predicts the score of a re-scoring pass when
    the entry is stored, for prompt and generated tokens alike."""

    needs = frozenset[Need]({"learned"})

    def score(self, view: EntriesView) -> Tensor:
        return view.metrics.where(view.metrics > 0, torch.inf)
