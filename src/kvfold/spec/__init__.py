"""What a token stores in the KV cache, and where: plain data classes without tensors."""

from kvfold.spec.geometry import Geometry
from kvfold.spec.latents import (
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
