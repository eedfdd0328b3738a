"""kvfold eval: perplexity, tasks and retrieval through the cache."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cli import common
from kvfold.cli.options import PLACE, STORAGE, WINDOWS, Files, Model, Place, Storage, Windows
from kvfold.files import check_writable, write_json

if TYPE_CHECKING:
    from kvfold.config import CacheConfig
    from kvfold.evaluation.run import Measured
    from kvfold.evaluation.tasks import TaskResult


def evaluate(
    model: Model,
    /,
    *,
    text: Files = (),
    tasks: Files = (),
    json: Path | None = None,
    windows: Windows = WINDOWS,
    storage: Storage = STORAGE,
    place: Place = PLACE,
) -> None:
    """Measure MODEL through its cache: perplexity, tasks, hidden facts.

    Without --text, --tasks and --needle, perplexity on a packaged text.

    Parameters
    ----------
    text
        Text files (.txt, .xz, .gz).
    tasks
        Files of {"prompt", "answer"} or {"context", "choices", "label"} rows (.jsonl, .xz, .gz).
    json
        File for the results.
    """
    if json is not None:
        check_writable(json)
    from kvfold.evaluation.tasks import read_tasks

    rows = {str(path): read_tasks(path) for path in tasks}
    texts = common.named_texts(text) if text or not (tasks or windows.needle) else {}
    loaded, tokenizer = common.load(model, place)
    check_tasks(tasks, common.cache_config(loaded, storage))
    what = common.measurement(loaded, tokenizer, texts, windows, storage)
    with common.progress() as progress:
        from kvfold.evaluation import run

        measured = run.measure(loaded, tokenizer, what, progress)
        answered = run.answer(loaded, tokenizer, rows, chunk=windows.chunk, progress=progress)
    record = {
        "model": model,
        **pooled_texts(measured),
        **pooled_tasks(list(answered.values())),
        **run.storage(loaded, measured.footprint),
        "pool_fraction": measured.footprint.pool_fraction if measured.footprint else None,
        "cache_bytes_allocated": measured.cache_bytes,
        "texts": {name: dataclasses.asdict(result) for name, result in measured.texts.items()},
        "tasks": {name: dataclasses.asdict(result) for name, result in answered.items()},
        "needle": {str(n): dataclasses.asdict(item) for n, item in measured.needle.items()},
        "settings": common.settings(loaded, windows) | {"cache": dataclasses.asdict(storage)},
        "versions": common.versions(loaded.device),
    }
    print_record(record)
    if json is not None:
        write_json(json, finite(record))


def check_tasks(tasks: "Sequence[Path]", cache: "CacheConfig | None") -> None:
    """Raises ValueError for tasks on a paged cache, whose bits and eviction they would not see."""
    if tasks and cache is not None:
        raise ValueError(
            "--tasks are answered through transformers' cache, without bits or eviction: "
            "leave out the options of the paged cache, and give a checkpoint without planned bits"
        )


def pooled_texts(measured: "Measured") -> dict[str, Any]:
    """Loss over the windows of all texts; null where no text was read."""
    from kvfold.evaluation.perplexity import mean_and_se

    losses = [loss for result in measured.texts.values() for loss in result.window_nll]
    keys = ("perplexity", "perplexity_se", "nll", "nll_se")
    if not losses:
        return {**dict.fromkeys(keys), "tokens": 0}
    nll, nll_se = mean_and_se(losses)
    value = math.exp(nll) if nll < 700 else math.inf
    values = (value, value * nll_se, nll, nll_se)
    tokens = sum(result.tokens for result in measured.texts.values())
    return {**dict(zip(keys, values, strict=True)), "tokens": tokens}


def pooled_tasks(results: "Sequence[TaskResult]") -> dict[str, Any]:
    """Fractions over the rows of all files; null where no row is of that kind."""
    generated = [len(result.outputs) for result in results]
    chosen = [result.rows - len(result.outputs) for result in results]
    return {
        "exact_match": _pooled([result.exact_match for result in results], generated),
        "contains": _pooled([result.contains for result in results], generated),
        "accuracy": _pooled([result.accuracy for result in results], chosen),
        "accuracy_per_byte": _pooled([result.accuracy_per_byte for result in results], chosen),
    }


def _pooled(means: Sequence[float | None], counts: Sequence[int]) -> float | None:
    if not sum(counts):
        return None
    return sum((mean or 0) * n for mean, n in zip(means, counts, strict=True)) / sum(counts)


def finite(value: Any) -> Any:
    """`value` for JSON: numbers that are not finite become null."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_record(record: dict[str, Any]) -> None:
    """The results for people."""
    for name, result in record["texts"].items():
        error = "" if math.isnan(result["perplexity_se"]) else f" ±{result['perplexity_se']:.2f}"
        print(f"{name}: perplexity {result['perplexity']:.3f}{error}, {result['tokens']} tokens")
    for name, result in record["tasks"].items():
        kinds = ("exact_match", "contains", "accuracy", "accuracy_per_byte")
        scores = [f"{kind} {result[kind]:.3f}" for kind in kinds if result[kind] is not None]
        print(f"{name}: {', '.join(scores)} of {result['rows']} rows")
    for length, result in record["needle"].items():
        print(f"needle {length}: {100 * result['exact']:.1f} % of {result['num_questions']}")
    pages = record["pool_fraction"]
    print(
        f"cache: {record['kept_fraction']:.4f} kept, {record['bytes_per_token']:.0f} of"
        f" {record['baseline_bytes_per_token']:.0f} bytes per token"
        + (" at 16 bits" if pages is None else f"; {pages:.4f} in pages")
    )
