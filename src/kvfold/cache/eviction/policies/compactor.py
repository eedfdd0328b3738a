"""The Compactor policy: leverage scores of keys plus local attention.

Shapes: B sequences, Hk KV heads, G groups, T row slots, d dimension of a key.
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
    """Score = `weight` * leverage of the key in a random projection to `rank` dimensions +
    (attention within a chunk * norm of the value), averaged over `pool` neighbours. Both terms are
    standardised within a layer. Generated rows are not evicted."""

    needs = frozenset[Need]({"local", "keys", "values"})

    weight: float = 1.0
    rank: int = 48
    pool: int = 3

    def score(self, view: RowsView) -> Tensor:
        norms = view.by_layer(lambda i: torch.linalg.vector_norm(view.values(i).float(), dim=-1))
        scored = view.valid & (view.metrics > 0)
        attended = mean_pool(view.metrics * norms, view.positions, scored, self.pool, view.in_order)
        layer_scores, first = [], 0
        for layer, groups in enumerate(view.layers):
            in_layer = slice(first, first := first + len(groups))
            leverage = by_group(leverage_of(self._projected(view.keys(layer).float())), groups)
            terms = (standard(x, scored[:, in_layer]) for x in (leverage, attended[:, in_layer]))
            layer_scores.append(self.weight * next(terms) + next(terms))
        return torch.cat(layer_scores, 1).where(scored, torch.inf)

    def _projected(self, k: Tensor) -> Tensor:
        """Random projection of k, [B, Hk, T, d] -> [B, Hk, T, rank]; the same for all layers and
        calls."""
        generator = torch.Generator().manual_seed(0)
        onto = torch.randn(k.shape[-1], self.rank, generator=generator) / self.rank**0.5
        return k @ onto.to(k.device)


def standard(x: Tensor, scored: Tensor) -> Tensor:
    """Standardise x [B, G, T]: subtract the mean over the scored rows of a sequence, divide by
    their standard deviation. Sums are fp64, so that padding in a batch with longer sequences does
    not change the rounding."""
    count = scored.sum((1, 2), keepdim=True).clamp(min=1)
    known = x.where(scored, 0.0).double()
    centred = (known - known.sum((1, 2), keepdim=True) / count).where(scored, 0.0)
    deviation = (centred.square().sum((1, 2), keepdim=True) / count).sqrt()
    return (centred / deviation.clamp(min=1e-6)).float()


def compactor() -> Compactor:
    """Compactor (Chari and Van Durme 2025, §4) with keys after RoPE. Its weight is the share of
    evicted rows; here the weight is fixed, so that the order of rows is the same for any budget."""
    return Compactor(name="compactor", scope="all", sinks=8, recent_share=0.125)
