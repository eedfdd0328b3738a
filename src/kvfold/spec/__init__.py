"""A token's stored numbers and where they lie: pure data, which everyone may know."""

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
