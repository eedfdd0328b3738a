"""Many folds of one model, measured on the same windows, questions and tasks."""

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
    """One row: what a model is folded into, and how its tokens are stored.

    recipe: None: the model as it is. target: a keep, or a factor at which bits are planned. align:
    of ranks. cache: None: transformers' own.
    """

    name: str
    recipe: Recipe | None
    target: Target
    align: int | None = None
    cache: CacheConfig | None = None

    @property
    def keep(self) -> float:
        """The share asked for."""
        return self.target.keep or 1 / (self.target.factor or 1)

    def folded(self, prepared: Prepared) -> Any:
        """A copy of the model that was prepared for `recipe`."""
        target = self.target
        if target.factor is None:
            return prepared.folded_copy(prepared.plan(self.keep, self.align))
        spec = prepared.plan_factor(target.factor, target.levels, target.preference)
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
    """The original model and every recipe at every keep, in the cache of `what`; as
    `compare_methods`, of compressors that share a model and its text."""
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
    """The original model and every method, with a compressor of each recipe.

    All recipes read statistics of one pass over the same calibration text, or the ones given, or
    those of a file. Where a method is on pages the original is too, without bits or eviction, and
    where one evicts all are scored on the same tokens. `on_row` sees every row as soon as it is
    measured; the model is left as it was. Raises ValueError for settings that cannot work.
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

    whole = CacheConfig(page=caches[0].page, kv_bytes=caches[0].kv_bytes) if caches else None
    original = measure(model, tokenizer, replace(what, cache=whole), progress, ORIGINAL)
    add(result_row(model, ORIGINAL, 1.0, original))
    by_recipe = {one.recipe: one for one in compressors}
    for recipe, group in groupby(methods, lambda method: method.recipe):
        begin, prepared = time.perf_counter(), None
        if recipe is not None:
            prepared = by_recipe[recipe].prepare(statistics, progress)
        preparing = time.perf_counter() - begin
        for method in group:
            begin = time.perf_counter()
            found = model if prepared is None else method.folded(prepared)
            seconds = preparing + time.perf_counter() - begin
            label = f"{method.name} {method.keep:g}"
            measured = measure(found, tokenizer, replace(what, cache=method.cache), progress, label)
            add(result_row(found, method.name, method.keep, measured, original, seconds))
    return rows


def scored_from(caches: Sequence[CacheConfig | None], what: Measurement) -> int | None:
    """The position in a window from which all rows are scored: its middle where a cache evicts, by
    which time it has, and else as `what` says."""
    if not what.windows or not any(cache and cache.evict for cache in caches):
        return what.scored_from
    return int(next(iter(what.windows.values())).shape[1]) // 2


def conditions(
    what: Measurement, caches: Sequence[CacheConfig | None], dtype: torch.dtype, align: int | None
) -> str:
    """What rows of `compare_methods` were scored on and how, in sentences. align: of ranks
    (None: nothing is folded)."""
    found, start = [], scored_from(caches, what)
    for name, ids in what.windows.items():
        count, length = ids.shape
        scored = f"all of {count} windows of {length} tokens"
        if start is not None:
            why = "in every row, since some evict"
            scored = f"tokens {start} to {length - 1} of {count} windows of {length}, {why}"
        found.append(f"{name}: scored on {scored}.")
    kind = str(dtype).removeprefix("torch.")
    ranks = "" if align is None else f"; ranks are multiples of {align} unless bits are planned"
    found.append(f"Computed in {kind}{ranks}.")
    if dtype.itemsize > 2 and any(cache is not None for cache in caches):
        found.append(
            f"Numbers that are not packed take {kind} in pages, {dtype.itemsize / 2:g} in the"
            " column pool where 16-bit ones take 1."
        )
    return " ".join(found)


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
        tasks={name: result.summary() for name, result in measured.tasks.items()} or None,
        seconds=seconds,
        window_nll={name: result.window_nll for name, result in measured.texts.items()},
    )
