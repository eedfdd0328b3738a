"""Policies that look at the attention which a prompt's tokens pay each other within short chunks,
whoever came first.

Shapes: B sequences, Hq query heads, Hk KV heads, T rows, G groups.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.cache.eviction.base import Need, Policy


@dataclass(frozen=True, kw_only=True)
class LocalPolicy(Policy):
    """Metrics are `local_attention` of chunks of `chunk` tokens, which an engine prefills together;
    a generated row has none, which is 0."""

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
    """Attention fp32 [B, Hk, T] that each row gets from the tokens of its own chunk, the later ones
    too, summed over them and averaged over a KV head's query heads.

    q [B, Hq, T, d], k [B, Hk, T, d] of the same tokens. Scores are not scaled down, as in
    Compactor: a row counts where it is by far the best match of some token.
    """
    grouped = q.unflatten(1, (k.shape[1], -1))
    found = []
    for own, keys in zip(grouped.split(chunk, 3), k.split(chunk, 2), strict=True):
        scores = (own @ keys[:, :, None].mT).float()
        found.append(scores.softmax(-1).mean(2).sum(2))
    return torch.cat(found, 2)
