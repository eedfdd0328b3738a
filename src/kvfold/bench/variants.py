"""What of a cache is kept, by name, and the models' shapes: what benchmarks are asked for.

Shapes: Hk KV heads, d head dim, D width, N layers.
"""

from dataclasses import dataclass, replace
from typing import Literal

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
ALL = 1 << 30  # heads of a latent: as many as there are

Lengths = Literal["uniform", "pareto", "evicted"]
How = Literal["stream-k", "longest-first", "whole", "decompressed"]
Tiles = Literal["ours", "zack", "fixed"]


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
    """What of the cache is kept.

    keys, values: kept over all dims of a latent's heads, in turn over the latents; values None:
    the latents of keys are those of values too. shares: KV heads of a key and of a value latent.
    tiers: of every latent of keys and of values, in place of such shares and of bits.
    rebuilt: keys are stored before RoPE and rebuilt. online: values are mapped back after attention
    where W_O could hold the map. bits: of every number; lengths: equal, Pareto over sequences, or
    log-normal over (sequence, group); evict: tokens over rows, on average; page: rows a page; how:
    work is cut, or what is done in place of decoding; tiles: of queries, in prefill (see
    `ablations`).
    """

    keys: tuple[float, ...] = (1.0,)
    values: tuple[float, ...] | None = (1.0,)
    shares: tuple[int, int] = (1, 1)
    rebuilt: bool = False
    online: bool = False
    bits: int = 16
    tiers: tuple[Tiers, Tiers] | None = None
    lengths: Lengths = "uniform"
    evict: int = 1
    page: int = 32
    how: How = "stream-k"
    tiles: Tiles = "ours"

    @property
    def whole(self) -> bool:
        return self.tiers is None and {*self.keys, *(self.values or (0.0,))} == {1.0}

    @property
    def ablation(self) -> bool:
        """Whether something is left out that makes it fast."""
        return self.online or (self.how, self.tiles) != ("stream-k", "ours")

    @property
    def served(self) -> bool:
        """Whether an engine's time is another for it; the others differ in attention alone."""
        return (self.lengths, self.evict, self.how) == ("uniform", 1, "stream-k")


def _rebuilt(keys: float, values: float | None, shares: tuple[int, int], page: int = 64) -> Variant:
    kept = None if values is None else (values,)
    return Variant(keys=(keys,), values=kept, shares=shares, rebuilt=True, page=page)


def _planned(*tiers: Tiers, rebuilt: bool = False, page: int = 64) -> Variant:
    """Runs as --factor plans them: of every key latent and of the values', or of one of both."""
    shares = (1, ALL) if len(tiers) > 1 else (ALL, ALL)
    both = tiers[0], tiers[-1]
    values = (1.0,) if len(tiers) > 1 else None
    return Variant(tiers=both, values=values, shares=shares, rebuilt=rebuilt, page=page)


