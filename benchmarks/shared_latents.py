"""What latents that adjacent layers share lose really, beside latents of one layer, at equal bytes.

    python benchmarks/shared_latents.py reference:smollm2 --text wiki.txt python.txt --json out.json

An emulation in a dense model. A text is read in chunks, in which keys and values are exact. After a
chunk its keys (before RoPE) and values are encoded, decoded, and written over the cache's entries;
the first tokens stay exact. All ways to share take the same axes (`compression.basis.weighted`, by
gradients of the loss: nats, so that layers are commensurable), the same plan of bits over all
latents (`plan_tiers`), the same rounding, chunks and calibration. They differ in what one latent
holds: keys, or values, of a layer (`side`), both of a layer (`layer`, as the recipe `small` has),
both of two adjacent layers (`pair`; `pair-1` begins with the second layer), of three (`triple`);
`pair-sides` has keys of two layers, and values of two layers.

Losses are nats a token over the same chunks with nothing compressed, paired by window; `saved` is
the share of bytes that a way to share saves where `layer` loses as much.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from kvfold.calibration.statistics import Moment
from kvfold.calibration.text import calibration_windows
from kvfold.cli.bench_common import versions
from kvfold.cli.common import progress
from kvfold.compression.basis import Basis, weighted
from kvfold.compression.planning.bit_allocation import TierRule, cost, plan_tiers, predicted_loss
from kvfold.compression.training.rounded_cache import _coded
from kvfold.evaluation.perplexity import mean_and_se
from kvfold.hub.loading import load, load_tokenizer
from kvfold.layout import Tiers
from kvfold.ops.common.attention import rotate
from kvfold.utils.files import write_json
from kvfold.utils.progress import Progress, counter
from kvfold.utils.text import read_text
from kvfold.utils.tokens import windows

EXACT = 4  # first tokens of a text, which are never compressed
UNITS = ((8, 16), (4, 32), (2, 64))  # bits, and numbers that a tier of them is a multiple of
Part = tuple[int, str]  # a layer, and "k" or "v"
Samples = Mapping[Part, Tensor]  # [N, Hk * d] each, of the same tokens


def latents_of(sharing: str, layers: int) -> list[list[Part]]:
    """What each latent of a way to share holds."""
    sizes = {"side": 1, "layer": 1, "pair": 2, "pair-1": 2, "pair-sides": 2, "triple": 3}
    size, first = sizes[sharing], int(sharing == "pair-1")
    starts = [*([0] if first else []), *range(first, layers, size)]
    sets = [range(a, b) for a, b in zip(starts, [*starts[1:], layers], strict=True)]
    if sharing in ("side", "pair-sides"):
        return [[(i, side) for i in members] for members in sets for side in "kv"]
    return [[(i, side) for i in members for side in "kv"] for members in sets]


@dataclass(frozen=True)
class Latent:
    """Encodes numbers of several parts together. tiers: None stores all numbers in fp16."""

    parts: Sequence[Part]
    basis: Basis
    tiers: Tiers | None

    @cached_property
    def maps(self) -> tuple[Tensor, Tensor, Tensor]:
        """down, up [n, r] and the mean [n]."""
        rank = self.basis.width if self.tiers is None else sum(width for width, _ in self.tiers)
        down, up = self.basis.truncated(rank)
        return down.float(), up.float(), self.basis.mean.float()

    def decoded(self, x: Tensor) -> Tensor:
        """Numbers [.., n] as they come back from the stored latent."""
        down, up, mean = self.maps
        latent = (x - mean) @ down
        latent = latent.half().float() if self.tiers is None else _coded(latent, self.tiers)
        return latent @ up.mT + mean


@contextmanager
def recorded(model: Any) -> Iterator[dict[Part, Tensor]]:
    """Keys before RoPE and values [B, T, Hk * d] of the model's last call."""
    seen: dict[Part, Tensor] = {}
    hooks = [
        getattr(layer.self_attn, f"{side}_proj").register_forward_hook(
            lambda _m, _i, out, part=(index, side): seen.__setitem__(part, out)
        )
        for index, layer in enumerate(model.model.layers)
        for side in "kv"
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def calibrate(
    model: Any, ids: Tensor, shown: Progress | None = None
) -> tuple[Samples, Samples, Samples]:
    """Numbers, their gradients, of the summed loss of labels drawn from the model's predictions,
    and the mean numbers [Hk * d] of windows' first tokens. ids: int64 [windows, tokens]. Numbers
    and gradients leave out the tokens that stay exact."""
    model.requires_grad_(False)
    done = counter(shown, "calibration windows", len(ids))
    make = torch.Generator().manual_seed(0)
    numbers: dict[Part, list[Tensor]] = {}
    gradients: dict[Part, list[Tensor]] = {}
    first: dict[Part, list[Tensor]] = {}
    with recorded(model) as seen:
        for row in ids:
            embedded = model.get_input_embeddings()(row[None]).requires_grad_()
            logits = model(inputs_embeds=embedded, use_cache=False).logits[0].float()
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=make)[:, 0]
            loss = F.cross_entropy(logits, drawn, reduction="sum")
            for part, grad in zip(seen, torch.autograd.grad(loss, [*seen.values()]), strict=True):
                numbers.setdefault(part, []).append(seen[part].detach()[0, EXACT:])
                gradients.setdefault(part, []).append(grad[0, EXACT:])
                first.setdefault(part, []).append(seen[part].detach()[0, 0])
            done()
    means = {part: torch.stack(x).mean(0) for part, x in first.items()}
    joined = ({part: torch.cat(x) for part, x in of.items()} for of in (numbers, gradients))
    return next(joined), next(joined), means


