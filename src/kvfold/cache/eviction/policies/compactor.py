"""Compactor: how far a key is from what others span, and who looks at it close by.

Shapes: B sequences, Hk KV heads, G groups, T row slots, d numbers of a key.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.cache.eviction.attention import mean_pool
from kvfold.cache.eviction.base import Need, RowsView, by_group
from kvfold.cache.eviction.local import LocalPolicy
from kvfold.cache.eviction.policies.keys import leverage_of


@dataclass(frozen=True, kw_only=True)
class Compactor(LocalPolicy):
    """`weight` times the leverage of keys in a random projection of `rank` numbers, plus the
    attention inside a chunk times the value's norm, averaged over `pool` neighbours; both less
    their mean and over their deviation in the layer. Generated rows stay.
    """

    needs = frozenset[Need]({"local", "keys", "values"})

    weight: float = 1.0
    rank: int = 48
    pool: int = 3

    def score(self, view: RowsView) -> Tensor:
        norms = view.by_layer(lambda i: torch.linalg.vector_norm(view.values(i).float(), dim=-1))
        scored = view.valid & (view.metrics > 0)
        looked = mean_pool(view.metrics * norms, view.positions, scored, self.pool, view.in_order)
        found, first = [], 0
        for layer, groups in enumerate(view.layers):
            own = slice(first, first := first + len(groups))
            apart = by_group(leverage_of(self._projected(view.keys(layer).float())), groups)
            pair = (standard(x, scored[:, own]) for x in (apart, looked[:, own]))
            found.append(self.weight * next(pair) + next(pair))
        return torch.cat(found, 1).where(scored, torch.inf)

    def _projected(self, k: Tensor) -> Tensor:
        """k [B, Hk, T, d] -> [B, Hk, T, rank], the same for all layers and calls."""
        generator = torch.Generator().manual_seed(0)
        onto = torch.randn(k.shape[-1], self.rank, generator=generator) / self.rank**0.5
        return k @ onto.to(k.device)


def standard(x: Tensor, scored: Tensor) -> Tensor:
    """x [B, G, T] less its mean over the scored rows of a sequence, over their deviation. Summed in
    fp64, so that how long sequences beside it are does not round a score up or down."""
    count = scored.sum((1, 2), keepdim=True).clamp(min=1)
    known = x.where(scored, 0.0).double()
    off = (known - known.sum((1, 2), keepdim=True) / count).where(scored, 0.0)
    spread = (off.square().sum((1, 2), keepdim=True) / count).sqrt()
    return (off / spread.clamp(min=1e-6)).float()


def compactor() -> Compactor:
    """Compactor (Chari and Van Durme 2025, §4) of keys as they are scored, after RoPE; the weight,
    there the share of rows that go, is fixed, so that rows keep their order at any budget."""
    return Compactor(name="compactor", scope="all", sinks=8, recent_share=0.125)
