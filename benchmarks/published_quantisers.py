"""OSCAR's and TurboQuant's ways to store keys and values, rounded in plain PyTorch.

kvfold has no kernels and no page format for them: here numbers are rounded as each method stores
them, and `stored_bits` counts codes, scales and norms. Names (`NAMES`):

- oscar-2: OSCAR (arXiv 2605.17757, github.com/FutureMLS-Lab/OSCAR). Keys after RoPE are rotated by
  the eigenvectors of the queries' second moment, values by those of the values' second moment,
  weighted by their keys' scores; then by a Hadamard matrix. One vector of a head is clipped at the
  0.96 (keys) or 0.92 (values) quantile of its magnitudes and has 2-bit codes, a scale and a zero
  point. A layer's heads share their two rotations. The published permutation of the rotated numbers
  changes nothing where one scale serves a whole head, and is left out.
- oscar-heads-2: the same with rotations of every KV head, as its later release has them
  (`format_version: 2`).
- turboquant-2.5, turboquant-3.5: TurboQuant for squared error (arXiv 2504.19874). A vector's norm,
  then a random rotation of its direction, and codes of the levels that are best for a Gaussian. The
  half of a head's numbers with the largest second moments has a bit more, and a norm and a rotation
  of its own. The paper chooses these numbers by earlier work's rule, which the text leaves open:
  here they are those of the calibration text.
- turboquant-vllm-4, turboquant-vllm-3: `turboquant_4bit_nc` and `turboquant_3bit_nc` of vLLM 0.25.
  Keys as above without the halves, with their norm corrected; values with a scale and a zero point,
  unrotated; the first and the last two layers in 16 bits.

Exact first and last tokens are not theirs to choose here: see `windowed.Window`.
Shapes: Hq / Hk query / KV heads, T tokens, d head dim, n windows.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.calibration.text import calibration_windows
from kvfold.compression.codebooks import k_means
from kvfold.evaluation.dense import inference
from kvfold.maps.layers import using_attention
from kvfold.ops.common.rotation import rotation

WATCH = "kvfold_benchmark_statistics"
CALIBRATION_TOKENS = 16384
KEY_CLIP, VALUE_CLIP = 0.96, 0.92  # OSCAR's, of Qwen3-8B
GROUP = 32  # numbers that share KIVI's scale and zero point
DENSE = 2  # layers at either end that vLLM's TurboQuant leaves in 16 bits


@dataclass
class Moments:
    """Second moments of one layer, fp64: queries [Hk, d, d], summed over those of a KV head; values
    [Hk, d, d], weighted by their keys' scores; squares of keys and of values [Hk, d]; and the
    weights' sums [Hk]."""

    queries: Tensor
    values: Tensor
    key_squares: Tensor
    value_squares: Tensor
    weights: Tensor

    @classmethod
    def zeros(cls, heads: int, d: int, device: torch.device) -> "Moments":
        def zero(*shape: int) -> Tensor:
            return torch.zeros(heads, *shape, dtype=torch.float64, device=device)

        return cls(zero(d, d), zero(d, d), zero(d), zero(d), zero())


class Quantiser(ABC):
    """How keys after RoPE and values [Hk, T, d] of a layer are stored. stored_bits: of a number,
    with all that is stored beside codes, the mean over keys and values of all layers."""

    stored_bits: float

    @abstractmethod
    def keys(self, layer: int, x: Tensor) -> Tensor:
        """Keys as they are read again."""

    @abstractmethod
    def values(self, layer: int, x: Tensor) -> Tensor:
        """Values as they are read again."""


