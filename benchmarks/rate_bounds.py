"""How many bits other codes, shared latents and means by position could save at most.

    python benchmarks/rate_bounds.py reference:smollm2 --text wiki.txt --json rate-bounds.json

Keys (before RoPE) and values of all layers on a text, weighted so that a squared error counts what
it does to scores (with queries at random distances) and to the outputs of W_O, and each side of a
layer scaled to a variance of one. First tokens, which have a direction of their own, are left out.
One half of the windows gives means and axes, the other half is measured.

rates: distortion of ideal codes for Gaussians, which drop what is not worth a bit (reverse
    water-filling), at 4, 2 and 1 bits a number, and the bits a number with which others reach the
    distortion of `layer`: axes of each head, of keys and of values of a layer, of both together
    (`layer`), and of both of two adjacent layers.
codes: distortion of numbers of unit variance, the first of a layer's axes, at 2 and 1 bits: the
    engine's rounding, equal steps with an ideal entropy code, trained codebooks, and the limit of
    Shannon.
positions: variance that means by position explain beyond one mean.
outputs: error of attention outputs, without the first token's part, in half, a quarter and an
    eighth of a head's dimensions, by axes of values and by axes of these outputs.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.cli.bench_common import versions
from kvfold.compression.training.rounded_cache import _tier
from kvfold.hub.loading import load, load_tokenizer
from kvfold.utils.files import write_json
from kvfold.utils.text import read_text
from kvfold.utils.tokens import windows

BITS = (4.0, 2.0, 1.0)  # a number, on average
TIER = 64  # numbers that are rounded together
ROUNDS = 12  # of k-means


def root(moment: Tensor) -> Tensor:
    """The symmetric square root of a positive matrix [d, d]."""
    values, axes = torch.linalg.eigh(moment.double())
    return (axes * values.clamp(min=0).sqrt() @ axes.mT).float()


class Recorder:
    """The inputs of attention, by layer: queries, keys and values [T, heads * d] before RoPE."""

    def __init__(self, model: Any) -> None:
        self.parts: list[dict[str, list[Tensor]]] = []
        for layer in model.model.layers:
            of_layer: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
            self.parts.append(of_layer)
            for name, kept in of_layer.items():
                module = getattr(layer.self_attn, f"{name}_proj")
                module.register_forward_hook(
                    lambda _m, _i, out, kept=kept: kept.append(out[0].float())
                )

    def clear(self) -> None:
        for part in self.parts:
            for kept in part.values():
                kept.clear()

    def joined(self, layer: int, name: str) -> Tensor:
        """[T, n] of all windows, without first tokens."""
        return torch.cat([x[1:] for x in self.parts[layer][name]])


def rotated(q: Tensor, angles: Tensor, distances: Tensor) -> Tensor:
    """Queries [T, h, d] as keys before RoPE see them from these distances [T]."""
    turn = distances[:, None, None] * angles
    a, b = q.chunk(2, -1)
    return torch.cat((a * turn.cos() - b * turn.sin(), a * turn.sin() + b * turn.cos()), -1)


def weighted(model: Any, recorder: Recorder, index: int) -> tuple[Tensor, Tensor]:
    """Keys and values [T, Hk * d] of a layer, weighted."""
    config, attention = model.config, model.model.layers[index].self_attn
    kv_heads, group = config.num_key_value_heads, attention.num_key_value_groups
    q, k, v = (recorder.joined(index, x) for x in "qkv")
    size = k.shape[1] // kv_heads
    angles = model.model.rotary_emb.inv_freq.float()
    make = torch.Generator().manual_seed(index)
    distances = torch.randint(0, 1024, (len(q),), generator=make).float()
    seen = rotated(q.view(len(q), -1, size), angles, distances).unflatten(1, (kv_heads, group))
    out = attention.o_proj.weight.float().unflatten(1, (kv_heads, group, size))
    keys, values = [], []
    for head in range(kv_heads):
        queries = seen[:, head].flatten(0, 1)
        columns = out[:, head].flatten(0, 1)
        keys.append(k.view(len(k), kv_heads, size)[:, head] @ root(queries.mT @ queries / len(q)))
        values.append(v.view(len(v), kv_heads, size)[:, head] @ root(columns.mT @ columns))
    return torch.cat(keys, 1), torch.cat(values, 1)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[: len(x) // 2], x[len(x) // 2 :]


def standard(x: Tensor) -> Tensor:
    """x without the mean of its first half, whose variance becomes one."""
    first, _ = halves(x)
    x = x - first.mean(0)
    return x / halves(x)[0].square().sum(1).mean().sqrt()


def axes_of(x: Tensor) -> Tensor:
    """Axes of the first half of x [T, n], the widest first."""
    first, _ = halves(x)
    return torch.linalg.eigh(first.mT @ first)[1].flip(1)


def variances(x: Tensor) -> Tensor:
    """Of the second half of x [T, n], along axes of the first."""
    return (halves(x)[1] @ axes_of(x)).square().mean(0).double()


def rate(spectrum: Tensor, level: float) -> float:
    """Bits of all numbers at a water level."""
    return float((spectrum / level).log2().clamp(min=0).sum() / 2)


def distortion(spectrum: Tensor, level: float) -> float:
    return float(spectrum.clamp(max=level).sum())


def level_at(wanted: float, measure: Any, low: float = 1e-12) -> float:
    """The level from `low` on at which a falling or rising measure is `wanted`."""
    high = 10.0
    rises = measure(high) > measure(low)
    for _ in range(80):
        middle = math.sqrt(low * high)
        if (measure(middle) > wanted) == rises:
            high = middle
        else:
            low = middle
    return math.sqrt(low * high)


def rates(layers: Sequence[tuple[Tensor, Tensor]], heads: int) -> dict[str, Any]:
    """See `rates` above; means over layers, or pairs of them."""
    spectra: dict[str, list[Tensor]] = {x: [] for x in ("head", "side", "layer", "pair")}
    for first in range(0, len(layers) - 1, 2):
        sides = [x for layer in layers[first : first + 2] for x in layer]
        by_head = [variances(y) for x in sides for y in x.chunk(heads, 1)]
        spectra["head"].append(torch.cat(by_head))
        spectra["side"].append(torch.cat([variances(x) for x in sides]))
        both = [torch.cat(sides[i : i + 2], 1) for i in (0, 2)]
        spectra["layer"].append(torch.cat([variances(x) for x in both]))
        spectra["pair"].append(variances(torch.cat(both, 1)))
    found: dict[str, Any] = {}
    for bits in BITS:
        rows: dict[str, Any] = {}
        targets = []
        for x in spectra["layer"]:
            level = level_at(bits * len(x), lambda y, x=x: rate(x, y))
            targets.append(distortion(x, level))
        for name, kind in spectra.items():
            used, lost = [], []
            for x, target in zip(kind, targets, strict=True):
                level = level_at(target, lambda y, x=x: distortion(x, y))
                used.append(rate(x, level) / len(x))
                own = level_at(bits * len(x), lambda y, x=x: rate(x, y))
                lost.append(distortion(x, own) / float(x.sum()))
            rows[name] = {"bits": mean(used), "error": mean(lost)}
        found[f"{bits:g}"] = rows
    return found


def mean(x: Sequence[float]) -> float:
    return sum(x) / len(x)


def codes(layers: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Mean squared error of numbers of unit variance by code; see `codes` above."""
    errors: dict[str, list[float]] = {}

    def add(name: str, x: Tensor, y: Tensor) -> None:
        errors.setdefault(name, []).append(float((x - y).square().mean()))

    for keys, values in layers[1::6]:
        both = torch.cat((keys, values), 1)
        numbers = both @ axes_of(both)[:, :TIER]
        numbers = numbers / halves(numbers)[0].square().mean(0).sqrt()
        train, test = halves(numbers)
        for bits in (2, 1):
            add(f"rounding, {bits} bits and its scale", test, _tier(test, bits))
            add(f"entropy code, {bits} bits", test, entropy_coded(train, test, bits))
        for bits, width, count in ((2, 2, 16), (2, 4, 256), (2, 6, 4096), (1, 8, 256), (1, 4, 16)):
            book = trained(train.reshape(-1, width), count)
            pieces = test.reshape(-1, width)
            add(
                f"codebook of {count} for {width}, {bits} bits", pieces, book[nearest(pieces, book)]
            )
    limits = {f"Gaussian limit, {bits} bits": 4.0**-bits for bits in (2, 1)}
    return {name: mean(x) for name, x in errors.items()} | limits


