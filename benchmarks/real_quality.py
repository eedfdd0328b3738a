"""What every recipe costs a real model, by the bits that a token stores.

    python benchmarks/real_quality.py --text wiki.txt --calib train.txt --json out.json

Sections: bits (plain integers and KIVI), published (recipes of the papers at a half and a quarter,
LoRC at .6, with Palu's bits), ours (dimensions at a half and a quarter, and bits planned with
them), levels (bits planned in several sets of levels), speed (planned for one pass of a kernel),
layouts (the same, where layers share few layouts), recovered (the plans of ours after --recover
steps on the calibration text). Folded models are read with their rows quantised as pages hold them,
a window at a time, which tests/compression/test_recover.py compares with the engine; plain
integers, KIVI and Palu's bits go through the engine. Rows of the report are written as they are
measured; those already in the file are kept.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import DynamicCache

import quality
from kvfold.compression.training.rounded_cache import RoundedCache, RoundOnlyCache
from kvfold.config import ALL_LEVELS, LEVELS, CacheConfig, Prefer
from kvfold.evaluation.dense import DenseSession, inference
from kvfold.evaluation.measure import runner_for
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.perplexity import PerplexityResult, window_perplexity
from kvfold.evaluation.reader import Reader
from kvfold.evaluation.tasks import read_tasks
from kvfold.evaluation.tasks.run import run_tasks
from kvfold.hub.checkpoint import spec_of
from kvfold.layout import CacheSpec
from kvfold.layout.pages import cache_layout
from kvfold.models.copies import shared_copy

PUBLISHED = ("zack", "zdc", "palu-m", "palu-j", "lorc")
OURS = ("fast", "lean", "small")
FACTORS = {
    "small": (2, 3, 4, 5, 6, 8, 10, 14),
    "lean": (2, 3, 4, 5, 6, 8, 10, 14),
    "swift": (2, 3, 4, 5, 6, 8, 10),
    "fast": (2, 3, 4, 5),
}
LEVEL_SETS = {"all levels": ALL_LEVELS, "8, 4, 2": LEVELS, "8, 4": (8, 4), "4": (4,)}
FOR_SPEED = {"swift": (3, 4, 5, 6), "lean": (4, 6, 8)}
ALL = 999  # more layouts than layers
RECOVERED = {"small": (14, 8, 10, 6, 5, 4), "lean": (8, 6), "swift": (5, 4)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a recipe at a share or a factor, in levels, steps of recovery, and how tokens are
    stored."""

    name: str
    recipe: str | None = None
    keep: float | None = None
    factor: float | None = None
    levels: tuple[int, ...] = LEVELS
    prefer: Prefer = "balanced"
    layouts: int | None = None
    steps: int = 0
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)


def cases(section: str, steps: int) -> Iterator[Case]:
    if section == "bits":
        for bits in (8, 4, 3):
            yield Case(name=f"int{bits}, rotated", cache=CacheConfig(bits=bits))
        for bits in (4, 2):
            yield Case(name=f"KIVI {bits} bits", cache=CacheConfig(bits=bits, format="kivi"))
    if section == "published":
        for keep in (0.5, 0.25):
            for recipe in PUBLISHED:
                yield Case(name=f"{recipe} {keep:g}", recipe=recipe, keep=keep)
        yield Case(name="lorc 0.6", recipe="lorc", keep=0.6)  # the share of LoRC's Table 2
        for bits in (4, 3, 2):
            cache = CacheConfig(bits=bits, zeros=True)
            yield Case(name=f"palu-j 0.5, {bits} bits", recipe="palu-j", keep=0.5, cache=cache)
    if section == "ours":
        for keep in (0.5, 0.25):
            for recipe in OURS:
                yield Case(name=f"{recipe} {keep:g}", recipe=recipe, keep=keep)
    if section == "levels":
        for recipe in ("swift", "lean", "small"):
            for factor in (3, 4, 5, 6, 8):
                for name, levels in LEVEL_SETS.items():
                    name = f"{recipe} {factor}x, {name}"
                    yield Case(name=name, recipe=recipe, factor=factor, levels=levels)
    if section == "speed":
        for recipe, factors in FOR_SPEED.items():
            for factor in factors:
                name = f"{recipe} {factor}x, for speed"
                yield Case(name=name, recipe=recipe, factor=factor, prefer="speed")
    if section == "layouts":
        for factor in (4, 5, 6, 8):
            for layouts in (1, 2, 4, 6, ALL):
                name = (
                    f"swift {factor}x, " + ("all" if layouts == ALL else f"{layouts}") + " layouts"
                )
                case = Case(name=name, recipe="swift", factor=factor, prefer="speed")
                yield dataclasses.replace(case, layouts=layouts)
    planned = {"ours": (FACTORS, 0), "recovered": (RECOVERED, steps)}
    sizes_of, count = planned.get(section, ({}, 0))
    for recipe, sizes in sizes_of.items():
        for factor in sizes:
            name = f"{recipe} {factor}x" + (f", {count} steps" if count else "")
            yield Case(name=name, recipe=recipe, factor=factor, steps=count)


