"""Compares methods of compression on one model, with the same windows, questions and tasks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from kvfold import recipes as named
from kvfold.calibration.statistics import Statistics
from kvfold.compression.compressor import Compressor, Prepared, shared_statistics
from kvfold.compression.planning.target import Target
from kvfold.config import CacheConfig, Recipe
from kvfold.evaluation.compare import Row
from kvfold.evaluation.measure import Measured, Measurement, measure, storage
from kvfold.evaluation.perplexity import paired_difference
from kvfold.utils.progress import Progress

ORIGINAL = "original"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row to measure: how a model is compressed, and how its cache stores tokens.

    recipe: None: the model is not compressed. target: a keep, or a factor with planned bits. align:
    ranks are multiples of it. cache: of the paged cache; None: transformers' cache.
    """

    name: str
    recipe: Recipe | None
    target: Target
    align: int | None = None
    cache: CacheConfig | None = None

    @property
    def keep(self) -> float:
        """The requested share of the cache."""
        return self.target.keep or 1 / (self.target.factor or 1)

    def folded(self, prepared: Prepared) -> Any:
        """Fold a copy of the model that was prepared for `recipe`."""
        target = self.target
        if target.factor is None:
            return prepared.folded_copy(prepared.plan(self.keep, self.align))
        spec = prepared.plan_factor(target.factor, target.levels, target.preference, target.layouts)
        return prepared.folded_copy(spec)


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
    """Measure the original model, and every recipe at every keep, in the cache of `what`.

    compressors: one per recipe, with a shared model and calibration text. The rest is as in
    `compare_methods`.
    """
    methods = [
        Method(name=recipe.name, recipe=recipe, target=target, align=align, cache=what.cache)
        for recipe in (one.recipe for one in compressors)
        for target in [Target(keep=keep) for keep in keeps]
    ]
    return compare_methods(
        compressors[0].model,
        compressors[0].tokenizer,
        methods,
        what,
        compressors=compressors,
        statistics=statistics,
        progress=progress,
        on_row=on_row,
    )


def compare_methods(
    model: Any,
    tokenizer: Any,
    methods: Sequence[Method],
    what: Measurement,
    *,
    compressors: Sequence[Compressor],
    statistics: Statistics | Path | None = None,
    progress: Progress | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Measure the original model and every method.

    compressors: one per recipe. statistics: of the calibration text, or their file; None: they are
    measured in one pass that all recipes share. If a method runs on pages, the original does too,
    without quantisation or eviction. If a method evicts, all are scored on the second half of every
    window. on_row: called with each row as soon as it is measured. The model is not changed. Raises
    ValueError for settings that cannot work.
    """
    caches = [method.cache for method in methods if method.cache is not None]
    what = replace(what, scored_from=scored_from([method.cache for method in methods], what))
    if compressors and not isinstance(statistics, Statistics):
        statistics = shared_statistics(compressors, progress, statistics)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        if on_row is not None:
            on_row(row)

    uncompressed = CacheConfig(page=caches[0].page, kv_bytes=caches[0].kv_bytes) if caches else None
    original = measure(model, tokenizer, replace(what, cache=uncompressed), progress, ORIGINAL)
    add(result_row(model, ORIGINAL, 1.0, original))
    by_recipe = {one.recipe: one for one in compressors}
    for recipe, group in groupby(methods, lambda method: method.recipe):
        begin, prepared = time.perf_counter(), None
        if recipe is not None:
            prepared = by_recipe[recipe].prepare(statistics, progress)
        preparing = time.perf_counter() - begin
        for method in group:
            begin = time.perf_counter()
            folded = model if prepared is None else method.folded(prepared)
            seconds = preparing + time.perf_counter() - begin
            label = f"{method.name} {method.keep:g}"
            measured = measure(
                folded, tokenizer, replace(what, cache=method.cache), progress, label
            )
            add(result_row(folded, method.name, method.keep, measured, original, seconds))
    return rows


def scored_from(caches: Sequence[CacheConfig | None], what: Measurement) -> int | None:
    """The position in a window from which all rows are scored: the middle if a cache evicts, which
    happens before that token; otherwise that of `what`."""
    if not what.windows or not any(cache and cache.evict for cache in caches):
        return what.scored_from
    return int(next(iter(what.windows.values())).shape[1]) // 2


def conditions(
    what: Measurement, caches: Sequence[CacheConfig | None], dtype: torch.dtype, align: int | None
) -> str:
    """Say in sentences what the rows of `compare_methods` were scored on, and how. align: of ranks
    (None: nothing is folded)."""
    sentences, start = [], scored_from(caches, what)
    for name, ids in what.windows.items():
        count, length = ids.shape
        scored = f"all of {count} windows of {length} tokens"
        if start is not None:
            why = "in every row, since some evict"
            scored = f"tokens {start} to {length - 1} of {count} windows of {length}, {why}"
        sentences.append(f"{name}: scored on {scored}.")
    kind = str(dtype).removeprefix("torch.")
    ranks = "" if align is None else f"; ranks are multiples of {align} unless bits are planned"
    sentences.append(f"Computed in {kind}{ranks}.")
    if dtype.itemsize > 2 and any(cache is not None for cache in caches):
        sentences.append(
            f"Pages hold numbers that are not quantised in {kind}: {dtype.itemsize / 2:g} in the"
            " column pool where a 16-bit model has 1."
        )
    return " ".join(sentences)


def compressors_of(
    model: Any, tokenizer: Any, recipes: Sequence[str], **settings: Any
) -> list[Compressor]:
    """Build a compressor for each recipe. Raises ValueError that names a recipe which the model
    does not allow."""
    compressors = []
    for name in recipes:
        recipe = named.get(name)
        try:
            compressors.append(Compressor(model, recipe, tokenizer, **settings))
        except ValueError as error:
            raise ValueError(f"recipe {name}: {error}") from None
    return compressors


def result_row(
    model: Any,
    recipe: str,
    keep: float,
    measured: Measured,
    original: Measured | None = None,
    seconds: float | None = None,
) -> Row:
    """Build a row of the table; its losses are paired with those of `original` by window."""
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
        tasks={name: result.summary() for name, result in measured.tasks.items()} or None,
        seconds=seconds,
        window_nll={name: result.window_nll for name, result in measured.texts.items()},
        dtype=str(model.dtype).removeprefix("torch."),
    )