def entropy_coded(train: Tensor, test: Tensor, bits: float) -> Tensor:
    """test rounded to equal steps, so wide that an ideal entropy code takes `bits` a number.
    Frequencies and the centres of steps are those of train."""

    def code(x: Tensor, step: float) -> Tensor:
        return (x / step).round().long().clamp(-500, 500) + 500

    def bits_of(step: float) -> float:
        counts = code(train, step).flatten().bincount(minlength=1001) + 0.5
        return -float((counts / counts.sum()).log2()[code(test, step)].mean())

    step = level_at(bits, bits_of, low=0.02)  # all numbers are within 500 steps
    index = code(train, step).flatten()
    sums = torch.zeros(1001).index_add_(0, index, train.flatten())
    empty = (torch.arange(1001) - 500) * step
    count = index.bincount(minlength=1001)
    centres = torch.where(count > 0, sums / count.clamp(min=1), empty)
    return centres[code(test, step)]


def nearest(x: Tensor, book: Tensor) -> Tensor:
    norms = book.square().sum(1) / 2
    return torch.cat([(norms - part @ book.mT).argmin(1) for part in x.split(1 << 14)])


def trained(x: Tensor, count: int) -> Tensor:
    """A codebook [count, n] by k-means."""
    make = torch.Generator().manual_seed(0)
    x = x[torch.randperm(len(x), generator=make)[: 40 * count]]
    book = x[:count].clone()
    for _ in range(ROUNDS):
        index = nearest(x, book)
        sums = torch.zeros_like(book).index_add_(0, index, x)
        sizes = index.bincount(minlength=count)[:, None]
        book = torch.where(sizes > 0, sums / sizes.clamp(min=1), book)
    return book


