"""Time of a decode step on the CPU: transformers' own caches and the engine, step by step in turns.

    OMP_NUM_THREADS=2 python benchmarks/engine_speed.py --json speed.json

Every variant prefills the same prompts once. Then all take steps round by round, in an order drawn
anew for each, so that noise hits all alike. Bytes are those allocated for the cache: the tensors of
transformers' caches, the pages that sequences own. --memory runs each variant in a process of its
own instead and reports how far the peak rose above that of the loaded model.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from kvfold import recipes
from kvfold.cli.common import versions
from kvfold.compression.compressor import Compressor, Prepared, shared_statistics
from kvfold.config import Prefer
from kvfold.engine.api.llm import LLM
from kvfold.engine.requests.request import SamplingParams
from kvfold.hub.loading import load, load_tokenizer
from kvfold.models.copies import shared_copy
from kvfold.utils.files import write_json
from kvfold.utils.text import packaged, running
from kvfold.utils.tokens import windows
from kvfold.utils.versions import cache_argument

BASELINES = ("dynamic", "static", "static compiled")
SPEED = "swift-speed"  # as `kvfold compress` plans it by default: few layouts
RECIPES = ("small", "fast", "lean", "swift")
PLANNED = ("swift", SPEED)  # by --factor, bits included, the others by --keep
EVICT = {"evict": "kv-compress", "keep_tokens": 0.25}
SETTINGS: dict[str, dict[str, Any]] = {"": {}, " + 4 bits": {"bits": 4}}
SETTINGS[" + 4 bits + tokens 0.25"] = {"bits": 4, **EVICT}
NAMES = (
    *BASELINES,
    "engine",
    *(f"engine {recipe}{extra}" for recipe in (*RECIPES, SPEED) for extra in SETTINGS),
)
SPARE = 16  # tokens that the first sequences decode while the last ones prefill


class Variant(ABC):
    """One way to decode the prompts [B, T]: prefilled when made, then a token each a step."""

    @abstractmethod
    def step(self) -> None: ...

    @property
    @abstractmethod
    def cache_bytes(self) -> int: ...


class Transformers(Variant):
    """A plain loop around the model: a cache and the likeliest token."""

    def __init__(self, bench: "Bench", kind: str) -> None:
        self.model = shared_copy(bench.model)
        self.cache: Any = DynamicCache(config=self.model.config)
        if kind != "dynamic":
            self.cache = StaticCache(config=self.model.config, max_cache_len=bench.limit)
        self.forward: Callable[..., Any] = self.model
        self.tokens = self._next(bench.prompts)
        if kind == "static compiled":
            self.forward = torch.compile(self.model, fullgraph=True)

    def _next(self, ids: Tensor) -> Tensor:
        with torch.inference_mode():
            out = self.forward(ids, **cache_argument(self.cache), use_cache=True, logits_to_keep=1)
            return out.logits[:, -1:].argmax(-1)

    def step(self) -> None:
        self.tokens = self._next(self.tokens)
        self.tokens.tolist()  # a loop that serves would look at them, as the engine does

    @property
    def cache_bytes(self) -> int:
        return sum(x.keys.nbytes + x.values.nbytes for x in self.cache.layers)


class Engine(Variant):
    """The engine whole: schedule, forward, sampling, bookkeeping."""

    def __init__(self, bench: "Bench", recipe: str | None, settings: dict[str, Any]) -> None:
        model = bench.folded(recipe) if recipe else bench.model
        # Few steps read all prompts: the first sequences decode meanwhile, SPARE tokens at most.
        number, chunk = len(bench.prompts), bench.prompts.numel() // 2
        self.llm = LLM(
            model,
            owned=recipe is not None,
            max_sequences=number,
            max_tokens=bench.limit,
            chunk=chunk,
            **settings,
        )
        sampling = SamplingParams(max_new_tokens=bench.limit, ignore_eos=True)
        ids = [self.llm.add(prompt, sampling) for prompt in bench.prompts.tolist()]
        started: set[int] = set()
        while len(started) < len(ids):
            started.update(output.id for output in self.llm.engine.step())

    def step(self) -> None:
        outputs = self.llm.engine.step()
        assert all(len(x.token_ids) == 1 and x.error is None for x in outputs), outputs
        assert len(outputs) == self.llm.runner.pool.num_slots

    @property
    def cache_bytes(self) -> int:
        return self.llm.runner.pool.used_bytes


@dataclass
class Bench:
    """A model and its prompts [B, T], shared by all variants."""

    arguments: argparse.Namespace
    model: Any = field(init=False)
    prompts: Tensor = field(init=False)
    limit: int = field(init=False)

    def __post_init__(self) -> None:
        a = self.arguments
        self.model = load(a.model, dtype=a.dtype, device="cpu")
        self.tokenizer = load_tokenizer(a.model)
        text = running(packaged("filler.txt")) + running(packaged("calibration.txt"))
        self.prompts = windows(self.tokenizer, text, a.ctx, a.batch * a.ctx)
        self.limit = a.ctx + SPARE + a.warmup + a.rounds
        most = self.model.config.max_position_embeddings
        if len(self.prompts) < a.batch or self.limit > most:
            raise SystemExit(f"no {a.batch} prompts of {self.limit} of {most} positions")
        self._prepared = cache(self._prepare)
        self._statistics = cache(self._shared_statistics)

    def make(self, name: str) -> Variant:
        if name in BASELINES:
            return Transformers(self, name)
        recipe, _, extra = name.removeprefix("engine").strip().partition(" ")
        return Engine(self, recipe or None, SETTINGS[extra and f" {extra}"])

    def folded(self, recipe: str) -> Any:
        prepared = self._prepared(recipe)
        a, planned = self.arguments, recipe in PLANNED
        prefer: Prefer = "speed" if recipe == SPEED else "balanced"
        return prepared.folded_copy(
            prepared.plan_factor(a.factor, prefer=prefer) if planned else prepared.plan(a.keep)
        )

    def _prepare(self, recipe: str) -> Prepared:
        compressor = Compressor(
            self.model, recipes.get(recipe.removesuffix("-speed")), self.tokenizer
        )
        return compressor.prepare(self.arguments.stats or self._statistics())

    def _shared_statistics(self) -> Any:
        return shared_statistics(
            [Compressor(self.model, recipes.get(name), self.tokenizer) for name in RECIPES]
        )


def time_steps(variants: dict[str, Variant], warmup: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every step, the variants' steps in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    chance, order = random.Random(0), list(variants)
    for i in range(warmup + rounds):
        chance.shuffle(order)
        for name in order:
            begin = time.perf_counter()
            variants[name].step()
            if i >= warmup:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def rows_of(
    variants: dict[str, Variant], seconds: dict[str, list[float]], batch: int
) -> list[dict[str, Any]]:
    """Speed and bytes of every variant, and both against the faster baseline, if one ran."""
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    best = min((name for name in medians if name in BASELINES), key=medians.__getitem__)
    rows = []
    for name, variant in variants.items():
        deciles = statistics.quantiles(seconds[name], n=10, method="inclusive")
        rows.append(
            {
                "name": name,
                "step_ms": 1e3 * medians[name],
                "step_ms_p10": 1e3 * deciles[0],
                "step_ms_p90": 1e3 * deciles[-1],
                "tokens_per_second": batch / medians[name],
                "speed_over_baseline": medians[best] / medians[name],
                "cache_bytes_allocated": variant.cache_bytes,
                "baseline": best,
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'':36} {'ms a step (p10, p90)':>24} {'tokens/s':>9} {'speed':>6} {'cache MiB':>10}")
    for row in rows:
        spread = "{step_ms:.1f} ({step_ms_p10:.1f}, {step_ms_p90:.1f})".format(**row)
        print(
            f"{row['name']:36} {spread:>24} {row['tokens_per_second']:9.1f} "
            f"{row['speed_over_baseline']:5.2f}x {row['cache_bytes_allocated'] / 2**20:10.1f}"
        )


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_of(bench: Bench, name: str) -> dict[str, Any]:
    """Most memory of this process before and after one variant prefilled and decoded."""
    before = peak_bytes()
    variant = bench.make(name)
    for _ in range(bench.arguments.warmup + bench.arguments.rounds):
        variant.step()
    return {"name": name, "peak_before": before, "peak_bytes": peak_bytes()}


def peaks(names: list[str]) -> list[dict[str, Any]]:
    """`peak_of` every variant, in processes of their own with this one's arguments."""
    found = []
    for name in names:
        command = [sys.executable, *sys.argv, "--only", name, "--alone"]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found.append(json.loads(out.splitlines()[-1]))
        print("{name}: {peak_before:,} B before, peak {peak_bytes:,} B".format(**found[-1]))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="reference:gqa")
    parser.add_argument("--dtype", default="float32", help="what users run on CPUs")
    parser.add_argument("--ctx", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--factor", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    parser.add_argument("--stats", type=Path, metavar="FILE", help="calibration to reuse")
    parser.add_argument("--memory", action="store_true", help="peaks instead of times")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.memory and not arguments.alone:
        rows = peaks(arguments.only)
    else:
        bench = Bench(arguments)
        if arguments.alone:
            print(json.dumps(peak_of(bench, arguments.only[0])))
            return
        variants = {}
        for name in arguments.only:
            begin = time.perf_counter()
            variants[name] = bench.make(name)
            print(f"{name}: prefilled in {time.perf_counter() - begin:.0f} s", flush=True)
        seconds = time_steps(variants, arguments.warmup, arguments.rounds)
        rows = rows_of(variants, seconds, arguments.batch)
        show(rows)
    if arguments.json:
        settings = {key: str(value) for key, value in vars(arguments).items()}
        machine = {
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
        }
        write_json(
            arguments.json,
            {"settings": settings, "versions": versions("cpu"), "machine": machine, "rows": rows},
        )


if __name__ == "__main__":
    main()
