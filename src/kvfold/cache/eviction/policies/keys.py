"""Eviction policies that score a token by its key alone, without queries.

Shapes: B sequences, Hk KV heads, T row slots, d dimension of a key; zeros in empty slots.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from kvfold.cache.eviction.base import Need, Policy, RowsView

RIDGE = 0.01
# These policies also protect recent rows: the next tokens need them, which keys do not show
# (measured in docs/quality.md). Of the published methods only Compactor protects any, 4 of them.
SINKS = 4


@dataclass(frozen=True, kw_only=True)
class KeyPolicy(Policy):
    """Score = `measure` of a layer's keys: [B, Hk, T, d] -> [B, Hk, T]."""

    needs = frozenset[Need]({"keys"})

    measure: Callable[[Tensor], Tensor]

    def score(self, view: RowsView) -> Tensor:
        return view.by_layer(lambda layer: self.measure(view.keys(layer).float()))


def unlike_others(k: Tensor) -> Tensor:
    """1 - cosine similarity to the sum of all normalised keys."""
    unit = F.normalize(k, dim=-1)
    return 1 - F.cosine_similarity(unit, unit.sum(2, keepdim=True), dim=-1)


def shortness(k: Tensor) -> Tensor:
    """Negative norm of the key."""
    return -torch.linalg.vector_norm(k, dim=-1)


def leverage_of(k: Tensor) -> Tensor:
    """Leverage score x^T (X^T X + RIDGE I)^-1 x of each key, where X are the keys minus their mean:
    how far a key is from the span of the others."""
    is_row = (k != 0).any(-1, keepdim=True)
    mean = k.sum(2, keepdim=True) / is_row.sum(2, keepdim=True).clamp(min=1)
    x = (k - mean) * is_row
    gram = x.mT @ x + RIDGE * torch.eye(k.shape[-1], device=k.device)
    return (x * torch.linalg.solve(gram, x.mT).mT).sum(-1)


def keydiff() -> KeyPolicy:
    """KeyDiff (Park et al. 2025, §3): keep keys least similar to the mean key; each group has the
    same budget."""
    return KeyPolicy(name="keydiff", measure=unlike_others, sinks=SINKS, recent_share=0.25)


def keydiff_all() -> KeyPolicy:
    """KeyDiff with all groups of all layers competing."""
    return replace(keydiff(), name="keydiff-all", scope="all")


def knorm() -> KeyPolicy:
    """Keep keys with the smallest norm (Devoto et al. 2024, §3); each group has the same budget."""
    return KeyPolicy(name="knorm", measure=shortness, sinks=SINKS, recent_share=0.25)


def leverage() -> KeyPolicy:
    """The leverage scores of Compactor (Chari and Van Durme 2025) without its attention term, of
    keys after RoPE; all groups of all layers compete."""
    return KeyPolicy(name="leverage", measure=leverage_of, scope="all", sinks=8, recent_share=0.125)
