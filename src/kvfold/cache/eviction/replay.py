"""Eviction policies with a re-scoring pass: the model reads the context a second time, and a row is
scored by the attention that it receives then.

Shapes: B sequences, Hq query heads, Hk KV heads, n tokens of the re-scoring pass, T rows, those of
the pass last; G groups of a layer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.cache.eviction.base import Need, Policy, RowsView
from kvfold.ops.common.attention import capped

LEAST = 1e-30  # smallest metric of a scored row; 0 means that it was not scored


@dataclass(frozen=True, kw_only=True)
class ReplayPolicy(Policy):
    """Score a row by the maximum attention that it receives while its context is read again (KVzip,
    §3).

    The context is fed again in segments of `chunk` tokens, each after an instruction to repeat it:
    `prompt` for the first segment, for others `follow` and the last `lead` tokens of the previous
    segment; then the chat template's start of a reply. Queries see the whole cache, but the softmax
    of a score covers only the first tokens (`sinks`), the rows of the segment, and the tokens of
    the pass so far. Rows that were not scored are not evicted.

    whole: if False, a re-scoring pass sees the cache only up to the end of its segment. The scores
        of a full segment then depend on nothing after it, and are valid for all requests that share
        the prefix up to there.
    by_output: multiply attention by the norm of W_O v over the norm of the querying token's hidden
        states (KVzip+).
    by_gradient: multiply attention by the norm of W_O v times the norm of the gradient of the last
        hidden states by the layer's attention output (KVgrad).
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
    visible: Tensor,
    scale: float,
    of_rows: Tensor | None = None,
    of_queries: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The maximum attention weight fp32 [B, Hk, T] that any query of a KV head's query heads gives
    to each row. The softmax covers the rows that `visible` marks.

    q [B, Hq, n, d], k [B, Hk, T, d], visible bool [B, 1 or Hk, n, T], at least one row per query;
    of_rows fp32 [B, Hq, T] and of_queries fp32 [B, n]: factors of the weights.
    """
    maxima = []
    for head in range(k.shape[1]):
        weights = attention_of(head, q, k, visible, scale, softcap)
        if of_queries is not None:
            weights *= of_queries[:, None, :, None]
        if of_rows is not None:
            weights *= of_rows.unflatten(1, (k.shape[1], -1))[:, head, :, None]
        maxima.append(weights.amax((1, 2)))
    return torch.stack(maxima, 1)


def attention_of(
    head: int, q: Tensor, k: Tensor, visible: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """Attention fp32 [B, Hq / Hk, n, T] of the query heads of one KV head; other arguments as in
    `reconstruction`."""
    queries = q.unflatten(1, (k.shape[1], -1))[:, head]
    scores = capped((queries @ k[:, head, None].mT).float() * scale, softcap)
    rows = visible.expand(-1, k.shape[1], -1, -1)[:, head, None]
    return scores.masked_fill(~rows, -torch.inf).softmax(-1)