class Oscar(Quantiser):
    """Rotated and clipped vectors with 2-bit codes. by_head: rotations are a head's own."""

    bits = 2

    def __init__(self, layers: Sequence[Moments], by_head: bool = False) -> None:
        d = layers[0].key_squares.shape[1]
        hadamard = rotation(d)
        pairs = [(x.queries, x.values) for x in layers]
        if not by_head:
            pairs = [(queries.mean(0), values.mean(0)) for queries, values in pairs]
        self.key_rotations = [spectral(x, hadamard) for x, _ in pairs]
        self.value_rotations = [spectral(x, hadamard) for _, x in pairs]
        self.stored_bits = self.bits + 32 / d

    def keys(self, layer: int, x: Tensor) -> Tensor:
        return self._rotated(x, self.key_rotations[layer], KEY_CLIP)

    def values(self, layer: int, x: Tensor) -> Tensor:
        return self._rotated(x, self.value_rotations[layer], VALUE_CLIP)

    def _rotated(self, x: Tensor, turn: Tensor, clip: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        turn = turn.to(wide)
        y = x.to(wide) @ turn
        most = y.abs().kthvalue(int(clip * y.shape[-1]) + 1, -1, keepdim=True).values
        return (uniform(y.clamp(-most, most), self.bits) @ turn.mT).to(x.dtype)


def spectral(moment: Tensor, hadamard: Tensor) -> Tensor:
    """Eigenvectors of second moments [.., d, d], then a Hadamard rotation, fp32."""
    vectors = torch.linalg.eigh((moment + moment.mT) / 2).eigenvectors
    return (vectors @ hadamard.to(vectors)).float()


def uniform(x: Tensor, bits: int) -> Tensor:
    """Round x [.., d] to even steps between its least and its largest number. The step and the
    least number are stored in fp16."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (high - low).clamp(min=1e-8) / (2**bits - 1)
    codes = ((x - low) / scale + 0.5).floor().clamp(0, 2**bits - 1)
    return codes * scale.half().to(x) + low.half().to(x)


class TurboQuant(Quantiser):
    """Random rotations and a Gaussian's levels; bits: of a number without norms, such as 2.5."""

    def __init__(self, layers: Sequence[Moments], bits: float) -> None:
        d = layers[0].key_squares.shape[1]
        self.widths = [math.ceil(bits), math.floor(bits)] if bits % 1 else [int(bits)]
        self.key_orders = [x.key_squares.argsort(-1, descending=True) for x in layers]
        self.value_orders = [x.value_squares.argsort(-1, descending=True) for x in layers]
        self.stored_bits = sum(self.widths) / len(self.widths) + 16 * len(self.widths) / d

    def keys(self, layer: int, x: Tensor) -> Tensor:
        return self._ordered(x, self.key_orders[layer])

    def values(self, layer: int, x: Tensor) -> Tensor:
        return self._ordered(x, self.value_orders[layer])

    def _ordered(self, x: Tensor, order: Tensor) -> Tensor:
        """order: of a head's numbers, int64 [Hk, d]."""
        where = order[:, None].expand_as(x)
        parts = x.float().gather(-1, where).chunk(len(self.widths), -1)
        pairs = enumerate(zip(parts, self.widths, strict=True))
        rounded = [on_sphere(y, bits, seed) for seed, (y, bits) in pairs]
        return torch.empty_like(x).scatter(-1, where, torch.cat(rounded, -1).to(x.dtype))


def on_sphere(x: Tensor, bits: int, seed: int = 0, correct: bool = False) -> Tensor:
    """Round the direction of x fp32 [.., n] to a Gaussian's levels in rotated axes, and its norm to
    fp16. correct: let the rounded direction have norm 1."""
    turn, (levels, borders) = rotation(x.shape[-1], seed).to(x), gaussian(bits, x.device)
    norm = x.norm(dim=-1, keepdim=True)
    spread = x.shape[-1] ** 0.5
    rounded = levels[torch.bucketize((x / norm.clamp(min=1e-12)) @ turn * spread, borders)] / spread
    if correct:
        rounded = rounded / rounded.norm(dim=-1, keepdim=True)
    return rounded @ turn.mT * norm.half().float()


@lru_cache
def gaussian(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The levels [2^bits] of least squared error for a unit Gaussian (Max 1960), and the borders
    between them."""
    grid = torch.linspace(-8, 8, 2**17, dtype=torch.float64)
    levels = k_means(grid, (-grid.square() / 2).exp(), 2**bits)
    levels = (levels - levels.flip(0)) / 2
    levels = levels.float().to(device)
    return levels, (levels[1:] + levels[:-1]) / 2


class VLLMTurboQuant(Quantiser):
    """TurboQuant as vLLM 0.25 stores it, in whole bits."""

    def __init__(self, layers: Sequence[Moments], bits: int) -> None:
        d, count = layers[0].key_squares.shape[1], len(layers)
        self.bits, ends = bits, min(DENSE, count // 2)
        self.dense = {*range(ends), *range(count - ends, count)}
        coarse = bits + (16 + 32) / 2 / d
        self.stored_bits = coarse + (16 - coarse) * len(self.dense) / count

    def keys(self, layer: int, x: Tensor) -> Tensor:
        if layer in self.dense:
            return x
        return on_sphere(x.float(), self.bits, correct=True).to(x.dtype)

    def values(self, layer: int, x: Tensor) -> Tensor:
        return x if layer in self.dense else uniform(x.float(), self.bits).to(x.dtype)


class Kivi(Quantiser):
    """KIVI without its recent tokens, which are a `Window` of kind residual: keys by channel in
    groups of GROUP tokens, values by token in groups of GROUP numbers. All T tokens are the first
    of a sequence; the last group, if it is not full, is rounded as it stands."""

    def __init__(self, bits: int) -> None:
        self.bits, self.stored_bits = bits, bits + 32 / GROUP

    def keys(self, layer: int, x: Tensor) -> Tensor:
        parts = x.float().split(GROUP, 1)
        return torch.cat([uniform(y.mT, self.bits).mT for y in parts], 1).to(x.dtype)

    def values(self, layer: int, x: Tensor) -> Tensor:
        parts = x.float().split(GROUP, -1)
        return torch.cat([uniform(y, self.bits) for y in parts], -1).to(x.dtype)


NAMES: dict[str, Callable[[Sequence[Moments]], Quantiser]] = {
    "oscar-2": Oscar,
    "oscar-heads-2": lambda layers: Oscar(layers, by_head=True),
    "turboquant-2.5": lambda layers: TurboQuant(layers, 2.5),
    "turboquant-3.5": lambda layers: TurboQuant(layers, 3.5),
    "turboquant-vllm-3": lambda layers: VLLMTurboQuant(layers, 3),
    "turboquant-vllm-4": lambda layers: VLLMTurboQuant(layers, 4),
}


def calibrated(model: Any, tokenizer: Any, max_tokens: int = CALIBRATION_TOKENS) -> list[Moments]:
    """The moments of a model's layers on the packaged calibration text."""
    return moments(model, calibration_windows(tokenizer, model.config, None, max_tokens))


def moments(model: Any, ids: Tensor) -> list[Moments]:
    """The moments of a model's layers on windows of token ids [n, T]. It reads them twice: scores
    that weight values need the queries of all windows."""
    found = dict[int, Moments]()

    def first(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        heads, _, d = k.shape
        if layer not in found:
            found[layer] = Moments.zeros(heads, d, k.device)
        q = q.unflatten(0, (heads, -1)).flatten(1, 2)
        found[layer].queries += q.mT @ q
        found[layer].key_squares += k.square().sum(1)
        found[layer].value_squares += v.square().sum(1)

    def second(layer: int, _: Tensor, k: Tensor, v: Tensor) -> None:
        scores = ((k @ found[layer].queries) * k).sum(-1, keepdim=True)
        found[layer].values += v.mT @ (v * scores)
        found[layer].weights += scores.sum((1, 2))

    for seen in (first, second):
        with watched(model, seen), inference(model):
            for window in ids:
                model.base_model(window[None].to(model.device), use_cache=False)
    for x in found.values():
        x.values /= x.weights[:, None, None]
    return [found[layer] for layer in sorted(found)]


@contextmanager
def watched(model: Any, seen: Callable[[int, Tensor, Tensor, Tensor], None]) -> Iterator[None]:
    """Call `seen` with each layer's index, queries [Hq, T, d], keys and values [Hk, T, d], fp64."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **named: Any
    ) -> Any:
        seen(module.layer_idx, query[0].double(), key[0].double(), value[0].double())
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, None, **named)

    ALL_ATTENTION_FUNCTIONS.register(WATCH, attention)
    with using_attention(model, lambda _: WATCH):
        yield
