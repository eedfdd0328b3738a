"""Policies that look at keys alone, whoever asks for them.

Shapes: B sequences, Hk KV heads, T row slots, d numbers of a key; zeros where there is no row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from kvfold.cache.eviction.base import Need, Policy, RowsView

RIDGE = 0.01
# Recent rows stay because further text needs them, of which keys say nothing; docs/quality.md has
# what that measures. None of these methods is published with such rows, but Compactor with 4.
SINKS = 4


@dataclass(frozen=True, kw_only=True)
class KeyPolicy(Policy):
    """A row is worth `measure` of its layer's keys: [B, Hk, T, d] -> [B, Hk, T]."""

    needs = frozenset[Need]({"keys"})

    measure: Callable[[Tensor], Tensor]

    def score(self, view: RowsView) -> Tensor:
        return view.by_layer(lambda layer: self.measure(view.keys(layer).float()))


def unlike_others(k: Tensor) -> Tensor:
    """1 - cos of the angle to the sum of all normalised keys."""
    unit = F.normalize(k, dim=-1)
    return 1 - F.cosine_similarity(unit, unit.sum(2, keepdim=True), dim=-1)


def shortness(k: Tensor) -> Tensor:
    return -torch.linalg.vector_norm(k, dim=-1)


def leverage_of(k: Tensor) -> Tensor:
    """x^T (X^T X + RIDGE I)^-1 x of every key, X the keys less their mean: how far it is from what
    others span."""
    there = (k != 0).any(-1, keepdim=True)
    mean = k.sum(2, keepdim=True) / there.sum(2, keepdim=True).clamp(min=1)
    x = (k - mean) * there
    gram = x.mT @ x + RIDGE * torch.eye(k.shape[-1], device=k.device)
    return (x * torch.linalg.solve(gram, x.mT).mT).sum(-1)


def keydiff() -> KeyPolicy:
    """KeyDiff (Park et al. 2025, §3): keys least like the mean of all, every group alike."""
    return KeyPolicy(name="keydiff", measure=unlike_others, sinks=SINKS, recent_share=0.25)


def keydiff_all() -> KeyPolicy:
    """KeyDiff, for whose rows all groups of all layers compete."""
    return replace(keydiff(), name="keydiff-all", scope="all")


def knorm() -> KeyPolicy:
    """Keys of the smallest norm stay (Devoto et al. 2024, §3), every group alike."""
    return KeyPolicy(name="knorm", measure=shortness, sinks=SINKS, recent_share=0.25)


def leverage() -> KeyPolicy:
    """The leverage of Compactor (Chari and Van Durme 2025) without its attention, of keys as they
    are scored; all groups of all layers compete."""
    return KeyPolicy(name="leverage", measure=leverage_of, scope="all", sinks=8, recent_share=0.125)
