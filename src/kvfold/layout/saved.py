"""Read a CacheSpec from JSON, which users may have edited: every field is checked, and errors name
it.

Shapes: Hk KV heads, d head dim.
"""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from reprlib import repr as shortened
from typing import Any, NoReturn, get_args

from kvfold.layout.formats import FORMATS, Codebooks, format_of
from kvfold.layout.geometry import Geometry
from kvfold.layout.latents import (
    CacheSpec,
    Importance,
    KeyKind,
    Latent,
    LayerSpec,
    MixedRanks,
    Side,
    Tiers,
    ValueKind,
)

EARLIER_KINDS = {"pre": "pre_rope", "post": "post_rope"}
KEY_KINDS: dict[bool, tuple[KeyKind, ...]] = {  # by whether the model has RoPE
    True: ("plain", "post_rope", "pre_rope"),
    False: ("plain", "absorbed"),
}
_BITS = sorted({16}.union(*(format_of(name).widths for name in FORMATS)))
_LEVELS = [2**bits for bits in sorted(format_of("kvquant").widths)]
_SIZES = ("hidden_size", "num_query_heads", "num_kv_heads", "head_dim", "num_layers")


@dataclass(frozen=True)
class JsonField:
    """A JSON value and its path in the file. Methods raise ValueError for a value of the wrong
    type."""

    place: str
    value: Any

    def fail(self, wrong: str) -> NoReturn:
        raise ValueError(
            f"{self.place} {wrong}: config.json was edited, or written by another version of "
            "kvfold; compress the model again"
        )

    def refuse(self, legal: str) -> NoReturn:
        self.fail(f"must be {legal}; got {shortened(self.value)}")

    def fields(self, *names: str, optional: Collection[str] = ()) -> "dict[str, JsonField]":
        """Values by name; an absent optional one is None."""
        if not isinstance(self.value, dict):
            self.refuse("an object")
        present = self.value.keys()
        if missing := [x for x in names if x not in present]:
            self.fail(f"has no {', '.join(missing)}")
        if unknown := present - {*names, *optional}:
            self.fail(f"has unknown keys {', '.join(sorted(unknown))}")
        return {x: JsonField(f"{self.place}.{x}", self.value.get(x)) for x in (*names, *optional)}

    def items(self) -> "list[JsonField]":
        if not isinstance(self.value, list | tuple):
            self.refuse("a list")
        return [JsonField(f"{self.place}[{i}]", x) for i, x in enumerate(self.value)]

    def integer(self, least: int, most: int | None = None) -> int:
        is_integer = isinstance(self.value, int) and not isinstance(self.value, bool)
        if not is_integer or self.value < least or (most is not None and self.value > most):
            legal = f"in {least}..{most}" if most is not None else f"of at least {least}"
            self.refuse(f"an integer {legal}")
        return int(self.value)

    def number(self) -> float:
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if not is_number or not abs(self.value) <= sys.float_info.max:
            self.refuse("a finite number")
        return float(self.value)

    def positive(self) -> float:
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if not is_number or not 0 < self.value <= sys.float_info.max:
            self.refuse("a number above 0")
        return float(self.value)

    def choice(self, legal: Collection[Any]) -> Any:
        if not any(type(self.value) is type(x) and self.value == x for x in legal):
            self.refuse(f"one of {', '.join(map(str, legal))}")
        return self.value


def read_spec(saved: JsonField) -> CacheSpec:
    fields = saved.fields("geometry", "layers", optional=("hybrid",))
    geometry = _geometry(fields["geometry"])
    saved_layers = _saved_layers(fields["layers"], geometry)
    layers = tuple(_layer(x, geometry) for x in saved_layers)
    return CacheSpec(geometry=geometry, layers=layers, hybrid=_hybrid(fields["hybrid"], layers))


def _saved_layers(saved: JsonField, geometry: Geometry) -> list[JsonField]:
    items = saved.items()
    if len(items) != geometry.num_layers:
        saved.fail(f"must be {geometry.num_layers} layers; got {len(items)}")
    return items


def _hybrid(saved: JsonField, layers: Sequence[LayerSpec]) -> MixedRanks | None:
    if saved.value is None:
        return None
    if reason := why_not_mixed_ranks(layers):
        saved.fail(f"must be null: {reason}")
    fields = saved.fields("ranks", "important", "leaders", "by")
    by = fields.pop("by").choice(get_args(Importance))
    if any(len(x.items()) != len(layers) for x in fields.values()):
        saved.fail(f"must have ranks, shares and leaders of {len(layers)} layers")
    ranks, important, leaders = [], [], []
    for layer, layer_ranks in zip(layers, fields["ranks"].items(), strict=True):
        if len(layer_ranks.items()) != len(layer.latents):
            layer_ranks.fail(f"must be ranks of {len(layer.latents)} latents")
        pairs = zip(layer_ranks.items(), layer.latents, strict=True)
        ranks.append(tuple(x.integer(0, latent.rank) for x, latent in pairs))
    for share in fields["important"].items():
        if not 0 <= share.number() <= 1:
            share.refuse("a share of tokens, in [0, 1]")
        important.append(share.number())
    for i, leader in enumerate(fields["leaders"].items()):
        leaders.append(leader.integer(0, i))
        if leaders[leaders[i]] != leaders[i] or important[leaders[i]] != important[i]:
            leader.refuse("a layer that leads itself, with the same share")
    shares = tuple(important)
    return MixedRanks(ranks=tuple(ranks), important=shares, leaders=tuple(leaders), by=by)