def basis_of(parts: Sequence[Part], numbers: Samples, gradients: Samples, first: Samples) -> Basis:
    """As the recipe `small` builds it. Its direction for the first token is needed although that
    token stays exact: others have keys and values much like it."""
    x, g = (torch.cat([of[part] for part in parts], 1) for of in (numbers, gradients))
    sink = torch.cat([first[part] for part in parts]).double()
    moment = Moment.of(x, g.norm(dim=1))
    basis = weighted(moment.covariance(), Moment.of(g).raw(), moment.mean(), sink)
    return basis.measured(Moment.of(x).covariance())


def planned(
    latents: Sequence[Sequence[Part]], bases: Sequence[Basis], bits: int
) -> tuple[list[Latent], dict[str, float]]:
    """Latents in at most `bits` a token, scales included; with their bytes and predicted loss."""
    rules = [
        TierRule(width=x.width, units=UNITS, max_rank=x.width, partial_last=True) for x in bases
    ]
    tiers = plan_tiers([x.singular for x in bases], bits, rules)
    made = [Latent(*x) for x in zip(latents, bases, tiers, strict=True)]
    lost = sum(predicted_loss(x.singular, y) for x, y in zip(bases, tiers, strict=True))
    return made, {"bytes_per_token": sum(map(cost, tiers)) / 8, "predicted_nats": lost}


def overwrite(
    model: Any, cache: Any, seen: Samples, latents: Sequence[Latent], start: int, end: int
) -> None:
    """Write what latents give back over the cache's entries of tokens `start` to `end`, of which
    `seen` has keys before RoPE and values."""
    first = max(start, EXACT)
    positions = torch.arange(first, end)[None]
    for latent in latents:
        x = torch.cat([seen[part][:, first - start : end - start] for part in latent.parts], -1)
        for (layer, side), y in zip(
            latent.parts, latent.decoded(x).chunk(len(latent.parts), -1), strict=True
        ):
            stored = cache.layers[layer].keys if side == "k" else cache.layers[layer].values
            y = y.unflatten(-1, (stored.shape[1], -1)).transpose(1, 2)
            if side == "k":
                cos, sin = model.model.rotary_emb(y, positions)
                y = rotate(y, cos[:, None], sin[:, None])
            stored[:, :, first:end] = y


@torch.no_grad()
def losses(model: Any, ids: Tensor, latents: Sequence[Latent], chunk: int) -> Tensor:
    """Nats a token of each window of ids [B, T]."""
    cache, total = DynamicCache(), torch.zeros(len(ids), dtype=torch.float64)
    with recorded(model) as seen:
        for start in range(0, ids.shape[1], chunk):
            part = ids[:, start : start + chunk]
            logits = model(part, cache=cache, use_cache=True).logits
            labels = ids[:, start + 1 : start + chunk + 1]
            found = F.cross_entropy(
                logits[:, : labels.shape[1]].mT.float(), labels, reduction="none"
            )
            total += found.double().sum(1)
            overwrite(model, cache, seen, latents, start, start + part.shape[1])
    return total / (ids.shape[1] - 1)


