"""Attention of a model whose cache is compressed, except for its first and last tokens.

Many tokens pass at once: each query sees the tokens that are near it as they are, and all others as
pages would store them. So this measures what an exact window wins before a kernel reads one.
Shapes: T new tokens after P others, S = P + T; Hq / Hk query / KV heads, d head dim, r numbers of a
key in the space of scores, R numbers of a stored entry, V tokens of the vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.compression.training.rounded_cache import round_to_bits
from kvfold.evaluation.dense import inference
from kvfold.layout import CacheSpec, LayerSpec
from kvfold.layout.formats.integers import dequantize, quantize, scale_of
from kvfold.layout.pages import cache_layout, plain_spec
from kvfold.maps.engine_model import LayerProjections, served_layer, served_spec
from kvfold.maps.layers import using_attention
from kvfold.maps.plain import measured_means
from kvfold.maps.sidecar import Sidecar
from kvfold.models.families import family_of
from kvfold.models.rotate import with_full_rank_latents
from kvfold.ops.common.rotation import rotation
from published_quantisers import Quantiser

NAME = "kvfold_benchmark_windows"
KINDS = ("whole", "stored", "stored8", "residual")
CHUNK = 1024  # queries that attend at once
Inputs = tuple[Tensor, Tensor, Tensor]  # queries [Hq, T, r], keys [Hk, S, r] and values [Hk, S, d]


@dataclass(frozen=True, kw_only=True)
class Window:
    """The exact tokens of every query: the last `tokens`, its own included, and the `first` of the
    text.

    kind: whole, the model's own keys and values in 16 bits; stored, the numbers of the compressed
        entries in 16 bits; stored8, these in 8 bits; residual, as stored, but the last 1 to
        `tokens`, as `CacheConfig.residual` keeps them.
    """

    kind: str = "stored"
    tokens: int = 0
    first: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """From KIND-TOKENS or KIND-TOKENS-FIRST, such as whole-64-4."""
        kind, *counts = text.split("-")
        if kind not in KINDS or len(counts) not in (1, 2) or not all(x.isdigit() for x in counts):
            raise SystemExit(f"a window is KIND-TOKENS or KIND-TOKENS-FIRST of {KINDS}; got {text}")
        return cls(kind=kind, tokens=int(counts[0]), first=int(counts[-1]) if counts[1:] else 0)

    def near(self, new: int, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Which of `count` tokens the last `new` see exactly, bool [T, S]."""
        at = torch.arange(count, device=device)
        queries = at[count - new :, None]
        if self.kind == "residual":
            return queries // self.tokens == at // self.tokens
        return (queries - at < self.tokens) | (at < self.first)

    def smaller(self, spec: CacheSpec, entries: float, context: int) -> float:
        """How many times fewer bits than 16 a number a context of so many tokens takes. A residual
        has memory for all of its tokens, of which half is empty on average. entries: bits of a
        token outside of the window."""
        numbers = spec.geometry.full_numbers
        exact = 16.0 * numbers
        if self.kind != "whole":
            exact = cache_layout(spec, bits=8 if self.kind == "stored8" else 16).bits_per_token
        count = min(context, self.tokens + self.first)
        rest = context - ((count + 1) / 2 if self.kind == "residual" else count)
        return 16 * numbers * context / (count * exact + rest * entries)


