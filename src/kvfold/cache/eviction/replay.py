"""Policies that read the context once more: a row is worth what a second reading makes of it.

Shapes: B sequences, Hq query heads, Hk KV heads, n replayed tokens, T rows, those of the replay
last; G groups of a layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.cache.eviction.base import Need, Policy, RowsView

LEAST = 1e-30  # of a row that was scored: 0 is one that was not


@dataclass(frozen=True, kw_only=True)
class ReplayPolicy(Policy):
    """The most attention that a row gets while its context is read again (KVzip, §3).

    The context is fed again in pieces of `chunk` tokens, each after words that ask for it: `prompt`
    for the first, for others `follow` and the last `lead` tokens of the piece before; then what
    stands before a reply. It sees the whole cache, but a score's softmax covers only the first
    tokens (`sinks`), the piece's own rows, and the reading so far. Rows that no reading scored
    stay.
    """

    needs = frozenset[Need]({"replay"})

    chunk: int = 2048
    lead: int = 8
    prompt: str = "\n\nRepeat the previous context exactly."
    follow: str = "\n\nRepeat the part of the previous context exactly, starting with"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {self.chunk}")
        self._check_tokens("lead")

    def score(self, view: RowsView) -> Tensor:
        return view.metrics.where(view.metrics > 0, torch.inf)


def reconstruction(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    """The largest weight fp32 [B, Hk, T] that any query of any of a KV head's query heads gives to
    each row, of a softmax over the rows that are seen.

    q [B, Hq, n, d], k [B, Hk, T, d], seen bool [B, 1 or Hk, n, T], at least one row a query.
    """
    found = []
    for own, keys, rows in zip(
        q.unflatten(1, (k.shape[1], -1)).unbind(1),
        k.unbind(1),
        seen.expand(-1, k.shape[1], -1, -1).unbind(1),
        strict=True,
    ):
        scores = (own @ keys[:, None].mT).float() * scale
        weights = scores.masked_fill(~rows[:, None], -torch.inf).softmax(-1)
        found.append(weights.amax((1, 2)))
    return torch.stack(found, 1)
