"""Policies that read the context once more: a row is worth what a second reading makes of it.

Shapes: B sequences, Hq query heads, Hk KV heads, n replayed tokens, T rows, those of the replay
last; G groups of a layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.cache.eviction.base import Need, Policy, RowsView
from kvfold.ops.common.attention import capped

LEAST = 1e-30  # of a row that was scored: 0 is one that was not


@dataclass(frozen=True, kw_only=True)
class ReplayPolicy(Policy):
    """The most attention that a row gets while its context is read again (KVzip, §3).

    The context is fed again in pieces of `chunk` tokens, each after words that ask for it: `prompt`
    for the first, for others `follow` and the last `lead` tokens of the piece before; then what
    stands before a reply. It sees the whole cache, but a score's softmax covers only the first
    tokens (`sinks`), the piece's own rows, and the reading so far. Rows that no reading scored
    stay. whole: without it a reading sees the cache up to its piece's end alone, as if nothing had
    followed: what a full piece is worth then depends on what came before its end, and serves all
    who begin alike. by_output: attention counts times the norm of what W_O makes of the value, over
    that of the hidden states that ask (KVzip+). by_gradient: or, instead of over that, times the
    norm of the last hidden states' gradient by what the layer's attention adds there (KVgrad).
    """

    needs = frozenset[Need]({"replay"})

    chunk: int = 2048
    lead: int = 8
    whole: bool = True
    by_output: bool = False
    by_gradient: bool = False
    prompt: str = "\n\nRepeat the previous context exactly."
    follow: str = "\n\nRepeat the part of the previous context exactly, starting with"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {self.chunk}")
        self._check_tokens("lead")

    def score(self, view: RowsView) -> Tensor:
        return view.metrics.where(view.metrics > 0, torch.inf)


def reconstruction(
    q: Tensor,
    k: Tensor,
    seen: Tensor,
    scale: float,
    of_rows: Tensor | None = None,
    of_queries: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The largest weight fp32 [B, Hk, T] that any query of any of a KV head's query heads gives to
    each row, of a softmax over the rows that are seen.

    q [B, Hq, n, d], k [B, Hk, T, d], seen bool [B, 1 or Hk, n, T], at least one row a query;
    of_rows fp32 [B, Hq, T] and of_queries fp32 [B, n]: what multiplies weights first.
    """
    found = []
    for head in range(k.shape[1]):
        weights = attention_of(head, q, k, seen, scale, softcap)
        if of_queries is not None:
            weights *= of_queries[:, None, :, None]
        if of_rows is not None:
            weights *= of_rows.unflatten(1, (k.shape[1], -1))[:, head, :, None]
        found.append(weights.amax((1, 2)))
    return torch.stack(found, 1)


def attention_of(
    head: int, q: Tensor, k: Tensor, seen: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """Attention fp32 [B, Hq / Hk, n, T] of the query heads of a KV head; arguments as above."""
    own = q.unflatten(1, (k.shape[1], -1))[:, head]
    scores = capped((own @ k[:, head, None].mT).float() * scale, softcap)
    rows = seen.expand(-1, k.shape[1], -1, -1)[:, head, None]
    return scores.masked_fill(~rows, -torch.inf).softmax(-1)