def spread(x: Tensor, count: int) -> Tensor:
    """`count` rows of x, or all, evenly spread."""
    count = min(count, len(x))
    return x[torch.arange(count) * len(x) // count]


def lost(rows: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> dict[str, Any]:
    """Of each text, nats a token over `base`, with their standard errors and windows."""
    found = {}
    for text, x in rows.items():
        difference = (x - base[text][: len(x)]).tolist()
        mean, se = mean_and_se(difference)
        found[text] = {"nats": mean, "se": se, "windows": difference}
    return found


def saved_bytes(rows: Sequence[dict[str, Any]], text: str) -> dict[str, float]:
    """By sharing and factor, the share of bytes that it saves where `layer` loses as much, between
    whose neighbouring rows the logarithm of the loss is interpolated."""
    layer = sorted(
        (math.log(x["lost"][text]["nats"]), x["bytes_per_token"])
        for x in rows
        if x["sharing"] == "layer" and x["lost"][text]["nats"] > 0
    )
    found = {}
    for row in rows:
        nats = row["lost"][text]["nats"]
        for (low, most), (high, least) in pairwise(layer):
            if row["sharing"] != "layer" and nats > 0 and low <= math.log(nats) <= high:
                share = (math.log(nats) - low) / (high - low)
                alone = most + share * (least - most)
                name = f"{row['sharing']} {row['factor']:g}x"
                found[name] = 1 - row["bytes_per_token"] / alone
    return found


def measure(
    model: Any,
    texts: Mapping[str, Tensor],
    calib: Tensor,
    settings: Sequence[tuple[str, float]],
    chunk: int,
    batch: int,
    save: Callable[[dict[str, Any]], None],
    shown: Progress | None = None,
) -> dict[str, Any]:
    """texts, calib: int64 [windows, tokens]. settings: ways to share, and how many times smaller
    than 16 bits a number. `save` gets the report after each of them."""
    layers, width = model.config.num_hidden_layers, model.model.layers[0].self_attn.k_proj
    full = 16 * 2 * layers * width.out_features

    def run(latents: Sequence[Latent], count: int | None = None) -> dict[str, Tensor]:
        return {
            name: torch.cat([losses(model, x, latents, chunk) for x in ids[:count].split(batch)])
            for name, ids in texts.items()
        }

    numbers, gradients, first = calibrate(model, calib, shown)
    done = counter(shown, "settings", len(settings) + 2)
    base = run([])
    done()
    report: dict[str, Any] = {"nats": {name: float(x.mean()) for name, x in base.items()}}
    rows: list[dict[str, Any]] = []
    saved: dict[str, dict[str, float]] = {}
    bases: dict[tuple[Part, ...], Basis] = {}
    measured: dict[tuple[str, float], dict[str, Tensor]] = {}

    def bases_of(latents: Sequence[Sequence[Part]]) -> list[Basis]:
        for parts in map(tuple, latents):
            if parts not in bases:
                bases[parts] = basis_of(parts, numbers, gradients, first)
        return [bases[tuple(parts)] for parts in latents]

    layer = latents_of("layer", layers)
    whole = [Latent(*x, None) for x in zip(layer, bases_of(layer), strict=True)]
    report["fp16 latents"] = lost(run(whole, batch), base)
    done()
    for sharing, factor in settings:
        latents = latents_of(sharing, layers)
        made, about = planned(latents, bases_of(latents), int(full / factor))
        measured[sharing, factor] = found = run(made)
        row: dict[str, Any] = {"sharing": sharing, "factor": factor} | about
        row["lost"] = lost(found, base)
        if ("layer", factor) in measured and sharing != "layer":
            row["over_layer"] = lost(found, measured["layer", factor])
        row["tiers"] = [x.tiers for x in made]
        rows.append(row)
        nats = ", ".join(f"{k} {v['nats']:.4f} ± {v['se']:.4f}" for k, v in row["lost"].items())
        print(f"{sharing} {factor:g}x, predicted {about['predicted_nats']:.4f}: {nats}", flush=True)
        done()
        saved = {name: saved_bytes(rows, name) for name in texts}
        save(report | {"rows": rows, "saved": saved})
    return report | {"rows": rows, "saved": saved}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--calib", nargs="+", help="files; the packaged text without")
    parser.add_argument("--calib-tokens", type=int, default=32768)
    parser.add_argument("--sharing", nargs="+", default=["layer", "pair"])
    parser.add_argument("--factors", nargs="+", type=float, default=[4.0, 8.0, 16.0])
    parser.add_argument("--also", nargs="*", default=[], metavar="SHARING:FACTOR")
    parser.add_argument("--windows", type=int, default=12, help="of each text, at least 2")
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.windows < 2:
        parser.error(f"--windows must be at least 2 for standard errors, got {given.windows}")
    model = load(given.model, dtype=torch.float32, device="cpu")
    tokenizer = load_tokenizer(given.model)
    texts = {
        Path(x).stem: spread(windows(tokenizer, read_text(x), given.ctx), given.windows)
        for x in given.text
    }
    calib = calibration_windows(tokenizer, model.config, given.calib, given.calib_tokens)
    settings = [(sharing, factor) for factor in given.factors for sharing in given.sharing]
    settings += [(x.split(":")[0], float(x.split(":")[1])) for x in given.also]
    about = {
        "benchmark": "shared latents",
        "model": given.model,
        "calib": given.calib or "packaged",
        "calib_tokens": calib.numel(),
        "windows": {name: len(x) for name, x in texts.items()},
        "ctx": given.ctx,
        "chunk": given.chunk,
        "versions": versions("cpu"),
    }

    def save(report: dict[str, Any]) -> None:
        if given.json:
            write_json(given.json, about | report)

    with progress() as shown:
        measure(model, texts, calib, settings, given.chunk, given.batch, save, shown)


if __name__ == "__main__":
    main()