class Layer:
    """The attention of layer `index`. bits: of its numbers; None: as planned. maps: of its entries;
    without them entries are keys and values less their `mean` [R], as in the engine. quantiser:
    stores keys and values instead. past: entries, keys and values of the P tokens before."""

    def __init__(
        self,
        index: int,
        spec: LayerSpec,
        bits: int | None,
        window: Window,
        maps: LayerProjections | None,
        mean: Tensor,
        quantiser: Quantiser | None,
    ) -> None:
        self.index, self.spec, self.bits, self.window = index, spec, bits, window
        self.maps, self.mean, self.quantiser = maps, mean, quantiser
        self.past: tuple[Tensor, ...] | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, remember: bool,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """q [Hq, T, d], k and v [Hk, T, d] -> [Hq, T, d]. remember: these tokens come before those
        of later calls. sinks: as in `mixed`."""
        before = 0 if self.past is None else len(self.past[0])
        queries, entries = self.entries(q, k, v, before)
        if self.past is not None:
            pairs = zip(self.past, (entries, k, v), (0, 1, 1), strict=True)
            entries, k, v = (torch.cat((old, new), dim) for old, new, dim in pairs)
        if remember:
            self.past = entries, k, v
        constant = None if self.maps is None else self.maps.key_constant
        exact = q, k if constant is None else k - constant[:, None], v
        if self.window.kind == "stored8":
            exact = self.read(queries, in_bits(entries, self.spec, 8))
        elif self.window.kind != "whole":
            exact = self.read(queries, entries)
        if self.quantiser is None:
            coarse = self.read(queries, in_bits(entries, self.spec, self.bits))
        else:
            coarse = q, self.quantiser.keys(self.index, k), self.quantiser.values(self.index, v)
        return mixed(exact, coarse, self.window.near(q.shape[1], len(entries)), scale, sinks)

    def entries(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Queries that score stored keys [Hq, T, r], and entries [T, R] before they are rounded.
        first: position of the first token."""
        if self.maps is None:
            return q, torch.cat((k, v)).transpose(0, 1).flatten(1) - self.mean
        positions = torch.arange(first, first + k.shape[1])
        queries, keys, values = (x.transpose(0, 1) for x in (q, k, v))
        queries, entries = self.maps.score_space(queries, keys, values, positions)
        assert entries is not None
        return queries, entries

    def read(self, q: Tensor, entries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and the keys [Hk, S, r] and values [Hk, S, d] that entries [S, R] stand for."""
        if self.maps is None:
            heads = len({head for x in self.spec.latents for head in x.heads})
            numbers = (entries + self.mean).unflatten(1, (2 * heads, -1))
            k, v = numbers.transpose(0, 1).split(heads)
            return q, k, v
        layer, count = self.maps.layer, len(entries)
        tables = None
        if layer.rope is not None:
            cos, sin = layer.rope.tables(entries, torch.arange(count), count)
            tables = cos.view(1, 1, count, -1), sin.view(1, 1, count, -1)
        keys = layer.score_keys(entries[None], tables)[0]
        values = layer.full_values(entries[None])[0] + self.maps.maps.value_mean
        return q, keys, values.transpose(0, 1)


def mixed(
    exact: Inputs, coarse: Inputs, near: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention [Hq, T, d] of the last T of S tokens to the `exact` keys and values where
    `near` bool [T, S] is true, and to the `coarse` ones elsewhere. sinks [Hq]: a score of each
    head that takes part in its softmax and has no value."""
    groups, count = len(exact[0]) // len(exact[1]), near.shape[1]
    at = torch.arange(count, device=near.device)
    positions, outputs = at[count - len(near) :, None], []
    for rows in torch.arange(len(near), device=near.device).split(CHUNK):
        own, hidden, heads = near[rows], at > positions[rows], []
        for head in range(len(exact[1])):
            queries = slice(head * groups, (head + 1) * groups)
            near_scores, scores = (
                x[0][queries, rows] @ x[1][head].mT * scale for x in (exact, coarse)
            )
            scores = torch.where(own, near_scores, scores).masked_fill(hidden, -torch.inf)
            scores = scores.float()
            if sinks is not None:
                sink = sinks[queries, None, None].float().expand(-1, len(rows), 1)
                scores = torch.cat((scores, sink), -1)
            weights = scores.softmax(-1)[..., :count].to(exact[2].dtype)
            heads.append((weights * own) @ exact[2][head] + (weights * ~own) @ coarse[2][head])
        outputs.append(torch.cat(heads))
    return torch.cat(outputs, 1)


def in_bits(entries: Tensor, spec: LayerSpec, bits: int | None) -> Tensor:
    """Entries [.., R] as pages store them in `bits`, or as planned (None)."""
    if bits is None:
        return round_to_bits(entries, spec)
    if bits == 16:
        return entries
    parts = []
    for x in entries.split([latent.rank for latent in spec.latents], -1):
        turn = rotation(x.shape[-1]).to(x)
        codes, scale, zero = quantize(x @ turn, bits, False, torch.float16)
        parts.append(dequantize(codes, scale_of(scale, bits), zero, bits) @ turn.mT)
    return torch.cat(parts, -1)


class Reader:
    """Reads tokens with a model whose layers are `layers`, after those that it remembers."""

    def __init__(self, model: Any, layers: list[Layer]) -> None:
        self.model, self.layers, self.count, self.remembers = model, layers, 0, False

    def __call__(self, ids: list[int]) -> Tensor:
        """Logits [T, V]."""
        positions = torch.arange(self.count, self.count + len(ids))[None]
        options = {"position_ids": positions, "use_cache": False}
        logits: Tensor = self.model(torch.tensor([ids]), **options).logits
        return logits[0]

    def remember(self, ids: list[int]) -> None:
        """Read tokens that come before those of later calls."""
        self.remembers = True
        self(ids)
        self.remembers, self.count = False, self.count + len(ids)

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **named: Any
    ) -> tuple[Tensor, None]:
        """Attention function for transformers: [1, heads, T, d] -> [1, T, Hq, d]."""
        layer, inputs = self.layers[module.layer_idx], (query[0], key[0], value[0])
        out = layer.attend(*inputs, named["scaling"], self.remembers, named.get("s_aux"))
        return out.transpose(0, 1)[None], None


def spec_of(model: Any, sidecar: Sidecar | None) -> CacheSpec:
    """The numbers that pages store of every token."""
    if sidecar is not None:
        return served_spec(sidecar.spec)
    return with_full_rank_latents(plain_spec(family_of(model.config).geometry(model.config)))


@contextmanager
def windowed(
    model: Any,
    sidecar: Sidecar | None,
    bits: int | None,
    window: Window,
    quantiser: Quantiser | None = None,
) -> Iterator[Reader]:
    """Let a model without sliding windows attend so. bits: of all numbers; None: as planned.
    quantiser: instead of bits, which are 16 then."""
    spec = spec_of(model, sidecar)
    projections: list[LayerProjections | None] = [None] * len(spec.layers)
    if sidecar is not None:
        maps = [sidecar.maps[x.name] for x in sidecar.layers_of(model)]
        for i, (x, mean) in enumerate(zip(maps, measured_means(model), strict=True)):
            served = served_layer(i, spec, x.to(model.device, model.dtype), None)
            served.lack_constant_of(mean.keys)
            projections[i] = served
    means = [torch.zeros(1)] * len(projections)
    if sidecar is None and bits != 16:
        means = [torch.cat((x.keys, x.values)).flatten() for x in measured_means(model)]
    parts = zip(spec.layers, projections, means, strict=True)
    layers = [Layer(i, x, bits, window, y, mean, quantiser) for i, (x, y, mean) in enumerate(parts)]
    reader = Reader(model, layers)
    ALL_ATTENTION_FUNCTIONS.register(NAME, reader.attention)
    with using_attention(model, lambda _: NAME), inference(model):
        yield reader
