"""Score a prompt's entries by the attention within short chunks, without a causal mask; Compactor
adds the leverage of keys.

Shapes: B sequences, Hq query heads, Hk KV heads, G groups, T entry slots, d dimension of a key.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.cache.eviction.base import EntriesView, Need, Scorer, by_group
from kvfold.cache.eviction.scorers.attention import mean_pool
from kvfold.cache.eviction.scorers.keys import leverage


@dataclass(frozen=True, kw_only=True)
class Local(Scorer):
    """The metric of an entry is its `local_attention` in chunks of `chunk` tokens, which the engine
    prefills together. Entries of generated tokens are not scored: their metric is 0."""

    needs = frozenset[Need]({"local"})

    chunk: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {self.chunk}")

    @property
    def prefill_multiple(self) -> int:
        return self.chunk


@dataclass(frozen=True, kw_only=True)
class Compactor(Local):
    """`weight` * leverage of the key in a random projection to `rank` dimensions + (attention
    within a chunk * norm of the value), averaged over `pool` neighbours. Both terms are
    standardised within a layer. Generated entries are not evicted."""

    needs = frozenset[Need]({"local", "keys", "values"})

    weight: float = 1.0
    rank: int = 48
    pool: int = 3

    def score(self, view: EntriesView) -> Tensor:
        norms = view.by_layer(lambda i: torch.linalg.vector_norm(view.values(i).float(), dim=-1))
        scored = view.valid & (view.metrics > 0)
        attended = mean_pool(view.metrics * norms, view.positions, scored, self.pool, view.in_order)
        layer_scores, first = [], 0
        for layer, groups in enumerate(view.layers):
            in_layer = slice(first, first := first + len(groups))
            by_leverage = by_group(leverage(self._projected(view.keys(layer).float())), groups)
            terms = (standard(x, scored[:, in_layer]) for x in (by_leverage, attended[:, in_layer]))
            layer_scores.append(self.weight * next(terms) + next(terms))
        return torch.cat(layer_scores, 1).where(scored, torch.inf)

    def _projected(self, k: Tensor) -> Tensor:
        """Random projection of k, [B, Hk, T, d] -> [B, Hk, T, rank]; the same for all layers and
        calls."""
        generator = torch.Generator().manual_seed(0)
        onto = torch.randn(k.shape[-1], self.rank, generator=generator) / self.rank**0.5
        return k @ onto.to(k.device)


def local_attention(q: Tensor, k: Tensor, chunk: int) -> Tensor:
    """Attention fp32 [B, Hk, T] that each entry receives from all tokens of its chunk, summed over
    tokens and averaged over a KV head's query heads.

    q [B, Hq, T, d], k [B, Hk, T, d] of the same tokens. There is no causal mask, and scores are not
    scaled down, as in Compactor: an entry counts if it is by far the best match of some token.
    """
    grouped = q.unflatten(1, (k.shape[1], -1))
    sums = []
    for queries, keys in zip(grouped.split(chunk, 3), k.split(chunk, 2), strict=True):
        scores = (queries @ keys[:, :, None].mT).float()
        sums.append(scores.softmax(-1).mean(2).sum(2))
    return torch.cat(sums, 2)


def standard(x: Tensor, scored: Tensor) -> Tensor:
    """Standardise x [B, G, T]: subtract the mean over the scored entries of a sequence, divide by
    their standard deviation. Sums are fp64, so that padding in a batch with longer sequences does
    not change the rounding."""
    count = scored.sum((1, 2), keepdim=True).clamp(min=1)
    known = x.where(scored, 0.0).double()
    centred = (known - known.sum((1, 2), keepdim=True) / count).where(scored, 0.0)
    deviation = (centred.square().sum((1, 2), keepdim=True) / count).sqrt()
    return (centred / deviation.clamp(min=1e-6)).float()
