"""What one token stores per layer: the description shared by compression, attention, page pool and
kernels.

Shapes: D model width, L layers, Hq query heads, Hk KV heads, G = Hq / Hk, d head dim, r rank. A
*row* is the KV entry of one token in one layer, all its stored numbers; a *latent* is a contiguous
slice of the row, a low-rank projection of the keys and/or values of some heads.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from kvfold.layout.formats import Codebooks
from kvfold.layout.geometry import Geometry

Side = Literal["k", "v", "kv"]
SIDES: tuple[Side, Side] = ("k", "v")
KeyKind = Literal["plain", "absorbed", "post_rope", "pre_rope"]
ValueKind = Literal["plain", "fused", "rebuilt"]
Tiers = tuple[tuple[int, int], ...]
Importance = Literal["denominators", "attention"]


@dataclass(frozen=True, kw_only=True)
class Latent:
    """`rank` stored numbers that represent the keys and/or values of `heads`.

    tiers: planned (numbers, bits) pairs, in order; None: bits are chosen at run time.
    codebooks: calibrated quantisation levels, ascending, one tuple per bit width.
    """

    side: Side
    heads: tuple[int, ...]
    rank: int
    tiers: Tiers | None = None
    codebooks: Codebooks | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The row of one layer: key latents first, then value latents; or joint key-value latents.

    keys: `plain`: full keys after RoPE; `post_rope`: projected after RoPE; `pre_rope`: projected
        before RoPE, reconstructed for each score; `absorbed`: the model has no RoPE, and the
        projection is folded into W_Q.
    values: `plain`: full values; else latents, which attention sums as they are stored. `fused`:
        their up-projection is folded into W_O; `rebuilt`: it is a tensor of its own, `value_up`,
        which attention outputs pass before W_O. Values themselves are projected up only in prefill
        chunks so long that this is cheaper.
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

    @property
    def has_value_up(self) -> bool:
        """Whether the up-projection of values is a tensor of its own, not folded into W_O."""
        return self.values == "rebuilt"

    @cached_property
    def row_width(self) -> int:
        """Numbers in a row."""
        return sum(latent.rank for latent in self.latents)

    def columns(self, latent: Latent) -> slice:
        """The slice of the row that `latent` occupies."""
        ends = list(accumulate(item.rank for item in self.latents))
        index = self.latents.index(latent)
        return slice(ends[index] - latent.rank, ends[index])

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Sets of KV heads that share stored numbers. A group has its own pages, and its tokens are
        evicted together."""
        groups: list[set[int]] = []
        for latent in self.latents:
            touched = [group for group in groups if group & set(latent.heads)]
            merged = set(latent.heads).union(*touched)
            groups = [group for group in groups if group not in touched] + [merged]
        return tuple(sorted(tuple(sorted(group)) for group in groups))


@dataclass(frozen=True, kw_only=True)
class MixedRanks:
    """Mixed ranks: unimportant tokens store only the first numbers of each latent (ZDC §5.2).

    ranks: per layer and latent, the rank for unimportant tokens.
    important: per layer, the share of important tokens, which store the full rank, in [0, 1].
    leaders: per layer, the layer whose ranking of tokens it uses: itself, or an earlier layer with
        an equal share.
    by: how tokens are ranked: by the softmax denominators of their own queries, or by the attention
        that they receive.
    """

    ranks: tuple[tuple[int, ...], ...]
    important: tuple[float, ...]
    leaders: tuple[int, ...]
    by: Importance = "denominators"

    @cached_property
    def leader_sets(self) -> tuple[tuple[int, ...], ...]:
        """Sets of layers with the same leader. Their tokens are demoted to the low rank together
        and stay in the same order."""
        layers_of: dict[int, tuple[int, ...]] = {}
        for layer, leader in enumerate(self.leaders):
            layers_of[leader] = (*layers_of.get(leader, ()), layer)
        return tuple(layers_of.values())


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """What one token stores in all layers of a model. Saved in the artifact as `cache`.

    hybrid: lower ranks for unimportant tokens; None: all tokens store the same.
    """

    geometry: Geometry
    layers: tuple[LayerSpec, ...]
    hybrid: MixedRanks | None = None

    @cached_property
    def low_rank(self) -> "CacheSpec | None":
        """The spec of unimportant tokens; None if all tokens store the same."""
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

    def mean_per_token(self, numbers: Sequence[float], low_rank: Sequence[float]) -> float:
        """The average over tokens of a number per layer, summed over layers. numbers: for important
        tokens; low_rank: for unimportant ones."""
        assert self.hybrid is not None, "all tokens store as much"
        layers = zip(self.hybrid.important, numbers, low_rank, strict=True)
        return sum(share * full + (1 - share) * low for share, full, low in layers)

    @property
    def stored_numbers(self) -> int:
        """Numbers that one token stores over all layers; the average if tokens differ."""
        widths = [layer.row_width for layer in self.layers]
        if self.low_rank is None:
            return sum(widths)
        return round(
            self.mean_per_token(widths, [layer.row_width for layer in self.low_rank.layers])
        )

    @property
    def kept_fraction(self) -> float:
        """Stored bits over the bits of the uncompressed 16-bit cache (each stored number counts 16
        bits)."""
        return self.stored_numbers / self.geometry.full_numbers

    @property
    def planned(self) -> bool:
        """Whether bits were planned together with the ranks."""
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
        """Inverse of `to_dict`, also after a round trip through JSON. Raises ValueError that names
        the wrong field of `cache`."""
        from kvfold.layout.saved import JsonField, read_spec  # here, because it imports this module

        return read_spec(JsonField("cache", data))


def plain_layer(geometry: Geometry) -> LayerSpec:
    """A layer that stores full keys and values, one group per KV head."""
    latents = tuple(
        Latent(side=side, heads=(head,), rank=geometry.head_width(side))
        for side in SIDES
        for head in range(geometry.num_kv_heads)
    )
    return LayerSpec(keys="plain", values="plain", latents=latents)


def value_kind(geometry: Geometry, latents: Sequence[Latent]) -> ValueKind:
    """`fused` if a wider W_O costs no more multiplications per token than projecting attention
    outputs up with a tensor of its own; else `rebuilt`.

    Palu's release always fuses, which makes W_O r / d times wider for shared latents.
    """
    g, d = geometry, geometry.head_width("v")
    per_query = [x.rank for x in latents for _ in range(len(x.heads) * g.queries_per_kv)]
    fused = sum(per_query) * g.hidden_size
    separate = sum(per_query) * d + g.num_query_heads * d * g.hidden_size
    return "fused" if fused <= separate else "rebuilt"
