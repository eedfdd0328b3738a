"""Score an entry by the attention that future queries would pay if they were Gaussian.

Shapes: B sequences, Hq query heads, Hk KV heads, T entry slots, W last queries, d dimension of a
key.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.cache.eviction.base import EntriesView, Need, Scorer


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Scorer):
    """(softmax of log E exp(q k) + `epsilon`) * norm of the value. q is Gaussian with the mean and
    variance of the last `window` queries; the softmax is averaged over a KV head's query heads."""

    needs = frozenset[Need]({"keys", "values", "queries"})

    epsilon: float = 0.01

    def score(self, view: EntriesView) -> Tensor:
        return view.by_layer(lambda layer: self._in_layer(layer, view))

    def _in_layer(self, layer: int, view: EntriesView) -> Tensor:
        """Scores [B, Hk, T] of one layer."""
        k, (q, positions) = view.keys(layer).float(), view.queries(layer)
        scored = (k != 0).any(-1) & self._after_sinks(layer, view)
        queries, is_query = q.float().unflatten(1, (k.shape[1], -1)), positions >= 0
        shares = [
            expected(queries[:, head], k[:, head], is_query, scored[:, head], view.scale)
            for head in range(k.shape[1])
        ]
        return (torch.stack(shares, 1) + self.epsilon) * view.values(layer).float().norm(dim=-1)

    def _after_sinks(self, layer: int, view: EntriesView) -> Tensor:
        """Entries after the sinks, which are excluded from the softmax: bool [B, Hk, T]."""
        first = sum(map(len, view.layers[:layer]))
        group = {head: first + i for i, x in enumerate(view.layers[layer]) for head in x}
        return (view.positions >= view.sinks)[:, [group[head] for head in sorted(group)]]

    def num_too_young(self, window: int | None) -> int:
        """None: young tokens have a fair score, because no observed attention is needed."""
        return 0


def expected(q: Tensor, k: Tensor, is_query: Tensor, scored: Tensor, scale: float) -> Tensor:
    """Softmax over the scored entries of log E exp(q k) = mean + variance / 2, averaged over query
    heads: [B, T].

    q [B, Hq / Hk, W, d], k [B, T, d], is_query bool [B, W] (False for padding), scored bool [B, T].
    """
    s = (q @ k[:, None].mT * scale).double()
    weight = is_query[:, None, :, None] / is_query.sum(1).clamp(min=1)[:, None, None, None]
    mean = (s * weight).sum(2, keepdim=True)
    variance = ((s - mean).square() * weight).sum(2)
    logits = (mean[:, :, 0] + variance / 2).masked_fill(~scored[:, None], -torch.inf)
    return logits.softmax(-1).nan_to_num().mean(1).float()
