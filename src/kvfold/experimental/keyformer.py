"""Keyformer (Adnan et al. 2024): attention with Gumbel noise and a temperature that rises during
generation. Experimental, because no kernel writes the attention weights that it needs.

Shapes: B sequences, Hq query heads, n queries, T entry slots.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.cache.eviction.scorers.attention import Attention
from kvfold.ops.noise.reference import gumbel_of, splitmix


@dataclass(frozen=True, kw_only=True)
class Keyformer(Attention):
    """softmax((s + G) / tau) of the scores s of the observed queries. G is standard Gumbel noise;
    tau is 1 in the prompt and 1 + `heat` t at the t-th generated token (§3).

    The noise depends only on layer, query head and the positions of query and key, so chunked
    prefill, batching and recomputation do not change it.
    """

    needs_weights: ClassVar[bool] = True

    heat: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heat < 0:
            raise ValueError(f"heat must be at least 0, got {self.heat}; 0 leaves tau at 1")

    def contribution(
        self, weights: Tensor, keys: Tensor, queries: Tensor, generated: Tensor, layer: int
    ) -> Tensor:
        """As in Attention. log p replaces s: they differ by a constant per query, which softmax
        ignores."""
        heads = torch.arange(weights.shape[1], device=weights.device)
        streams = splitmix(heads + (layer << 32), queries[:, None, :].mT.long())  # [B, n, Hq]
        keys = keys.repeat_interleave(weights.shape[1] // keys.shape[1], 1).long()
        noise = gumbel_of(splitmix(streams.mT[..., None], keys[:, :, None]))
        tau = 1 + self.heat * generated.float()[:, None, :, None]
        return ((weights.float().log() + noise) / tau).softmax(-1) ** self.power
