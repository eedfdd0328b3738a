"""What a token stores in the KV cache, and where: plain data classes without tensors."""

from kvfold.layout.geometry import Geometry
from kvfold.layout.latents import (
    SIDES,
    CacheSpec,
    Importance,
    KeyKind,
    Latent,
    LayerSpec,
    MixedRanks,
    Side,
    Tiers,
    ValueKind,
    plain_layer,
    value_kind,
)

__all__ = [
    "SIDES",
    "CacheSpec",
    "Geometry",
    "Importance",
    "KeyKind",
    "Latent",
    "LayerSpec",
    "MixedRanks",
    "Side",
    "Tiers",
    "ValueKind",
    "plain_layer",
    "value_kind",
]