def positions(layers: Sequence[tuple[Tensor, Tensor]], ctx: int) -> dict[str, float]:
    """Shares of variance, of all tokens and of those from the fifth on. ctx: of a window."""
    found: dict[str, list[float]] = {}
    bucket = torch.arange(1, ctx).log2().mul(2).long()
    for layer in layers:
        for side, x in zip(("keys", "values"), layer, strict=True):
            train, test = (y.view(-1, ctx - 1, x.shape[1]) for y in halves(x))
            count = int(bucket.max()) + 1
            means = torch.zeros(count, x.shape[1]).index_add_(0, bucket, train.mean(0))
            means = means / bucket.bincount(minlength=count)[:, None].clamp(min=1)
            for name, first in (("all", 0), ("later", 3)):
                y = test[:, first:]
                left = (y - means[bucket[first:]]).square().sum()
                found.setdefault(f"{side}, {name}", []).append(float(1 - left / y.square().sum()))
    return {name: mean(x) for name, x in found.items()}


def attention_outputs(model: Any, ids: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Of each layer, weighted values [T - 1, Hk, d] less their mean, and outputs [T - 1, Hq, d]."""
    recorder: Recorder = model.recorder
    recorder.clear()
    weights = model(ids[None], output_attentions=True).attentions
    for index, probabilities in enumerate(weights):
        attention = model.model.layers[index].self_attn
        group, heads = attention.num_key_value_groups, model.config.num_key_value_heads
        v = recorder.parts[index]["v"][-1]
        out = attention.o_proj.weight.float().unflatten(1, (heads, group, -1))
        roots = [root((y := out[:, h].flatten(0, 1)).mT @ y) for h in range(heads)]
        values = torch.stack([x @ r for x, r in zip(v.chunk(heads, 1), roots, strict=True)], 1)[1:]
        values = values - values.mean(0)
        spread = values.transpose(0, 1).repeat_interleave(group, 0)
        yield values, (probabilities[0, :, 1:, 1:].float() @ spread).transpose(0, 1), group


def outputs(model: Any, ids: Tensor) -> dict[str, float]:
    """Shares of the outputs' variance that are lost."""
    half = len(ids) // 2
    parts = [list(zip(*map(list, attention_outputs(model, x)), strict=True)) for x in ids[:half]]
    tests = [list(zip(*map(list, attention_outputs(model, x)), strict=True)) for x in ids[half:]]
    found: dict[str, list[float]] = {}
    for index in range(model.config.num_hidden_layers):
        group = parts[0][2][index]
        values = torch.cat([x[0][index] for x in parts])
        mixed = torch.cat([x[1][index] for x in parts])
        tested = torch.cat([x[1][index] for x in tests])
        for head in range(values.shape[1]):
            heads = slice(head * group, (head + 1) * group)
            of_values, of_outputs = values[:, head], mixed[:, heads].flatten(0, 1)
            left = tested[:, heads].flatten(0, 1)
            for name, x in (("values", of_values), ("outputs", of_outputs)):
                axes = torch.linalg.eigh(x.mT @ x)[1].flip(1)
                for part in (2, 4, 8):
                    kept = left @ axes[:, : axes.shape[1] // part]
                    share = 1 - float(kept.square().sum() / left.square().sum())
                    found.setdefault(f"{name}, 1/{part}", []).append(share)
    return {name: mean(x) for name, x in found.items()}


@torch.inference_mode()
def measure(model: Any, ids: Tensor) -> dict[str, Any]:
    """ids: int64 [windows, tokens]."""
    model.recorder = recorder = Recorder(model)
    for x in ids:
        model(x[None])
    layers = range(model.config.num_hidden_layers)
    entries = [tuple(map(standard, weighted(model, recorder, i))) for i in layers]
    pairs = [(x, y) for x, y in entries]
    result = {
        "rates": rates(pairs, model.config.num_key_value_heads),
        "codes": codes(pairs),
        "positions": positions(pairs, ids.shape[1]),
    }
    return result | {"outputs": outputs(model, ids[:4, :512])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    model = load(given.model, dtype=torch.float32, device="cpu")
    model.set_attn_implementation("eager")
    tokenizer = load_tokenizer(given.model)
    ids = windows(tokenizer, read_text(given.text), given.ctx, given.windows * given.ctx)
    result = measure(model, ids)
    print(json.dumps(result, indent=1))
    if given.json:
        about = {"benchmark": "rate bounds", "model": given.model, "windows": len(ids)}
        write_json(given.json, about | {"versions": versions("cpu")} | result)


if __name__ == "__main__":
    main()