_HALF = Variant(keys=(0.5,), values=(0.5,))
_PARETO = replace(_HALF, lengths="pareto")
# Adaptive rates of keys and of values alike: the widest heads are three times the narrowest's work.
_UNEVEN = Variant(keys=(0.25, 0.5, 0.5, 0.75), values=(0.25, 0.5, 0.5, 0.75))
_UNEVEN_PARETO = replace(_UNEVEN, lengths="pareto")
VARIANTS = {
    "bf16-full": Variant(),
    "bf16-half": _HALF,
    # ZACK's adaptive rates (AC, §6.5) at the same average: bf16-half is what they are without.
    "bf16-half-ragged": Variant(keys=(0.25, 0.5, 0.5, 0.75), values=(0.75, 0.5, 0.5, 0.25)),
    "bf16-half-pareto": _PARETO,
    "bf16-half-uneven": _UNEVEN,
    "bf16-half-uneven-pareto": _UNEVEN_PARETO,
    "int8-full": Variant(bits=8),
    "int8-half": replace(_HALF, bits=8),
    "int4-full": Variant(bits=4),
    "int4-half": replace(_HALF, bits=4),
    "int4-half-evict8": replace(_HALF, bits=4, lengths="evicted", evict=8, page=16),
    # Recipes lean and small: at most so much of the uncompressed numbers, ranks multiples of 8
    # (llama-3.1-8b: keys 48 or 56 a head and values 256; one latent of 512, of 192).
    "lean-31": _rebuilt(0.375, 0.25, (1, ALL)),
    "lean-35": _rebuilt(0.4375, 0.25, (1, ALL)),
    "small-25": _rebuilt(0.5, None, (ALL, ALL)),
    "small-10": _rebuilt(0.1875, None, (ALL, ALL)),
    # So many times smaller on llama-3.1-8b: dimensions and bits in the shares that --factor plans
    # for reference:gqa.
    "swift-4x": _planned(((24, 8), (104, 4)), ((128, 8), (384, 4), (256, 2))),
    "swift-5x": _planned(((8, 8), (80, 4), (32, 2)), ((64, 8), (384, 4), (256, 2))),
    # The same where the values of all KV heads are 256 numbers, as of qwen2.5-1.5b.
    "swift-4x-256": _planned(((32, 8), (96, 4)), ((32, 8), (96, 4), (64, 2))),
    # What one pass reads fastest: no keys in 2 bits, value runs of odd numbers of 16 bytes.
    "swift-4x-odd": _planned(((32, 8), (96, 4)), ((144, 8), (416, 4), (64, 2))),
    "swift-4.6x-odd": _planned(((128, 4),), ((144, 8), (416, 4), (64, 2))),
    "swift-5.5x-odd": _planned(((8, 8), (88, 4)), ((48, 8), (416, 4), (192, 2))),
    "swift-5.9x-odd": _planned(((96, 4),), ((80, 8), (416, 4), (64, 2))),
    "swift-int4": _planned(((128, 4),), ((608, 4),)),
    "lean-6x": _planned(((32, 4), (64, 2)), ((128, 8), (384, 4), (256, 2)), rebuilt=True),
    "lean-8x": _planned(((16, 4), (48, 2)), ((64, 8), (384, 4), (256, 2)), rebuilt=True),
    # Keys without 2 bits and odd runs, as plans for speed prefer them; rows of more than some 660
    # bytes have pages of 32.
    "lean-4x-odd": _planned(
        ((32, 8), (64, 4)), ((240, 8), (352, 4), (64, 2)), rebuilt=True, page=32
    ),
    "lean-6x-odd": _planned(((16, 8), (64, 4)), ((80, 8), (320, 4), (64, 2)), rebuilt=True),
    "small-6x": _planned(((256, 8), (576, 4), (512, 2)), rebuilt=True),
    "small-14x": _planned(((64, 8), (256, 4), (384, 2)), rebuilt=True),
    # Palu §4.5: a quarter of the keys, three of the values; latents of 1, 4 or 32 heads.
    "palu-g1": _rebuilt(0.25, 0.75, (1, 1)),
    "palu-g4": _rebuilt(0.25, 0.75, (4, 4)),
    "palu-g32": _rebuilt(0.25, 0.75, (32, 32)),
    # LoRC Table 2: 512 of 1024 in the layers that it compresses.
    "lorc": _rebuilt(0.5, 0.5, (ALL, ALL)),
    # ZACK without overhead elimination (OE): maps beside W_O; or whole keys and values every step.
    "bf16-half-online": replace(_HALF, online=True),
    "bf16-half-decompressed": replace(_HALF, how="decompressed"),
    # ZACK's kernels cut by whole heads (§5.3), and without its cutting (KE).
    "bf16-half-longest": replace(_HALF, how="longest-first"),
    "bf16-half-whole": replace(_HALF, how="whole"),
    "bf16-half-pareto-longest": replace(_PARETO, how="longest-first"),
    "bf16-half-pareto-whole": replace(_PARETO, how="whole"),
    "bf16-half-uneven-longest": replace(_UNEVEN, how="longest-first"),
    "bf16-half-uneven-whole": replace(_UNEVEN, how="whole"),
    "bf16-half-uneven-pareto-longest": replace(_UNEVEN_PARETO, how="longest-first"),
    "bf16-half-uneven-pareto-whole": replace(_UNEVEN_PARETO, how="whole"),
    # The same of prefill: tiles of as many queries for all heads, or by rank as published.
    "bf16-half-uneven-fixed": replace(_UNEVEN, tiles="fixed"),
    "bf16-half-uneven-zack": replace(_UNEVEN, tiles="zack"),
}
VARIANTS |= {
    f"{x}-32": replace(VARIANTS[x], page=32) for x in ("lean-6x", "lean-8x", "lean-6x-odd")
}


def variant_layout(
    geometry: Geometry, variant: Variant, num_layers: int | None = None
) -> CacheLayout:
    """The pages of `num_layers` equal layers, or the geometry's. Evicted rows are tracked."""
    num_layers = num_layers or geometry.num_layers
    if variant.values is None:
        found = _latents(geometry, "kv", variant)
    else:
        found = _latents(geometry, "k", variant) + _latents(geometry, "v", variant)
    keys: KeyKind = "plain"
    values: ValueKind = "plain"
    if not variant.whole:
        keys = ("pre_rope" if variant.rebuilt else "post_rope") if geometry.rope else "absorbed"
        own = [x for x in found if "v" in x.side]
        values = "rebuilt" if variant.online else value_kind(geometry, own)
    layer = LayerSpec(keys=keys, values=values, latents=tuple(found))
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
    groups = [tuple(heads[first : first + share]) for first in heads[::share]]
    if variant.tiers is not None:
        runs = variant.tiers[which]
        rank = sum(width for width, _ in runs)
        return [Latent(side=side, heads=group, rank=rank, tiers=runs) for group in groups]
    kept = (variant.keys, variant.values or ())[which]
    return [
        Latent(side=side, heads=group, rank=int(kept[i % len(kept)] * geometry.head_dim * share))
        for i, group in enumerate(groups)
    ]
