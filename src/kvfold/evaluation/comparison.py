"""Many folds of one model, measured on the same windows, questions and tasks."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvfold import recipes as named
from kvfold.api import Job, Progress, calibration_windows
from kvfold.compression import build, pipeline
from kvfold.compression.calibrate import calibrate
from kvfold.compression.statistics import Statistics
from kvfold.config import CacheConfig
from kvfold.evaluation.compare import Row
from kvfold.evaluation.measure import Measured, Measurement, measure, stage, storage
from kvfold.evaluation.perplexity import paired_difference
from kvfold.models.copies import shared_copy
from kvfold.spec import CacheSpec

ORIGINAL = "original"


def compare(
    jobs: Sequence[Job],
    keeps: Sequence[float],
    what: Measurement,
    *,
    align: int | None = None,
    statistics: Statistics | None = None,
    progress: Progress | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """The original model and every job's recipe at every keep; `jobs` share a model and its text.

    All recipes read statistics of one pass over the same calibration text, or the ones given. On
    the paged cache the original is measured without bits or eviction but on the same tokens.
    `on_row` sees every row as soon as it is measured; the model is left as it was. Raises
    ValueError for settings that cannot work, before anything is measured.
    """
    for keep in keeps:
        pipeline.check_keep(keep)
    model, tokenizer, cache = jobs[0].model, jobs[0].tokenizer, what.cache
    if cache is not None and cache.evict and what.windows:
        ctx = next(iter(what.windows.values())).shape[1]
        what = replace(what, scored_from=ctx // 2)
    if statistics is None:
        statistics = shared_statistics(jobs, progress)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        if on_row is not None:
            on_row(row)

    whole = None if cache is None else CacheConfig(page=cache.page, kv_bytes=cache.kv_bytes)
    original = measure(model, tokenizer, replace(what, cache=whole), progress, ORIGINAL)
    add(result_row(model, ORIGINAL, 1.0, original))
    for job in jobs:
        begin = time.perf_counter()
        job.prepare(restricted(statistics, build.needs(job.recipe)), progress)
        prepared = time.perf_counter() - begin
        for keep in keeps:
            begin = time.perf_counter()
            folded = folded_copy(job, job.plan(keep, align))
            seconds = prepared + time.perf_counter() - begin
            name = job.recipe.name
            measured = measure(folded, tokenizer, what, progress, f"{name} {keep:g}")
            add(result_row(folded, name, keep, measured, original, seconds))
    return rows


def jobs_of(model: Any, tokenizer: Any, recipes: Sequence[str], **settings: Any) -> list[Job]:
    """A job a recipe. Raises ValueError naming the recipe that a model's family does not allow."""
    jobs = []
    for name in recipes:
        recipe = named.get(name)
        try:
            jobs.append(Job(model, recipe, tokenizer, **settings))
        except ValueError as error:
            raise ValueError(f"recipe {name}: {error}") from None
    return jobs


def shared_statistics(jobs: Sequence[Job], progress: Progress | None = None) -> Statistics:
    """The statistics that any of `jobs` (of one model and text) reads, from one pass."""
    wanted = set().union(*(build.needs(job.recipe) for job in jobs))
    if not wanted:
        return Statistics({})
    job = jobs[0]
    rows = calibration_windows(job.tokenizer, job.model.config, job.calib, job.max_tokens)
    return calibrate(
        job.model,
        job.family,
        rows,
        wanted,
        seed=job.seed,
        progress=stage(progress, "calibrate"),
    )


def restricted(statistics: Statistics, names: set[str]) -> Statistics:
    """A view of the named moments: a recipe sees what it would have collected alone."""
    view = Statistics(statistics.key)
    for layer, stored in statistics.layers.items():
        view.layers[layer] = {name: stored[name] for name in names & stored.keys()}
    return view


def folded_copy(job: Job, spec: CacheSpec) -> Any:
    """A folded model that shares all weights but the attentions' with `job.model`."""
    trial = copy.copy(job)
    trial.model = shared_copy(job.model)
    trial.fold(spec, {})
    return trial.model


def result_row(
    model: Any,
    recipe: str,
    keep: float,
    measured: Measured,
    original: Measured | None = None,
    seconds: float | None = None,
) -> Row:
    """One row of the comparison; losses are paired with `original`'s, window by window."""
    deltas = {
        name: paired_difference(result, original.texts[name])
        for name, result in measured.texts.items()
        if original is not None
    }
    return Row(
        recipe=recipe,
        keep=keep,
        **storage(model, measured.footprint),
        cache_bytes_allocated=measured.cache_bytes or 0,
        pool_fraction=measured.footprint.pool_fraction if measured.footprint else None,
        perplexity={name: result.perplexity for name, result in measured.texts.items()},
        delta_nll=deltas,
        needle={n: result.exact for n, result in measured.needle.items()} or None,
        tasks={name: result.flat() for name, result in measured.tasks.items()} or None,
        seconds=seconds,
        window_nll={name: result.window_nll for name, result in measured.texts.items()},
    )
