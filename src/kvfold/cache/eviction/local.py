"""Eviction policies that score a prompt's tokens by the attention within short chunks, without a
causal mask.

Shapes: B sequences, Hq query heads, Hk KV heads, T rows, G groups.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.cache.eviction.base import Need, Policy


@dataclass(frozen=True, kw_only=True)
class LocalPolicy(Policy):
    """The metric of a row is its `local_attention` in chunks of `chunk` tokens, which the engine
    prefills together. Generated rows are not scored: their metric is 0."""

    needs = frozenset[Need]({"local"})

    chunk: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {self.chunk}")

    @property
    def unit(self) -> int:
        return self.chunk


def local_attention(q: Tensor, k: Tensor, chunk: int) -> Tensor:
    """Attention fp32 [B, Hk, T] that each row receives from all tokens of its chunk, summed over
    tokens and averaged over a KV head's query heads.

    q [B, Hq, T, d], k [B, Hk, T, d] of the same tokens. There is no causal mask, and scores are not
    scaled down, as in Compactor: a row counts if it is by far the best match of some token.
    """
    grouped = q.unflatten(1, (k.shape[1], -1))
    masses = []
    for queries, keys in zip(grouped.split(chunk, 3), k.split(chunk, 2), strict=True):
        scores = (queries @ keys[:, :, None].mT).float()
        masses.append(scores.softmax(-1).mean(2).sum(2))
    return torch.cat(masses, 2)
