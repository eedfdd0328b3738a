"""More caches to time than `kvfold bench` has: those of papers, ablations and other recipes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvfold.bench.variants import ALL, Variant, planned
from kvfold.bench.variants import VARIANTS as SHIPPED
from kvfold.layout import Geometry, Latent, ValueKind

Lengths = Literal["uniform", "pareto", "evicted"]
How = Literal["stream-k", "longest-first", "whole", "decompressed"]
Tiles = Literal["ours", "zack", "fixed"]


@dataclass(frozen=True, kw_only=True)
class LabVariant(Variant):
    """A cache, and how attention to it is computed.

    online: values are mapped back after attention even where W_O could hold the map. lengths: of
    sequences: equal, Pareto over sequences, or log-normal over (sequence, group). how: the way
    decode attention is split, or what is done instead of decoding. tiles: of queries, in prefill
    (see `lab.ablations`).
    """

    online: bool = False
    lengths: Lengths = "uniform"
    how: How = "stream-k"
    tiles: Tiles = "ours"

    def value_kind(self, geometry: Geometry, latents: Sequence[Latent]) -> ValueKind:
        return "rebuilt" if self.online else super().value_kind(geometry, latents)


def is_ablation(variant: Variant) -> bool:
    """Whether something that makes attention fast is left out."""
    return isinstance(variant, LabVariant) and (
        variant.online or (variant.how, variant.tiles) != ("stream-k", "ours")
    )


def is_served(variant: Variant) -> bool:
    """Whether an engine's step takes another time with it; other variants differ in attention
    alone."""
    if variant.evict > 1:
        return False
    return not isinstance(variant, LabVariant) or (
        (variant.lengths, variant.how) == ("uniform", "stream-k")
    )


def _rebuilt(keys: float, values: float | None, shares: tuple[int, int], page: int = 64) -> Variant:
    kept = None if values is None else (values,)
    return Variant(keys=(keys,), values=kept, shares=shares, rebuilt=True, page=page)


_HALF = LabVariant(keys=(0.5,), values=(0.5,))
_PARETO = replace(_HALF, lengths="pareto")
# Adaptive rates of keys and of values alike: the widest heads are three times the narrowest's work.
_UNEVEN = LabVariant(keys=(0.25, 0.5, 0.5, 0.75), values=(0.25, 0.5, 0.5, 0.75))
_UNEVEN_PARETO = replace(_UNEVEN, lengths="pareto")
VARIANTS: dict[str, Variant] = {
    **SHIPPED,
    # ZACK's adaptive rates (AC, §6.5) at the same average: bf16-half is what they are without.
    "bf16-half-ragged": Variant(keys=(0.25, 0.5, 0.5, 0.75), values=(0.75, 0.5, 0.5, 0.25)),
    "bf16-half-pareto": _PARETO,
    "bf16-half-uneven": _UNEVEN,
    "bf16-half-uneven-pareto": _UNEVEN_PARETO,
    "int4-half-evict8": replace(_HALF, bits=4, lengths="evicted", evict=8, page=16),
    # Recipes lean and small: at most so much of the uncompressed numbers, ranks multiples of 8
    # (llama-3.1-8b: keys 48 or 56 a head and values 256; one latent of 512, of 192).
    "lean-31": _rebuilt(0.375, 0.25, (1, ALL)),
    "lean-35": _rebuilt(0.4375, 0.25, (1, ALL)),
    "small-25": _rebuilt(0.5, None, (ALL, ALL)),
    "small-10": _rebuilt(0.1875, None, (ALL, ALL)),
    # swift-4x where the values of all KV heads are 256 numbers, as of qwen2.5-1.5b.
    "swift-4x-256": planned(((32, 8), (96, 4)), ((32, 8), (96, 4), (64, 2))),
    # What one pass reads fastest: no keys in 2 bits, value tiers of odd numbers of 16 bytes.
    "swift-4x-odd": planned(((32, 8), (96, 4)), ((144, 8), (416, 4), (64, 2))),
    "swift-4.6x-odd": planned(((128, 4),), ((144, 8), (416, 4), (64, 2))),
    "swift-5.1x-odd": planned(((8, 8), (104, 4)), ((80, 8), (416, 4), (64, 2))),
    "swift-5.5x-odd": planned(((8, 8), (88, 4)), ((48, 8), (416, 4), (192, 2))),
    "swift-5.9x-odd": planned(((96, 4),), ((80, 8), (416, 4), (64, 2))),
    "swift-int4": planned(((128, 4),), ((608, 4),)),
    # Keys without 2 bits and odd tiers, as plans for speed prefer them; token entries of more than
    # some 660 bytes have pages of 32.
    "lean-4x-odd": planned(
        ((32, 8), (64, 4)), ((240, 8), (352, 4), (64, 2)), rebuilt=True, page=32
    ),
    "lean-6x-odd": planned(((16, 8), (64, 4)), ((80, 8), (320, 4), (64, 2)), rebuilt=True),
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
SERVED = tuple(name for name, variant in VARIANTS.items() if is_served(variant))
