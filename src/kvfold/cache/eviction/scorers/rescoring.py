"""Score an entry in a re-scoring pass: the model reads the context a second time, and an entry is
scored by the attention that it receives then.

Shapes: B sequences, Hq query heads, Hk KV heads, n tokens of the re-scoring pass, T entries, those
of the pass last; G groups.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvfold.cache.eviction.base import EntriesView, Need, Scorer
from kvfold.cache.eviction.policy import Policy, check_tokens
from kvfold.cache.eviction.scorers.keys import key_difference
from kvfold.ops.common.attention import capped

LEAST = 1e-30  # smallest metric of a scored entry; 0 means that it was not scored


@dataclass(frozen=True, kw_only=True)
class Rescoring(Scorer):
    """The maximum attention that the entry receives while its context is read again.

    KVzip §3. The context is fed again in segments of `chunk` tokens, each after an instruction to
    repeat it: `prompt` for the first segment, for others `follow` and the last `lead` tokens of the
    previous segment; then the chat template's start of a reply. Queries see the whole cache, but
    the softmax of a score covers only the first tokens (the policy's `sinks`), the entries of the
    segment, and the tokens of the pass so far. Entries that were not scored are not evicted.

    sees_suffix: if False, a re-scoring pass sees the cache only up to the end of its segment. The
        scores of a full segment then depend on nothing after it, and are valid for all requests
        that share the prefix up to there.
    output_weighted: multiply attention by the norm of W_O v over the norm of the querying token's
        hidden states (KVzip+).
    gradient_weighted: a subclass's `gradient_norms` of the querying token times the norm of W_O v
        multiply attention.
    """

    needs = frozenset[Need]({"rescoring"})
    gradient_weighted: ClassVar[bool] = False

    chunk: int = 2048
    lead: int = 8
    sees_suffix: bool = True
    output_weighted: bool = False
    prompt: str = "\n\nRepeat the previous context exactly."
    follow: str = "\n\nRepeat the part of the previous context exactly, starting with"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {self.chunk}")
        check_tokens(self, "lead")

    def score(self, view: EntriesView) -> Tensor:
        return view.metrics.where(view.metrics > 0, torch.inf)

    def gradient_norms(
        self, model: Any, tokens: Tensor, positions: Tensor, context: Any
    ) -> list[Tensor]:
        """A weight of each token of the pass, fp32 [1, n] per layer. model: in plain PyTorch;
        tokens, positions int64 [n]; context: its attention, with gradients."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RescoringAndKeys(Rescoring):
    """The higher of two ranks: by attention in the re-scoring pass, and by the difference of the
    key to the mean key, less `key_rank_penalty`.

    Ranks are in [0, 1), over the entries of all groups of a sequence. `key_rank_penalty` is the
    share of the cache that the first criterion alone decides.
    """

    needs = frozenset[Need]({"rescoring", "keys"})

    key_rank_penalty: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.key_rank_penalty <= 1:
            raise ValueError(
                f"key_rank_penalty must be in [0, 1], got {self.key_rank_penalty}; 1 leaves keys "
                "out"
            )

    def score(self, view: EntriesView) -> Tensor:
        scored = view.valid & (view.metrics > 0)
        difference = view.by_layer(lambda layer: key_difference(view.keys(layer).float()))
        by_attention, by_key = (rank(x, scored) for x in (view.metrics, difference))
        return torch.maximum(by_attention, by_key - self.key_rank_penalty).where(scored, torch.inf)


def as_rescoring(policy: Policy | None) -> Rescoring | None:
    """The policy's scorer if it needs a re-scoring pass, else None."""
    scorer = None if policy is None else policy.scorer
    return scorer if isinstance(scorer, Rescoring) else None


def rank(x: Tensor, scored: Tensor) -> Tensor:
    """Rank of each scored entry of a sequence by ascending x [B, G, T], as a share of their number:
    fp32 [B, G, T] in [0, 1). Undefined where an entry is not scored."""
    count = scored.flatten(1).sum(1, keepdim=True)
    order = x.where(scored, torch.inf).flatten(1).argsort(dim=1, stable=True)
    ranks = torch.arange(order.shape[1], device=x.device).expand_as(order)
    share = ranks / count.clamp(min=1)
    return torch.empty_like(share).scatter_(1, order, share).view_as(x)


def max_attention(
    q: Tensor,
    k: Tensor,
    visible: Tensor,
    scale: float,
    entry_factors: Tensor | None = None,
    query_factors: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The maximum attention weight fp32 [B, Hk, T] that any query of a KV head's query heads gives
    to each entry. The softmax covers the entries that `visible` marks.

    q [B, Hq, n, d], k [B, Hk, T, d], visible bool [B, 1 or Hk, n, T], at least one entry per query;
    entry_factors fp32 [B, Hq, T] and query_factors fp32 [B, n]: factors of the weights.
    """
    maxima = []
    for head in range(k.shape[1]):
        weights = head_attention(head, q, k, visible, scale, softcap)
        if query_factors is not None:
            weights *= query_factors[:, None, :, None]
        if entry_factors is not None:
            weights *= entry_factors.unflatten(1, (k.shape[1], -1))[:, head, :, None]
        maxima.append(weights.amax((1, 2)))
    return torch.stack(maxima, 1)


def head_attention(
    head: int, q: Tensor, k: Tensor, visible: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """Attention fp32 [B, Hq / Hk, n, T] of the query heads of one KV head; other arguments as in
    `max_attention`."""
    queries = q.unflatten(1, (k.shape[1], -1))[:, head]
    scores = capped((queries @ k[:, head, None].mT).float() * scale, softcap)
    mask = visible.expand(-1, k.shape[1], -1, -1)[:, head, None]
    return scores.masked_fill(~mask, -torch.inf).softmax(-1)
