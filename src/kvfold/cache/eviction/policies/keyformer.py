"""The Keyformer policy: attention with Gumbel noise and a temperature that rises during generation.

Shapes: B sequences, Hq query heads, n queries, T row slots.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.cache.eviction.attention import AttentionPolicy
from kvfold.ops.noise.reference import gumbel_of, splitmix


@dataclass(frozen=True, kw_only=True)
class Keyformer(AttentionPolicy):
    """A query adds softmax((s + G) / tau) of its scores s to the metrics. G is standard Gumbel
    noise; tau is 1 in the prompt and 1 + `heat` t at the t-th generated token.

    The noise depends only on layer, query head and the positions of query and key, so chunked
    prefill, batching and recomputation do not change it.
    """

    reweighs: ClassVar[bool] = True

    heat: float = 0.01
    layer: int = 0  # the layer whose queries are observed

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heat < 0:
            raise ValueError(f"heat must be at least 0, got {self.heat}; 0 leaves tau at 1")

    def of_layer(self, layer: int) -> "Keyformer":
        return replace(self, layer=layer)

    def worth(self, weights: Tensor, keys: Tensor, queries: Tensor, generated: Tensor) -> Tensor:
        """As in AttentionPolicy. log p replaces s: they differ by a constant per query, which
        softmax ignores."""
        heads = torch.arange(weights.shape[1], device=weights.device)
        streams = splitmix(heads + (self.layer << 32), queries[:, None, :].mT.long())  # [B, n, Hq]
        keys = keys.repeat_interleave(weights.shape[1] // keys.shape[1], 1).long()
        noise = gumbel_of(splitmix(streams.mT[..., None], keys[:, :, None]))
        tau = 1 + self.heat * generated.float()[:, None, :, None]
        return ((weights.float().log() + noise) / tau).softmax(-1) ** self.power


def keyformer() -> Keyformer:
    """Keyformer (Adnan et al. 2024, §3): prompt and generated queries count; three tenths of the
    budget are reserved for the last tokens, as in its released scripts."""
    return Keyformer(name="keyformer", recent_share=0.3, continual=True)