class Bench(quality.Bench):
    """Rows as pages hold them, or pages."""

    def row(self, case: Case) -> dict[str, Any]:
        begin = time.perf_counter()
        model, provenance = self._model(case)
        made = time.perf_counter() - begin
        found: dict[str, Any] = {**dataclasses.asdict(case), "seconds": made, "texts": {}}
        found["recovery"] = provenance.get("recovery")
        spec = spec_of(model)
        if spec is not None and case.cache.bits is None:
            found["kept_fraction"] = cache_layout(spec).kept_fraction
            for name, ids in self.texts.items():
                found["texts"][name] = dataclasses.asdict(rows_perplexity(model, spec, ids))
            found["tasks"] = self._tasks(model, lambda: RoundedCache(spec.layers))
            return found
        if case.recipe is None and case.cache == CacheConfig():
            found["tasks"] = self._tasks(model, None)
        runner = runner_for(model, case.cache, self.arguments.ctx)
        for name, ids in self.texts.items():
            result, held = window_perplexity(partial(PagedSession, runner), ids)
            found["texts"][name] = dataclasses.asdict(result)
            found |= dataclasses.asdict(held)
        return found

    def _tasks(self, model: Any, new_cache: Callable[[], DynamicCache] | None) -> dict[str, Any]:
        reader, found = Reader(partial(DenseSession, model, new_cache=new_cache)), {}
        for path in self.arguments.tasks:
            questions = read_tasks(path)[: self.arguments.questions]
            result = run_tasks(model, self.tokenizer, questions, reader=reader)
            found[path.stem] = result.record()
        return found

    def _model(self, case: Case) -> tuple[Any, dict[str, Any]]:
        if case.recipe is None:
            return self.model, {}
        prepared, model = self.prepared[case.recipe], shared_copy(self.model)
        if case.factor is not None:
            spec = prepared.plan_factor(case.factor, case.levels, case.prefer, case.layouts)
        else:
            spec = prepared.plan(case.keep or 1.0, 1)
        prepared.fold(spec, {}, model=model, recover=case.steps)
        return model, model.config.quantization_config.provenance


def rows_perplexity(model: Any, spec: CacheSpec, ids: Tensor) -> PerplexityResult:
    """Loss on windows ids [n, T] where every token sees rows as pages would give them back."""

    def session() -> DenseSession:
        return DenseSession(model, ids.shape[1], lambda: RoundOnlyCache(spec.layers))

    with inference(model):
        return window_perplexity(session, ids)[0]


def main() -> None:
    parser = quality.parser(__doc__, model="reference:smollm2", ctx=2048, windows=12)
    sections = ("bits", "published", "ours", "levels", "speed", "layouts", "recovered")
    parser.add_argument("--sections", nargs="+", choices=sections, default=sections)
    parser.add_argument("--recover", type=int, default=100, metavar="STEPS")
    parser.add_argument("--tasks", nargs="*", type=Path, default=[], metavar="FILE")
    parser.add_argument("--questions", type=int, default=100, help="of each file of --tasks")
    arguments = parser.parse_args()
    bench = Bench(arguments)
    every = [case for name in arguments.sections for case in cases(name, arguments.recover)]
    wanted = bench.wanted(every)
    begin = time.perf_counter()
    bench.prepare(case.recipe for case in wanted if case.recipe)
    prepared = time.perf_counter() - begin
    print(f"calibrated in {prepared:.1f} s", flush=True)
    if "original" not in bench.rows:
        wanted = [Case(name="original"), *wanted]
    for row in bench.run(wanted, bench.row, prepared=prepared):
        print(summary(row, bench.rows["original"]), flush=True)


def summary(row: dict[str, Any], original: dict[str, Any]) -> str:
    losses = (
        f"{name} {found['nll'] - original['texts'][name]['nll']:+.4f}"
        for name, found in row["texts"].items()
    )
    right = (f"{name} {x['accuracy']:.2f}" for name, x in row.get("tasks", {}).items())
    return f"{row['name']}: {1 / row['kept_fraction']:.2f}x {' '.join([*losses, *right])}"


if __name__ == "__main__":
    main()
