"""kvfold eval: measures perplexity, tasks and retrieval through the cache."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cli import common, suites
from kvfold.cli.options import (
    PLACE,
    STORAGE,
    WINDOWS,
    Files,
    MapsName,
    ModelOrMaps,
    Place,
    Storage,
    TaskFiles,
    Windows,
)
from kvfold.cli.suites import SUITE_FLAGS, SuiteFlags
from kvfold.utils.errors import SettingError
from kvfold.utils.files import finite, write_json

if TYPE_CHECKING:
    from kvfold.evaluation.measure import Measured
    from kvfold.evaluation.tasks.run import TaskResult


def evaluate(
    model: ModelOrMaps,
    /,
    *,
    text: Files = (),
    tasks: TaskFiles = (),
    json: Path | None = None,
    maps: MapsName = None,
    windows: Windows = WINDOWS,
    suite_flags: SuiteFlags = SUITE_FLAGS,
    storage: Storage = STORAGE,
    place: Place = PLACE,
) -> None:
    """Measure the quality of MODEL with a compressed cache.

    Choose what to measure: perplexity (--text), tasks (--tasks), facts hidden in long texts
    (--needle), or published benchmarks (--suite). By default, perplexity on a packaged text.

    Parameters
    ----------
    text
        Text files to measure perplexity on (.txt, .xz, .gz).
    json
        File for the results as JSON.
    """
    common.check_outputs(json=json)
    model, maps = common.base_and_maps(model, maps)
    if suite_flags.suite:
        for name, value in {"text": text, "tasks": tasks, "needle": windows.needle}.items():
            if value:
                raise SettingError(
                    f"`suite` and `{name}` cannot run together: leave one out, and run it alone"
                )
        suites.evaluate(model, suite_flags, storage, place, json, maps)
        return
    rows = common.read_tasks(tasks)
    texts = common.named_texts(text) if text or not (tasks or windows.needle) else {}
    sidecar = common.load_maps(maps)
    config, tokenizer = common.load_config(model, sidecar), common.load_tokenizer(model)
    cache = common.cache_config(config, storage, place, maps=sidecar)
    what = common.measurement(config, tokenizer, windows, cache, texts, rows, sidecar)
    loaded = common.load(model, place)
    what = dataclasses.replace(what, cache=common.with_policy(loaded, tokenizer, cache))
    from kvfold.evaluation.measure import measure
    from kvfold.evaluation.measure import storage as stored
    from kvfold.evaluation.tasks.run import pooled

    with common.progress() as progress:
        measured = measure(loaded, tokenizer, what, progress)
    footprint = measured.footprint
    record = {
        "model": model,
        "maps": maps,
        **pooled_texts(measured),
        **pooled(list(measured.tasks.values())),
        **stored(loaded, footprint, sidecar),
        "pool_fraction": footprint.pool_fraction if footprint else None,
        "cache_bytes_allocated": measured.cache_bytes,
        "texts": {name: dataclasses.asdict(result) for name, result in measured.texts.items()},
        "tasks": {name: result.record() for name, result in measured.tasks.items()},
        "needle": {str(n): dataclasses.asdict(item) for n, item in measured.needle.items()},
        "settings": common.settings(loaded, windows, storage),
        "versions": common.versions(loaded.device),
    }
    print_record(record, measured.tasks)
    if json is not None:
        write_json(json, finite(record))


def pooled_texts(measured: "Measured") -> dict[str, Any]:
    """Loss over the windows of all texts; None without texts."""
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


def print_record(record: dict[str, Any], tasks: "Mapping[str, TaskResult]") -> None:
    """Print the results."""
    for name, result in record["texts"].items():
        error = "" if math.isnan(result["perplexity_se"]) else f" ±{result['perplexity_se']:.2f}"
        print(f"{name}: perplexity {result['perplexity']:.3f}{error}, {result['tokens']} tokens")
    for name, answered in tasks.items():
        scores = [f"{score} {result.mean:.3f}" for score, result in answered.scores.items()]
        cut = f", {answered.truncated} cut to the model's positions" if answered.truncated else ""
        print(f"{name}: {', '.join(scores)} of {answered.num_examples} examples{cut}")
    for length, result in record["needle"].items():
        print(f"needle {length}: {100 * result['exact']:.1f} % of {result['num_questions']}")
    pages = record["pool_fraction"]
    print(
        f"cache: {record['kept_fraction']:.4f} kept, {record['bytes_per_token']:.0f} of"
        f" {record['baseline_bytes_per_token']:.0f} bytes per token"
        + (" at 16 bits" if pages is None else f"; {pages:.4f} in pages")
    )