def why_not_mixed_ranks(layers: Sequence[LayerSpec]) -> str | None:
    """Why tokens of these layers cannot be demoted to a lower rank; None if they can. They can if
    the first numbers of each latent carry most, and queries and W_O use the latents as stored."""
    for i, layer in enumerate(layers):
        if layer.keys not in ("post_rope", "absorbed") or layer.values != "fused":
            return f"layer {i} stores {layer.keys} keys and {layer.values} values"
        if any(x.tiers or x.codebooks for x in layer.latents):
            return f"bits of layer {i} are planned number by number"
        if any(len(x.heads) > 1 for x in layer.latents):
            return f"heads of layer {i} share latents"
    return None


def _geometry(saved: JsonField) -> Geometry:
    fields = saved.fields(*_SIZES, "rope", "key_norm", "scaling", optional=("softcap", "value_dim"))
    cap, value_dim = fields["softcap"], fields["value_dim"]
    geometry = Geometry(
        **{name: fields[name].integer(1) for name in _SIZES},
        rope=fields["rope"].choice((True, False)),
        key_norm=fields["key_norm"].choice((True, False)),
        scaling=fields["scaling"].positive(),
        softcap=None if cap.value is None else cap.positive(),
        value_dim=None if value_dim.value is None else value_dim.integer(1),
    )
    if geometry.num_query_heads % geometry.num_kv_heads:
        fields["num_query_heads"].refuse(f"a multiple of num_kv_heads, {geometry.num_kv_heads}")
    return geometry


def _layer(saved: JsonField, geometry: Geometry) -> LayerSpec:
    fields = saved.fields("keys", "values", "latents")
    keys = fields["keys"]
    keys = JsonField(keys.place, EARLIER_KINDS.get(str(keys.value), keys.value))
    layer = LayerSpec(
        keys=keys.choice(KEY_KINDS[geometry.rope]),
        values=fields["values"].choice(get_args(ValueKind)),
        latents=tuple(_latent(x, geometry) for x in fields["latents"].items()),
    )
    _check_layer(fields["latents"], layer, geometry)
    return layer


def _latent(saved: JsonField, geometry: Geometry) -> Latent:
    fields = saved.fields("side", "heads", "rank", optional=("tiers", "codebooks"))
    side = fields["side"].choice(get_args(Side))
    heads = tuple(x.integer(0, geometry.num_kv_heads - 1) for x in fields["heads"].items())
    if not heads:
        fields["heads"].refuse("a list of at least one head")
    rank = fields["rank"].integer(0, len(heads) * geometry.head_width(side))
    tiers, codebooks = _tiers(fields["tiers"], rank), _codebooks(fields["codebooks"])
    return Latent(side=side, heads=heads, rank=rank, tiers=tiers, codebooks=codebooks)


def _tiers(saved: JsonField, rank: int) -> Tiers | None:
    if saved.value is None:
        return None
    pairs = [x.items() for x in saved.items()]
    if any(len(pair) != 2 for pair in pairs):
        saved.refuse("a list of pairs (numbers, bits)")
    tiers = tuple((width.integer(1), bits.choice(_BITS)) for width, bits in pairs)
    if sum(width for width, _ in tiers) != rank:
        saved.refuse(f"tiers whose numbers add up to rank {rank}")
    return tiers


def _codebooks(saved: JsonField) -> Codebooks | None:
    if saved.value is None:
        return None
    codebooks = tuple(tuple(level.number() for level in x.items()) for x in saved.items())
    if any(len(levels) not in _LEVELS or sorted(levels) != [*levels] for levels in codebooks):
        saved.refuse(f"lists of {', '.join(map(str, _LEVELS))} ascending levels")
    return codebooks


def _check_layer(saved: JsonField, layer: LayerSpec, geometry: Geometry) -> None:
    """Raises ValueError unless the latents cover each head exactly once, in order."""
    sides = [latent.side for latent in layer.latents]
    if sides != sorted(sides) or {*sides} not in ({"k", "v"}, {"kv"}):
        legal = "of keys (k), then of values (v), or of both (kv)"
        saved.fail(f"must be {legal}; got {', '.join(sides) or 'none'}")
    for side, kind, latents in (
        ("key", layer.keys, layer.key_latents),
        ("value", layer.values, layer.value_latents),
    ):
        heads = list(chain.from_iterable(latent.heads for latent in latents))
        if heads != list(range(geometry.num_kv_heads)):
            every = f"0..{geometry.num_kv_heads - 1}"
            saved.fail(f"must have {side}s of heads {every}, each once, in order; got {heads}")
        shapes = {(len(latent.side), len(latent.heads), latent.rank) for latent in latents}
        width = geometry.head_width(side[0])
        if kind == "plain" and shapes != {(1, 1, width)}:
            saved.fail(f"must have {side}s of one head and rank {width}, being plain")
    if not layer.row_width:
        saved.fail("must store at least one number")
