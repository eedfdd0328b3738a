"""What a token stores in the KV cache, and where: plain data classes without tensors."""

from kvfold.layout.geometry import Geometry
from kvfold.layout.latents import (
    SIDES,
    CacheSpec,
    Hybrid,
    Importance,
    KeyKind,
    Latent,
    LayerSpec,
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
    "Hybrid",
    "Importance",
    "KeyKind",
    "Latent",
    "LayerSpec",
    "Side",
    "Tiers",
    "ValueKind",
    "plain_layer",
    "value_kind",
]
