"""Caches to time, by name, and the shapes of the models that they belong to.

Shapes: Hk KV heads, d head dim, N layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvfold.layout import (
    CacheSpec,
    Geometry,
    KeyKind,
    Latent,
    LayerSpec,
    Side,
    Tiers,
    ValueKind,
    value_kind,
)
from kvfold.layout.pages import CacheLayout, cache_layout

DTYPE = torch.bfloat16
ALL = 1 << 30  # KV heads that share a latent: all of a layer


def _shape(kv_heads: int, rope: bool = True) -> Geometry:
    return Geometry(
        hidden_size=4096,
        num_query_heads=32,
        num_kv_heads=kv_heads,
        head_dim=128,
        num_layers=32,
        rope=rope,
        key_norm=False,
        scaling=128**-0.5,
    )


SHAPES = {
    "llama-3.1-8b": _shape(8),
    "llama-3.1-70b": replace(_shape(8), hidden_size=8192, num_query_heads=64, num_layers=80),
    "llama-2-7b": _shape(32),
    "llama-2-7b-norope": _shape(32, rope=False),
    "qwen2.5-1.5b": replace(_shape(2), hidden_size=1536, num_query_heads=12, num_layers=28),
    "tiny": replace(_shape(2), hidden_size=64, num_query_heads=4, head_dim=16, num_layers=2),
}
ROPE_BASES = dict.fromkeys(SHAPES, 10000.0) | dict.fromkeys(
    ("llama-3.1-8b", "llama-3.1-70b"), 500000.0
)
ROPE_BASES["qwen2.5-1.5b"] = 1e6


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a cache stores keys and values.

    keys, values: share of the dimensions that each latent keeps, one for all latents or several
    that repeat over the latents. values=None: keys and values share a latent. shares: KV heads per
    key latent and per value latent. tiers: (dimensions, bits) of every key latent and of every
    value latent, in place of `keys`, `values` and `bits`. rebuilt: keys are stored before RoPE and
    reconstructed in attention. bits: of every number. evict: tokens read per token kept; above 1,
    pages also hold eviction scores. page: tokens a page.
    """

    keys: tuple[float, ...] = (1.0,)
    values: tuple[float, ...] | None = (1.0,)
    shares: tuple[int, int] = (1, 1)
    rebuilt: bool = False
    bits: int = 16
    tiers: tuple[Tiers, Tiers] | None = None
    evict: int = 1
    page: int = 32

    @property
    def whole(self) -> bool:
        """Whether all dimensions are kept."""
        return self.tiers is None and {*self.keys, *(self.values or (0.0,))} == {1.0}

    def value_kind(self, geometry: Geometry, latents: Sequence[Latent]) -> ValueKind:
        """Where compressed values are mapped back to full width."""
        return value_kind(geometry, latents)


def planned(*tiers: Tiers, rebuilt: bool = False, page: int = 64) -> Variant:
    """A cache as --factor plans it. tiers: of the key latents and of the value latents, or once, of
    latents that keys and values share."""
    shares = (1, ALL) if len(tiers) > 1 else (ALL, ALL)
    both = tiers[0], tiers[-1]
    values = (1.0,) if len(tiers) > 1 else None
    return Variant(tiers=both, values=values, shares=shares, rebuilt=rebuilt, page=page)


_HALF = Variant(keys=(0.5,), values=(0.5,))
VARIANTS = {
    "bf16-full": Variant(),
    "bf16-half": _HALF,
    "int8-full": Variant(bits=8),
    "int8-half": replace(_HALF, bits=8),
    "int4-full": Variant(bits=4),
    "int4-half": replace(_HALF, bits=4),
    # Dimensions and bits as --factor plans them on a model of llama-3.1-8b's shape, in the
    # proportions that it plans for reference:gqa.
    "swift-4x": planned(((24, 8), (104, 4)), ((128, 8), (384, 4), (256, 2))),
    "swift-5x": planned(((8, 8), (80, 4), (32, 2)), ((64, 8), (384, 4), (256, 2))),
    "lean-6x": planned(((32, 4), (64, 2)), ((128, 8), (384, 4), (256, 2)), rebuilt=True),
    "lean-8x": planned(((16, 4), (48, 2)), ((64, 8), (384, 4), (256, 2)), rebuilt=True),
    "small-6x": planned(((256, 8), (576, 4), (512, 2)), rebuilt=True),
    "small-14x": planned(((64, 8), (256, 4), (384, 2)), rebuilt=True),
}


def variant_layout(
    geometry: Geometry, variant: Variant, num_layers: int | None = None
) -> CacheLayout:
    """The page layout of `num_layers` equal layers; by default as many as the geometry has."""
    num_layers = num_layers or geometry.num_layers
    if variant.values is None:
        latents = _latents(geometry, "kv", variant)
    else:
        latents = _latents(geometry, "k", variant) + _latents(geometry, "v", variant)
    keys: KeyKind = "plain"
    values: ValueKind = "plain"
    if not variant.whole:
        keys = ("pre_rope" if variant.rebuilt else "post_rope") if geometry.rope else "absorbed"
        values = variant.value_kind(geometry, [x for x in latents if "v" in x.side])
    layer = LayerSpec(keys=keys, values=values, latents=tuple(latents))
    spec = CacheSpec(
        geometry=replace(geometry, num_layers=num_layers), layers=(layer,) * num_layers
    )
    return cache_layout(
        spec,
        page=variant.page,
        itemsize=DTYPE.itemsize,
        bits=variant.bits if variant.tiers is None else None,
        tracked=variant.evict > 1,
    )


def _latents(geometry: Geometry, side: Side, variant: Variant) -> list[Latent]:
    heads, which = range(geometry.num_kv_heads), int(side == "v")
    share = min(variant.shares[which], len(heads))
    head_sets = [tuple(heads[first : first + share]) for first in heads[::share]]
    if variant.tiers is not None:
        tiers = variant.tiers[which]
        rank = sum(width for width, _ in tiers)
        return [Latent(side=side, heads=x, rank=rank, tiers=tiers) for x in head_sets]
    keep = (variant.keys, variant.values or ())[which]
    width = geometry.head_dim * share
    return [
        Latent(side=side, heads=x, rank=int(keep[i % len(keep)] * width))
        for i, x in enumerate(head_sets)
    ]
