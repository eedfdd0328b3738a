"""What a cache that stock attention kernels read loses: one rank for all heads, in bf16 or fp8.

    python benchmarks/portable.py --text wiki.txt --json portable.json

Keys after RoPE and values of every head by itself, all with the same rank, a multiple of 8, have
the shape of a model with smaller heads: any kernel of attention reads them. fp8 is e4m3, rounded to
the nearest and saturated, with scale 1 (what vLLM does unless it is told scales) or with one scale
for the keys and one for the values of a layer, by their largest number in calibration text. Beside
them `swift` at the same bytes, whose planned bits need kvfold's kernels, and fp8 alone. All of them
are rounded where transformers' cache stores them, so this runs on a CPU and on any GPU.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import quality
from kvfold import recipes
from kvfold.compression.compressor import Compressor, shared_statistics
from kvfold.compression.training.rounded_cache import round_to_bits
from kvfold.config import Recipe
from kvfold.evaluation.dense import DenseSession, inference
from kvfold.evaluation.perplexity import (
    PerplexityResult,
    paired_difference,
    window_perplexity,
)
from kvfold.layout import Latent, LayerSpec
from kvfold.layout.pages import cache_layout
from kvfold.maps.attach import attach_maps, detach
from kvfold.maps.compress import layer_maps
from kvfold.maps.family import attention_family
from kvfold.maps.layer_maps import Maps
from kvfold.maps.layers import attention_layers
from kvfold.maps.plain import measured_means, plain_maps
from kvfold.maps.selection import select_layers

PORTABLE = Recipe(name="portable", basis="post", ranks="uniform", gradients=True)
SHARES = {"bf16": (0.5,), "fp8": (0.75, 0.625, 0.5)}  # of a head's numbers
BITS = {"bf16": 16, "fp8": 8}
FP8 = torch.float8_e4m3fn
MOST = torch.finfo(FP8).max

Scales = tuple[float, float]  # of keys and of values
Code = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # stored keys and values, rounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row. share: of a head's numbers (None: all, without maps); factor: how many times smaller
    swift makes the cache; dtype: what numbers are stored in; scaled: fp8 has a scale for each
    layer's keys and values; means: constants are not stored."""

    name: str
    share: float | None = None
    factor: float | None = None
    dtype: str = "fp8"
    scaled: bool = False
    means: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rounded(Maps):
    """Maps whose stored keys and values are rounded."""

    code: Code

    @classmethod
    def of_maps(cls, maps: Maps, code: Code) -> "Rounded":
        return cls(**maps.tensors(), code=code)

    def stored(self, k: Tensor, v: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.code(*super().stored(k, v, positions))


def cases() -> Iterator[Case]:
    for scaled, suffix in ((False, ""), (True, ", scaled")):
        yield Case(name=f"fp8{suffix}", scaled=scaled)
        yield Case(name=f"fp8 without means{suffix}", scaled=scaled, means=True)
    factors = {16 / BITS["fp8"]}
    for dtype, shares in SHARES.items():
        for share in shares:
            name = f"portable {share:g} {dtype}"
            yield Case(name=name, share=share, dtype=dtype)
            if dtype == "fp8":
                yield Case(name=f"{name}, scaled", share=share, scaled=True)
            factors.add(16 / BITS[dtype] / share)
    for factor in sorted(factors):
        yield Case(name=f"swift {factor:.3g}x", factor=factor)


def in_dtype(dtype: str, scales: Scales) -> Code:
    """Rounds stored keys and values to bf16, or to fp8 with these scales."""

    def rounded(x: Tensor, scale: float) -> Tensor:
        if dtype == "bf16":
            return x.bfloat16().to(x.dtype)
        return (x / scale).clamp(-MOST, MOST).to(FP8).to(x.dtype) * scale

    return lambda k, v: (rounded(k, scales[0]), rounded(v, scales[1]))


def in_bits(layer: LayerSpec) -> Code:
    """Rounds stored keys and values to a layer's planned bits."""

    def rounded(x: Tensor, latents: Sequence[Latent]) -> Tensor:
        stored = torch.zeros_like(x)
        for index, latent in enumerate(latents):
            one = dataclasses.replace(layer, latents=(latent,))
            stored[:, index, :, : latent.rank] = round_to_bits(x[:, index, :, : latent.rank], one)
        return stored

    return lambda k, v: (rounded(k, layer.key_latents), rounded(v, layer.value_latents))


class Bench(quality.Bench):
    """A model whose cache rounds what maps leave."""

    def calibrate(self) -> None:
        """The bases of both recipes, from one pass of calibration."""
        self.layers = attention_layers(self.model)
        chosen = select_layers(self.model.config, self.layers)
        self.names = [layer.name for layer in chosen.layers]
        family = attention_family(chosen.layers, {}, chosen.uncompressed)
        given = self.arguments
        how = {"calib": given.calib or None, "max_tokens": given.calib_tokens, "family": family}
        made = [
            Compressor(self.model, recipe, self.tokenizer, **how)
            for recipe in (PORTABLE, recipes.swift())
        ]
        statistics = shared_statistics(made, path=given.stats)
        self.portable, self.swift = (one.prepare(statistics) for one in made)
        means = dict(zip((x.name for x in self.layers), measured_means(self.model), strict=True))
        self.means = [means[name] for name in self.names]
        self.calibration = self.swift.compressor.windows()[:1]

    def row(self, case: Case) -> dict[str, Any]:
        maps, codes, bits = self._stored(case)
        result: dict[str, Any] = {**dataclasses.asdict(case), "bits": bits, "texts": {}}
        for name, ids in self.texts.items():
            measured = self._loss(maps, codes, ids)
            lost, error = paired_difference(measured, self.original[name])
            more = {"nll": measured.nll, "tokens": measured.tokens}
            result["texts"][name] = {"lost": lost, "lost_se": error, **more}
        return result

    def measure_original(self) -> None:
        self.original = {name: self._loss([], [], ids) for name, ids in self.texts.items()}

    def _stored(self, case: Case) -> tuple[list[Maps], list[Code], float]:
        """Maps and how numbers are rounded, layer by layer, and bits of a number of the original's
        cache, scales of tokens included."""
        if case.factor is not None:
            spec = self.swift.plan_factor(case.factor)
            latents = self.swift.maps(spec)
            maps = [layer_maps(x, y) for x, y in zip(spec.layers, latents, strict=True)]
            bits = 16 * cache_layout(spec).kept_fraction
            return maps, [in_bits(layer) for layer in spec.layers], bits
        if case.share is None:
            zero = 1.0 if case.means else 0.0
            maps = [plain_maps(type(x)(*(part * zero for part in x))) for x in self.means]
            bits = float(BITS[case.dtype])
        else:
            spec = self.portable.plan(case.share, 8)
            ranks = {latent.rank for layer in spec.layers for latent in layer.latents}
            assert len(ranks) == 1, f"one rank a model, not {ranks}"
            latents = self.portable.maps(spec)
            maps = [layer_maps(x, y) for x, y in zip(spec.layers, latents, strict=True)]
            bits = BITS[case.dtype] * spec.kept_fraction
        scales = self._scales(maps) if case.scaled else [(1.0, 1.0)] * len(maps)
        return maps, [in_dtype(case.dtype, x) for x in scales], bits

    def _scales(self, maps: Sequence[Maps]) -> list[Scales]:
        """By which the largest stored key and value of a layer are fp8's largest number."""
        seen: list[list[float]] = [[0.0, 0.0] for _ in maps]

        def look(most: list[float], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            most[:] = [max(a, float(x.abs().max())) for a, x in zip(most, (k, v), strict=True)]
            return k, v

        self._loss(maps, [partial(look, most) for most in seen], self.calibration)
        return [(k / MOST or 1.0, v / MOST or 1.0) for k, v in seen]

    def _loss(self, maps: Sequence[Maps], codes: Sequence[Code], ids: Tensor) -> PerplexityResult:
        """Loss on windows [n, ctx] with these maps and this rounding; without both as it is."""
        rounded = [Rounded.of_maps(x, code) for x, code in zip(maps, codes, strict=True)]
        if rounded:
            attach_maps(self.model, self.layers, dict(zip(self.names, rounded, strict=True)))
        try:
            with inference(self.model):
                return window_perplexity(partial(DenseSession, self.model), ids)[0]
        finally:
            if rounded:
                detach(self.model)


def main() -> None:
    arguments = quality.parser(__doc__, model="reference:smollm2", ctx=1024, windows=8).parse_args()
    bench = Bench(arguments)
    wanted = bench.wanted(cases())
    bench.calibrate()
    bench.measure_original()
    for row in bench.run(wanted, bench.row):
        figures = (f"{x}: {y['lost']:.4f} ± {y['lost_se']:.4f}" for x, y in row["texts"].items())
        print(f"{row['name']}: {row['bits']:.2f} bits, lost {', '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
