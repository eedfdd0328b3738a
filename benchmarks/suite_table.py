"""Published benchmarks of one model with many caches, each paired with the uncompressed model.

    python benchmarks/suite_table.py reference:qwen2.5-coder-1.5b --folder made --beside 4 \\
        --suites ruler math=gsm8k-test.jsonl --set suite-length=4096 suite-rows=20 --json qwen.json

Runs the commands that a user would: `kvfold compress` where a setting needs it, then `kvfold eval`
with the suites. --beside: so many settings at a time on each of --devices, which they share;
seconds then say nothing. What the folder already has is kept, so a run that was cut off goes on,
and runs with other suites and another --json use the same maps. A setting that fails is reported
with the last line of its output, and the others run on. Quantisers that kvfold does not have are
simulated in plain PyTorch (quantised_tasks.py); `simulated` is its exact cache. `vllm` and `fp8`
are vLLM's own caches (vllm_tasks.py).
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from kvfold.evaluation.suites.run import SuiteResult, changes
from kvfold.utils.files import finite, write_json

KVFOLD = (sys.executable, "-m", "kvfold")
QUANTISED = "quantised_tasks.py"
AFTER = ("--set", "question=after")
REPAIR = ("--set", "repair=true")
WINDOW = 128  # exact last tokens


@dataclass(frozen=True)
class Setting:
    """compress: arguments of `kvfold compress`; none: the model itself. cache: of `kvfold eval`.
    script: another script of this folder that answers instead, and its arguments; it gets --maps
    of what was compressed."""

    compress: tuple[str, ...] = ()
    cache: tuple[str, ...] = ()
    script: tuple[str, ...] = ()

    @property
    def folded(self) -> bool:
        return "--fold" in self.compress


def exact(window: int) -> tuple[str, ...]:
    return ("--set", f"window={window}") if window else ()


def planned(recipe: str, factor: float, *more: str, window: int = 0) -> Setting:
    return Setting(("--recipe", recipe, "--factor", str(factor), *more), exact(window))


def bits(bits: int, window: int = 0) -> Setting:
    return Setting(cache=("--bits", str(bits), *exact(window)))


def published(recipe: str, keep: float = 0.5, *cache: str) -> Setting:
    return Setting(("--fold", "--recipe", recipe, "--set", f"keep={keep}"), cache)


def kvquant(bits: int) -> Setting:
    return published("kvquant", 1, "--bits", str(bits), "--set", "format=kvquant")


def simulated(quantiser: str, recent: int = 0, first: int = 0, *more: str) -> Setting:
    counts = ("--recent", str(recent), "--first", str(first))
    return Setting(script=(QUANTISED, "--quantiser", quantiser, *counts, *more))


def evicted(policy: str, *more: str, keep: float = 0.25) -> Setting:
    return Setting(cache=("--evict", policy, "--keep-tokens", str(keep), *more))


def in_vllm(*arguments: str, compress: tuple[str, ...] = ()) -> Setting:
    return Setting(compress, script=("vllm_tasks.py", *arguments))


WINDOWED = ("--window", str(WINDOW))
FOR_SPEED = ("--set", "prefer=speed")
SETTINGS = {
    "original": Setting(),
    "bits-8": bits(8),
    "bits-4": bits(4),
    "bits-4-window": bits(4, WINDOW),
    "bits-3-window": bits(3, WINDOW),
    "bits-2-window": bits(2, WINDOW),
    "swift-4x": planned("swift", 4, *FOR_SPEED),
    "swift-5x": planned("swift", 5, *FOR_SPEED),
    "small-4x": planned("small", 4),
    "small-6x": planned("small", 6),
    "small-7x": planned("small", 7),
    "small-8x": planned("small", 8),
    "small-10x": planned("small", 10),
    "small-7x-window": planned("small", 7, window=WINDOW),
    # With their windows 4, 5, 7 and 10 times smaller at 8192 tokens.
    "small-4.3x-window": planned("small", 4.27, window=WINDOW),
    "swift-4.3x-window": planned("swift", 4.27, *FOR_SPEED, window=WINDOW),
    "swift-5.4x-window": planned("swift", 5.42, *FOR_SPEED, window=WINDOW),
    "small-7.9x-window": planned("small", 7.86, window=WINDOW),
    "small-11.9x-window": planned("small", 11.85, window=WINDOW),
    "small-7x-recovered": planned("small", 7, "--fold", "--set", "recover=96"),
    "kivi-4": Setting(cache=("--bits", "4", "--set", "format=kivi")),
    "kivi-2": Setting(cache=("--bits", "2", "--set", "format=kivi")),
    "kvquant-4": kvquant(4),
    "kvquant-3": kvquant(3),
    "kvquant-2": kvquant(2),
    "oscar-2": simulated("oscar-2", 256, 64),
    "oscar-heads-2": simulated("oscar-heads-2", 256, 64),
    "oscar-2-prompt": simulated("oscar-2", 256, 64, "--exact-prompt"),
    "oscar-2-short": simulated("oscar-2", WINDOW, 4),
    "turboquant-3.5": simulated("turboquant-3.5"),
    "turboquant-2.5": simulated("turboquant-2.5"),
    "turboquant-2.5-window": simulated("turboquant-2.5", WINDOW, 4),
    "turboquant-vllm-4": simulated("turboquant-vllm-4"),
    "turboquant-vllm-3": simulated("turboquant-vllm-3"),
    "simulated": Setting(script=(QUANTISED, "--recent", "0")),
    "vllm": in_vllm(),
    "fp8": in_vllm("--kv-cache-dtype", "fp8"),
    "vllm-bits-4": in_vllm("--bits", "4"),
    "vllm-bits-4-window": in_vllm("--bits", "4", *WINDOWED),
    "vllm-small-4.3x-window": in_vllm(*WINDOWED, compress=planned("small", 4.27).compress),
    "palu-j": published("palu-j"),
    "zack": published("zack"),
    "snapkv-before": evicted("snapkv"),
    "snapkv-after": evicted("snapkv", *AFTER),
    "kvzip-before": evicted("kvzip"),
    "kvzip-after": evicted("kvzip", *AFTER),
    "kvzip-repair-before": evicted("kvzip", *REPAIR),
    "kvzip-repair-after": evicted("kvzip", *AFTER, *REPAIR),
    "kvzip-repair-bits-4-before": evicted("kvzip", *REPAIR, "--bits", "4"),
    "kvzip-repair-bits-4-after": evicted("kvzip", *AFTER, *REPAIR, "--bits", "4"),
    "kvzip-eighth-before": evicted("kvzip", keep=0.125),
    "kvzip-eighth-repair-before": evicted("kvzip", *REPAIR, keep=0.125),
    "kvzip-half-repair-bits-4-before": evicted("kvzip", *REPAIR, "--bits", "4", keep=0.5),
    "kvzip-half-repair-bits-4-after": evicted("kvzip", *AFTER, *REPAIR, "--bits", "4", keep=0.5),
    "kvzip-half-bits-8-before": evicted("kvzip", "--bits", "8", keep=0.5),
    "kvzip-half-bits-8-after": evicted("kvzip", "--bits", "8", *AFTER, keep=0.5),
    "kvzip-half-bits-4-before": evicted("kvzip", "--bits", "4", keep=0.5),
    "kvzip+-before": evicted("kvzip+"),
    "kvzip+-after": evicted("kvzip+", *AFTER),
}


class Failed(Exception):
    """A command ended with an error."""


class Table:
    """The rows of one run. Files of a setting in --folder: NAME (maps or a checkpoint), NAME.log,
    and its results, NAME with the name of --json.

    free: places on devices that no setting uses, by what CUDA_VISIBLE_DEVICES names them."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.folder = given, given.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.free = SimpleQueue[str]()
        for _ in range(given.beside):
            for device in given.devices:
                self.free.put(device)

    def made(self, name: str) -> Path:
        return self.folder / name

    def results(self, name: str) -> Path:
        return self.folder / f"{name}-{self.given.json.stem}.json"

    def command(self, name: str, *command: str) -> None:
        device = self.free.get()
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": device} if device else {})
        try:
            with open(self.folder / f"{name}.log", "ab") as log:
                code = subprocess.call(command, stdout=log, stderr=log, env=environment)
        finally:
            self.free.put(device)
        if code:
            lines = (self.folder / f"{name}.log").read_text("utf-8", "replace").split("\n")
            raise Failed(next(line for line in reversed(lines) if line.strip()))

    def run(self, name: str) -> str | None:
        """Compress and ask, unless that was done before. Returns why it failed, if it did."""
        setting, given = SETTINGS[name], self.given
        more = [x for pair in given.set for x in ("--set", pair)]
        try:
            if setting.compress and not self.made(name).exists():
                output = ("--output", str(self.made(name)))
                words = ("compress", given.model, *output, *setting.compress)
                self.command(name, *KVFOLD, *words)
            if self.results(name).exists():
                return None
            file = ("--json", str(self.results(name)))
            if setting.script:
                script, *arguments = setting.script
                counts = [x for x in given.set if not x.startswith("kv-bytes=")]
                suites = ("--suites", *given.suites, "--set", *counts)
                path = str(Path(__file__).with_name(script))
                arguments += ["--maps", str(self.made(name))] if setting.compress else []
                self.command(name, sys.executable, path, given.model, *arguments, *suites, *file)
            else:
                model = str(self.made(name)) if setting.folded else given.model
                maps = setting.compress and not setting.folded
                suites = ("--suite", ",".join(given.suites))
                self.command(
                    name,
                    *(*KVFOLD, "eval", model, *suites, *more, *setting.cache),
                    *(("--maps", str(self.made(name))) if maps else ()),
                    *file,
                )
        except Failed as failed:
            return str(failed)
        return None

    def rows(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Scores and changed answers of every suite, of the settings that were asked."""
        found = {x: json.loads(self.results(x).read_text("utf-8")) for x in names}
        before = self.suites(found["original"])
        return [
            {"setting": name, "suite": suite} | row(before[suite], result)
            for name, data in found.items()
            for suite, result in self.suites(data).items()
        ]

    @staticmethod
    def suites(data: dict[str, Any]) -> dict[str, SuiteResult]:
        return {x: SuiteResult.from_record(record) for x, record in data["suites"].items()}


def row(before: SuiteResult, after: SuiteResult) -> dict[str, Any]:
    """What a setting's answers to a suite show: scores in [0, 1], and which questions changed."""
    paired = changes(before, after)
    record = after.record()
    kept = ("questions", "right", "score", "score_se", "groups", "errors", "num_tokens")
    return {x: record[x] for x in kept} | {
        "difference": paired.difference,
        "difference_se": paired.difference_se,
        "worse": list(paired.worse),
        "better": list(paired.better),
        "same_texts": paired.same_texts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--folder", type=Path, required=True, help="maps, results, logs")
    parser.add_argument("--suites", nargs="+", default=["ruler"], help="of `kvfold eval --suite`")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--set", nargs="*", default=[], help="of `kvfold eval`, NAME=VALUE")
    parser.add_argument("--beside", type=int, default=1, help="settings at a time on a device")
    parser.add_argument("--devices", type=lambda x: x.split(","), default=[""], help="GPUs: 0,1")
    parser.add_argument("--json", type=Path, required=True, help="file for the rows")
    given = parser.parse_args()
    table, names = Table(given), list(dict.fromkeys(["original", *given.settings]))
    failed = dict[str, str]()
    with ThreadPoolExecutor(given.beside * len(given.devices)) as pool:
        for name, why in zip(names, pool.map(table.run, names), strict=True):
            if why is not None:
                failed[name] = why
            print(f"{name}: {why or 'done'}", flush=True)
    if "original" in failed:
        raise SystemExit(f"no row can be compared: {failed['original']}")
    rows = table.rows([x for x in names if x not in failed])
    for found in rows:
        error = found["difference_se"]
        print(
            f"{found['setting']:14} {found['suite']:9} {100 * found['score']:5.1f} %, "
            f"{100 * found['difference']:+.1f} points"
            + ("" if math.isnan(error) else f" +- {100 * error:.1f}")
            + f", worse {len(found['worse'])}, better {len(found['better'])}"
        )
    versions = json.loads(table.results("original").read_text("utf-8"))["versions"]
    about = {"model": given.model, "suites": given.suites, "set": given.set}
    write_json(given.json, finite(about | {"versions": versions, "failed": failed, "rows": rows}))


if __name__ == "__main__":
    main()
