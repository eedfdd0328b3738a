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

NAME = "kvfold_benchmark_windows"
KINDS = ("whole", "stored", "stored8", "residual")


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

    def near(self, new: int, count: int) -> Tensor:
        """Which of `count` tokens the last `new` see exactly, bool [T, S]."""
        at = torch.arange(count)
        queries = at[count - new :, None]
        if self.kind == "residual":
            return queries // self.tokens == at // self.tokens
        return (queries - at < self.tokens) | (at < self.first)

    def smaller(self, spec: CacheSpec, bits: int | None, context: int) -> float:
        """How many times fewer bits than 16 a number a context of so many tokens takes. A residual
        has memory for all of its tokens, of which half is empty on average. bits: of all numbers;
        None: as planned."""
        numbers = spec.geometry.full_numbers
        entries = cache_layout(spec, bits=bits).bits_per_token
        exact = 16.0 * numbers
        if self.kind != "whole":
            exact = cache_layout(spec, bits=8 if self.kind == "stored8" else 16).bits_per_token
        count = min(context, self.tokens + self.first)
        rest = context - ((count + 1) / 2 if self.kind == "residual" else count)
        return 16 * numbers * context / (count * exact + rest * entries)


class Layer:
    """One layer's attention. bits: of its numbers; None: as planned. maps: of its entries; without
    them entries are keys and values less their `mean` [R], as in the engine. past: entries, keys
    and values of the P tokens before."""

    def __init__(
        self,
        spec: LayerSpec,
        bits: int | None,
        window: Window,
        maps: LayerProjections | None,
        mean: Tensor,
    ) -> None:
        self.spec, self.bits, self.window, self.maps, self.mean = spec, bits, window, maps, mean
        self.past: tuple[Tensor, ...] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, remember: bool) -> Tensor:
        """q [Hq, T, d], k and v [Hk, T, d] -> [Hq, T, d]. remember: these tokens come before those
        of later calls."""
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
        coarse = self.read(queries, in_bits(entries, self.spec, self.bits))
        near = self.window.near(q.shape[1], len(entries))
        hidden = torch.ones(near.shape, dtype=torch.bool).triu(1 + before)
        outputs, groups = [], len(q) // len(k)
        for head in range(len(k)):
            own = slice(head * groups, (head + 1) * groups)
            near_scores, scores = (x[0][own] @ x[1][head].mT * scale for x in (exact, coarse))
            scores = torch.where(near, near_scores, scores)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outputs.append((weights * near) @ exact[2][head] + (weights * ~near) @ coarse[2][head])
        return torch.cat(outputs)

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
        out = layer.attend(*inputs, named["scaling"], self.remembers)
        return out.transpose(0, 1)[None], None


def spec_of(model: Any, sidecar: Sidecar | None) -> CacheSpec:
    """The numbers that pages store of every token."""
    if sidecar is not None:
        return served_spec(sidecar.spec)
    return with_full_rank_latents(plain_spec(family_of(model.config).geometry(model.config)))


@contextmanager
def windowed(
    model: Any, sidecar: Sidecar | None, bits: int | None, window: Window
) -> Iterator[Reader]:
    """Let a model without sliding windows attend so. bits: of all numbers; None: as planned."""
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
    layers = [Layer(x, bits, window, y, mean) for x, y, mean in parts]
    reader = Reader(model, layers)
    ALL_ATTENTION_FUNCTIONS.register(NAME, reader.attention)
    with using_attention(model, lambda _: NAME), inference(model):
        yield reader
