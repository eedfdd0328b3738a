"""transformers caches that round entries to the bits that pages will store, for training.

Every entry is quantised by itself, so a whole window passes at once. Gradients pass the quantiser
unchanged (straight-through, Bengio et al. 2013). Shapes: B windows, T tokens, R numbers of an entry
(one token in one layer).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvfold.layout import LayerSpec, Tiers
from kvfold.layout.formats.integers import SCALES_IN, dequantize, quantize, scale_of
from kvfold.ops.common.rotation import rotation


class RoundedCache(DynamicCache):
    """A cache that stores entries rounded as pages would store them."""

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        super().__init__()
        self.specs = layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Store entries [B, 1, T, R], which a folded model passes as keys."""
        rows = round_to_bits(key_states, self.specs[layer_idx])
        return super().update(rows, value_states, layer_idx, *rest, **named)


class RoundOnlyCache(RoundedCache):
    """A cache that stores nothing, and returns the rounded entries."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return round_to_bits(key_states, self.specs[layer_idx]), value_states


def round_to_bits(rows: Tensor, spec: LayerSpec) -> Tensor:
    """Entries [.., R] after quantisation to their planned tiers. Latents without planned bits stay
    as they are."""
    planned = [(latent.rank, latent.tiers) for latent in spec.latents]
    if not any(tiers for _, tiers in planned):
        return rows
    parts = rows.split([rank for rank, _ in planned], -1)
    coded = [_coded(x, tiers or ()) for x, (_, tiers) in zip(parts, planned, strict=True)]
    return torch.cat(coded, -1)


def _coded(x: Tensor, tiers: Tiers) -> Tensor:
    """One latent's numbers [.., r] after quantisation. Each tier is rotated first, as the engine's
    maps do."""
    if not tiers:
        return x
    parts = x.float().split([width for width, _ in tiers], -1)
    rounded = [_tier(part, bits) for part, (_, bits) in zip(parts, tiers, strict=True)]
    return torch.cat(rounded, -1).to(x.dtype)


def _tier(x: Tensor, bits: int) -> Tensor:
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        hadamard = _rotation(x.shape[-1], x.device)
        codes, scale, zero = quantize(x @ hadamard, bits, False, SCALES_IN[1])
        error = dequantize(codes, scale_of(scale, bits), zero, bits) @ hadamard.mT - x
    return x + error


@lru_cache
def _rotation(n: int, device: torch.device) -> Tensor:
    return rotation(n).float().to(device)
