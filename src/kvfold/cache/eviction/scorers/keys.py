"""Score an entry by its key alone, without queries.

Shapes: B sequences, Hk KV heads, T entry slots, d dimension of a key; zeros in empty slots.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvfold.cache.eviction.base import EntriesView, Need, Scorer

RIDGE = 0.01


@dataclass(frozen=True, kw_only=True)
class KeyScorer(Scorer):
    """Score = `measure` of a layer's keys."""

    needs = frozenset[Need]({"keys"})

    @abstractmethod
    def measure(self, k: Tensor) -> Tensor:
        """fp32 [B, Hk, T, d] -> [B, Hk, T]."""

    def score(self, view: EntriesView) -> Tensor:
        return view.by_layer(lambda layer: self.measure(view.keys(layer).float()))


class KeyDifference(KeyScorer):
    """1 - cosine similarity of the key to the sum of all normalised keys."""

    def measure(self, k: Tensor) -> Tensor:
        return key_difference(k)


class KeyNorm(KeyScorer):
    """Minus the norm of the key."""

    def measure(self, k: Tensor) -> Tensor:
        return -torch.linalg.vector_norm(k, dim=-1)


class Leverage(KeyScorer):
    """Leverage x^T (X^T X + .01 I)^-1 x of the key, where X are the keys minus their mean: how far
    it is from the span of the others."""

    def measure(self, k: Tensor) -> Tensor:
        return leverage(k)


def key_difference(k: Tensor) -> Tensor:
    """1 - cosine similarity of each key to the sum of all normalised keys."""
    unit = F.normalize(k, dim=-1)
    return 1 - F.cosine_similarity(unit, unit.sum(2, keepdim=True), dim=-1)


def leverage(k: Tensor) -> Tensor:
    """Leverage x^T (X^T X + RIDGE I)^-1 x of each key."""
    is_entry = (k != 0).any(-1, keepdim=True)
    mean = k.sum(2, keepdim=True) / is_entry.sum(2, keepdim=True).clamp(min=1)
    x = (k - mean) * is_entry
    gram = x.mT @ x + RIDGE * torch.eye(k.shape[-1], device=k.device)
    return (x * torch.linalg.solve(gram, x.mT).mT).sum(-1)
