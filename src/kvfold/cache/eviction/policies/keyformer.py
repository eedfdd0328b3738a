"""Keyformer: attention with noise, that gets hotter as text is generated.

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
    """A query adds softmax((s + G) / tau) of its scores s, G standard Gumbel noise, tau = 1 in the
    prompt and 1 + `heat` t at the t-th token after it.

    Noise depends on layer, query head and the positions of query and key alone, so that chunks,
    sequences beside it and a second prefill change nothing.
    """

    reweighs: ClassVar[bool] = True

    heat: float = 0.01
    layer: int = 0  # that is observed

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heat < 0:
            raise ValueError(f"heat must be at least 0, got {self.heat}; 0 leaves tau at 1")

    def of_layer(self, layer: int) -> "Keyformer":
        return replace(self, layer=layer)

    def worth(self, weights: Tensor, keys: Tensor, queries: Tensor, generated: Tensor) -> Tensor:
        """log p differs from s by what all keys of a query share, which softmax drops."""
        heads = torch.arange(weights.shape[1], device=weights.device)
        streams = splitmix(heads + (self.layer << 32), queries[:, None, :].mT.long())  # [B, n, Hq]
        keys = keys.repeat_interleave(weights.shape[1] // keys.shape[1], 1).long()
        noise = gumbel_of(splitmix(streams.mT[..., None], keys[:, :, None]))
        tau = 1 + self.heat * generated.float()[:, None, :, None]
        return ((weights.float().log() + noise) / tau).softmax(-1) ** self.power


def keyformer() -> Keyformer:
    """Keyformer (Adnan et al. 2024, §3): over the prompt and what is generated; three tenths of the
    budget are the last tokens, as in its released scripts."""
    return Keyformer(name="keyformer", recent_share=0.3, continual=True)
