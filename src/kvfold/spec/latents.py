"""The row of one token: the contract between compression, attention modules, pool and kernels.

Shapes: D model width, L layers, Hq query heads, Hk KV heads, G = Hq / Hk, d head dim, r rank.
A *row* is everything one token stores in one layer; a *latent* is one contiguous slice of it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from kvfold.formats import Codebooks
from kvfold.spec.geometry import Geometry

Side = Literal["k", "v", "kv"]
SIDES: tuple[Side, Side] = ("k", "v")
KeyKind = Literal["plain", "absorbed", "post_rope", "pre_rope"]
ValueKind = Literal["plain", "fused", "rebuilt"]
Tiers = tuple[tuple[int, int], ...]
Importance = Literal["denominators", "attention"]


@dataclass(frozen=True, kw_only=True)
class Latent:
    """`rank` stored numbers that stand for the keys and / or values of `heads`.

    tiers: planned (numbers, bits) from the first number on; None: bits are chosen at run time.
    codebooks: calibrated levels of its numbers, ascending, for some numbers of bits each.
    """

    side: Side
    heads: tuple[int, ...]
    rank: int
    tiers: Tiers | None = None
    codebooks: Codebooks | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer's row: key latents first, then value latents; or joint key-value latents.

    keys: `plain` rotated and stored whole; `post_rope` rotated, then mapped; `pre_rope` mapped
        before RoPE, rebuilt for every score; `absorbed` mapped, the model has no RoPE, the map
        sits in W_Q.
    values: `fused` maps sit in W_O; `rebuilt` attention outputs are mapped back before W_O.
    """

    keys: KeyKind
    values: ValueKind
    latents: tuple[Latent, ...]

    @cached_property
    def key_latents(self) -> tuple[Latent, ...]:
        return tuple(latent for latent in self.latents if "k" in latent.side)

    @cached_property
    def value_latents(self) -> tuple[Latent, ...]:
        return tuple(latent for latent in self.latents if "v" in latent.side)

    @cached_property
    def row_width(self) -> int:
        return sum(latent.rank for latent in self.latents)

    def columns(self, latent: Latent) -> slice:
        """Where `latent` sits in the row."""
        ends = list(accumulate(item.rank for item in self.latents))
        index = self.latents.index(latent)
        return slice(ends[index] - latent.rank, ends[index])

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Sets of KV heads that share stored numbers: the unit that owns pages and is evicted."""
        groups: list[set[int]] = []
        for latent in self.latents:
            touched = [group for group in groups if group & set(latent.heads)]
            merged = set(latent.heads).union(*touched)
            groups = [group for group in groups if group not in touched] + [merged]
        return tuple(sorted(tuple(sorted(group)) for group in groups))


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """Two widths of a row: unimportant tokens keep the first numbers of every latent (ZDC §5.2).

    ranks: of every layer's latents, what unimportant tokens keep; important: of every layer, the
    share of tokens that keep all, in [0, 1]; leaders: of every layer, the one by whose softmax
    denominators its tokens are ranked: itself, or an earlier one of an equal share. by: what ranks
    tokens: their own softmax denominators, or the attention that they get.
    """

    ranks: tuple[tuple[int, ...], ...]
    important: tuple[float, ...]
    leaders: tuple[int, ...]
    by: Importance = "denominators"

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """Layers with one leader, whose rows become narrow together and stay in the same order."""
        found: dict[int, tuple[int, ...]] = {}
        for layer, leader in enumerate(self.leaders):
            found[leader] = (*found.get(leader, ()), layer)
        return tuple(found.values())


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The rows of every layer of a model. Saved in the artifact as `cache`.

    hybrid: how narrow rows of unimportant tokens become; None: all tokens store as much.
    """

    geometry: Geometry
    layers: tuple[LayerSpec, ...]
    hybrid: Hybrid | None = None

    @cached_property
    def narrow(self) -> "CacheSpec | None":
        """The rows of unimportant tokens, where they differ."""
        if self.hybrid is None:
            return None
        layers = (
            replace(
                layer,
                latents=tuple(
                    replace(x, rank=rank) for x, rank in zip(layer.latents, ranks, strict=True)
                ),
            )
            for layer, ranks in zip(self.layers, self.hybrid.ranks, strict=True)
        )
        return CacheSpec(geometry=self.geometry, layers=tuple(layers))

    def mean(self, numbers: Sequence[float], narrow: Sequence[float]) -> float:
        """The sum over layers of what a token has there, important or not, on average."""
        assert self.hybrid is not None, "all tokens store as much"
        each = zip(self.hybrid.important, numbers, narrow, strict=True)
        return sum(share * wide + (1 - share) * less for share, wide, less in each)

    @property
    def stored_numbers(self) -> int:
        """Numbers that one token stores, all layers; on average, where tokens differ."""
        widths = [layer.row_width for layer in self.layers]
        if self.narrow is None:
            return sum(widths)
        return round(self.mean(widths, [layer.row_width for layer in self.narrow.layers]))

    @property
    def kept_fraction(self) -> float:
        """Stored bits over the bits of the uncompressed 16-bit cache (numbers count 16 bits)."""
        return self.stored_numbers / self.geometry.full_numbers

    @property
    def planned(self) -> bool:
        """Whether bits were planned with the ranks."""
        return any(latent.tiers for layer in self.layers for latent in layer.latents)

    def bytes_per_token(self, itemsize: int = 2) -> int:
        return self.stored_numbers * itemsize

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        if self.hybrid is None:
            del fields["hybrid"]
        if self.geometry.value_dim is None:
            del fields["geometry"]["value_dim"]
        return fields

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "CacheSpec":
        """Inverse of `to_dict`, also after a round trip through JSON. Raises ValueError naming the
        field of `cache` that is not as it must be."""
        from kvfold.spec.saved import Saved, read_spec  # which makes what is defined here

        return read_spec(Saved("cache", data))


def plain_layer(geometry: Geometry) -> LayerSpec:
    """A layer that stores full keys and values, one group per KV head."""
    latents = tuple(
        Latent(side=side, heads=(head,), rank=geometry.head_width(side))
        for side in SIDES
        for head in range(geometry.num_kv_heads)
    )
    return LayerSpec(keys="plain", values="plain", latents=latents)


def value_kind(geometry: Geometry, latents: Sequence[Latent]) -> ValueKind:
    """`fused` where wider W_O costs no more multiplications a token than rebuilding outputs.

    Palu's release always fuses, which makes W_O r / d times wider for shared latents.
    """
    g, d = geometry, geometry.head_width("v")
    per_query = [x.rank for x in latents for _ in range(len(x.heads) * g.queries_per_kv)]
    fused = sum(per_query) * g.hidden_size
    rebuilt = sum(per_query) * d + g.num_query_heads * d * g.hidden_size
    return "fused" if fused <= rebuilt else "rebuilt"
