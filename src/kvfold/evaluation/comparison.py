"""Many folds of one model, measured on the same windows, questions and tasks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvfold import recipes as named
from kvfold.compression.compressor import Compressor, shared_statistics
from kvfold.compression.progress import Progress
from kvfold.compression.statistics import Statistics
from kvfold.compression.target import check_keep
from kvfold.config import CacheConfig
from kvfold.evaluation.compare import Row
from kvfold.evaluation.measure import Measured, Measurement, measure, storage
from kvfold.evaluation.perplexity import paired_difference

ORIGINAL = "original"


def compare(
    compressors: Sequence[Compressor],
    keeps: Sequence[float],
    what: Measurement,
    *,
    align: int | None = None,
    statistics: Statistics | None = None,
    progress: Progress | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """The original model and every recipe at every keep; compressors share a model and its text.

    All recipes read statistics of one pass over the same calibration text, or the ones given. On
    the paged cache the original is measured without bits or eviction but on the same tokens.
    `on_row` sees every row as soon as it is measured; the model is left as it was. Raises
    ValueError for settings that cannot work, before anything is measured.
    """
    for keep in keeps:
        check_keep(keep)
    model, tokenizer, cache = compressors[0].model, compressors[0].tokenizer, what.cache
    if cache is not None and cache.evict and what.windows:
        ctx = next(iter(what.windows.values())).shape[1]
        what = replace(what, scored_from=ctx // 2)
    if statistics is None:
        statistics = shared_statistics(compressors, progress)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        if on_row is not None:
            on_row(row)

    whole = None if cache is None else CacheConfig(page=cache.page, kv_bytes=cache.kv_bytes)
    original = measure(model, tokenizer, replace(what, cache=whole), progress, ORIGINAL)
    add(result_row(model, ORIGINAL, 1.0, original))
    for compressor in compressors:
        begin = time.perf_counter()
        prepared = compressor.prepare(statistics, progress)
        preparing = time.perf_counter() - begin
        for keep in keeps:
            begin = time.perf_counter()
            folded = prepared.folded_copy(prepared.plan(keep, align))
            seconds = preparing + time.perf_counter() - begin
            name = compressor.recipe.name
            measured = measure(folded, tokenizer, what, progress, f"{name} {keep:g}")
            add(result_row(folded, name, keep, measured, original, seconds))
    return rows


def compressors_of(
    model: Any, tokenizer: Any, recipes: Sequence[str], **settings: Any
) -> list[Compressor]:
    """One a recipe. Raises ValueError naming a recipe that the model's family does not allow."""
    found = []
    for name in recipes:
        recipe = named.get(name)
        try:
            found.append(Compressor(model, recipe, tokenizer, **settings))
        except ValueError as error:
            raise ValueError(f"recipe {name}: {error}") from None
    return found


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
