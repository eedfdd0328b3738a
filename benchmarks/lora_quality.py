"""What Palu's recovery (its App. E) gives back: loss before and after low-rank additions learnt.

    python benchmarks/lora_quality.py --text wiki.txt --train train.txt --json out.json

Models are read as in real_quality.py. `control` is one that keeps all of its cache: what the text
alone teaches. Rows of the report are written as they are measured; those in the file are kept.
"""

import argparse
import copy
import dataclasses
import time
from pathlib import Path
from typing import Any

import quality
import real_quality
from kvfold.calibration.text import training_windows
from kvfold.cli.common import progress
from kvfold.compression.training.lora import HELD, finetune
from kvfold.config import LoRA
from kvfold.hub.checkpoint import spec_of
from kvfold.layout import CacheSpec
from kvfold.layout.pages import cache_layout
from kvfold.models.families import family_of
from kvfold.utils.progress import stage

SIZES = {"palu-m": 0.5, "palu-g": 0.5, "palu-j": 0.5, "small": 0.25, "lean": 0.25}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(real_quality.Case):
    """One row: with additions or without."""

    lora: LoRA | None = None


class Bench(real_quality.Bench):
    def row(self, case: real_quality.Case) -> dict[str, Any]:
        assert isinstance(case, Case)
        if case.recipe is None:
            return super().row(case)
        model, _ = self._model(case)
        spec, begin = spec_of(model), time.perf_counter()
        assert spec is not None
        found: dict[str, Any] = {**dataclasses.asdict(case), "texts": {}}
        if case.lora is not None:
            model = copy.deepcopy(model)  # it shares weights with the next row's
            found["losses"] = self.learn(model, spec, case.lora)
            found["seconds"] = time.perf_counter() - begin
        found["kept_fraction"] = cache_layout(spec).kept_fraction
        for name, ids in self.texts.items():
            result = real_quality.rows_perplexity(model, spec, ids)
            found["texts"][name] = dataclasses.asdict(result)
        return found

    def learn(self, model: Any, spec: CacheSpec, lora: LoRA) -> tuple[float, float]:
        """Losses before and after on text that was kept back."""
        config, count = model.config, lora.steps * lora.batch + HELD
        windows = training_windows(self.tokenizer, config, self.arguments.train, count)
        teacher = self.model if self.arguments.original else None
        with progress() as report:
            return finetune(
                model,
                family_of(config),
                spec,
                windows,
                lora,
                teacher=teacher,
                progress=stage(report, "recover"),
            )


def main() -> None:
    parser = quality.parser(__doc__, model="reference:gqa", ctx=1024, windows=8)
    parser.add_argument("--recipes", nargs="+", default=[*SIZES, "control"])
    parser.add_argument("--train", nargs="+", type=Path, help="instead of the calibration text")
    parser.add_argument("--original", action="store_true", help="learn from it, not from text")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=LoRA.batch)
    parser.add_argument("--learning-rate", type=float, default=LoRA.learning_rate)
    parser.add_argument("--maps", action="store_true")
    arguments = parser.parse_args()
    arguments.calib, arguments.tasks = None, []
    names = ("steps", "batch", "learning_rate", "maps")
    settings = {name: getattr(arguments, name) for name in names}
    bench, cases = Bench(arguments), [Case(name="original")]
    for name in arguments.recipes:
        recipe, keep = ("small", 1.0) if name == "control" else (name, SIZES[name])
        plain = Case(name=f"{name} {keep:g}", recipe=recipe, keep=keep)
        how = f"{plain.name}, {named(arguments)}"
        cases += [plain, dataclasses.replace(plain, name=how, lora=LoRA(**settings))]
    wanted = bench.wanted(cases)
    bench.prepare(case.recipe for case in wanted if case.recipe)
    for row in bench.run(wanted, bench.row):
        print(real_quality.summary(row, bench.rows["original"]), flush=True)


def named(arguments: argparse.Namespace) -> str:
    """What is learnt and how, where it is not the default."""
    text = ", ".join(x.name.split(".")[0] for x in arguments.train or [Path("packaged")])
    rate, usual = arguments.learning_rate, LoRA.learning_rate
    more = ["the original's"] * arguments.original + ["maps too"] * arguments.maps
    more += [f"rate {rate:g}"] * (rate != usual)
    return ", ".join([f"{arguments.steps} steps of {text}", *more])


if __name__ == "__main__":
    main()
