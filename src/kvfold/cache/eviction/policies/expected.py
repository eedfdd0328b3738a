"""Expected Attention: what queries that are yet to come would look at, if they were Gaussian.

Shapes: B sequences, Hq query heads, Hk KV heads, T row slots, W last queries, d numbers of a key.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.cache.eviction.base import Need, Policy, RowsView


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Policy):
    """A row's share of E exp(q k), of Gaussian queries as the last `window` ones are, averaged over
    a KV head's query heads, plus `epsilon`, times the value's norm."""

    needs = frozenset[Need]({"keys", "values", "queries"})

    epsilon: float = 0.01

    def score(self, view: RowsView) -> Tensor:
        return view.by_layer(lambda layer: self._of(layer, view))

    def _of(self, layer: int, view: RowsView) -> Tensor:
        """[B, Hk, T]."""
        k, (q, asked) = view.keys(layer).float(), view.queries(layer)
        scored = (k != 0).any(-1) & self._later(layer, view)
        queries, there = q.float().unflatten(1, (k.shape[1], -1)), asked >= 0
        found = [
            expected(queries[:, head], k[:, head], there, scored[:, head], view.scale)
            for head in range(k.shape[1])
        ]
        return (torch.stack(found, 1) + self.epsilon) * view.values(layer).float().norm(dim=-1)

    def _later(self, layer: int, view: RowsView) -> Tensor:
        """bool [B, Hk, T]: rows behind the sinks, which take part in nothing."""
        first = sum(map(len, view.layers[:layer]))
        group = {head: first + i for i, x in enumerate(view.layers[layer]) for head in x}
        return (view.positions >= self.sinks)[:, [group[head] for head in sorted(group)]]

    def protected_recent(self, tokens: int) -> int:
        """None for being young: nobody's attention is waited for."""
        return max(self.recent, int(tokens * self.recent_share))


def expected(q: Tensor, k: Tensor, asked: Tensor, scored: Tensor, scale: float) -> Tensor:
    """Softmax over the scored rows of log E exp(q k) = mean + variance / 2, mean over query heads:
    [B, T]. q [B, Hq / Hk, W, d], k [B, T, d], asked bool [B, W], scored bool [B, T]."""
    s = (q @ k[:, None].mT * scale).double()
    weight = asked[:, None, :, None] / asked.sum(1).clamp(min=1)[:, None, None, None]
    mean = (s * weight).sum(2, keepdim=True)
    spread = ((s - mean).square() * weight).sum(2)
    logits = (mean[:, :, 0] + spread / 2).masked_fill(~scored[:, None], -torch.inf)
    return logits.softmax(-1).nan_to_num().mean(1).float()


def expected_attention() -> ExpectedAttention:
    """Expected Attention (Devoto et al. 2025, arXiv 2510.00636) with Ada-KV's budgets, of the last
    32 queries as they were turned; there of all before RoPE, turned by the mean of the next 512
    positions."""
    return ExpectedAttention(
        name="expected-attention", window=32, scope="layer", floor=0.2, sinks=4
    )
