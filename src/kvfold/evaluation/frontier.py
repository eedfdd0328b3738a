"""Measures recipes, sizes and plain integers of one model, and finds those that no smaller or
faster cache beats."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvfold.compression.bases import builder_of
from kvfold.compression.compressor import Compressor, Prepared, shared_statistics
from kvfold.compression.planning.preference import plans_for_speed
from kvfold.compression.planning.step_time import DecodeLoad, predict
from kvfold.config import LEVELS, CacheConfig, Prefer
from kvfold.evaluation.compare import Row
from kvfold.evaluation.comparison import ORIGINAL, result_row
from kvfold.evaluation.measure import Measured, Measurement, measure
from kvfold.hub.checkpoint import spec_of
from kvfold.layout import CacheSpec
from kvfold.layout.pages import plain_spec
from kvfold.models.families import family_of
from kvfold.models.kernels import fastest_layout
from kvfold.utils.errors import SettingError
from kvfold.utils.progress import Progress

WORTH = 0.1  # nats/token that the whole cache is worth, for the knee


def measured(
    compressors: Sequence[Compressor],
    factors: Sequence[float],
    bits: Sequence[int],
    what: Measurement,
    *,
    levels: Sequence[int],
    load: DecodeLoad,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Yield a row for the original, plain integers of `bits`, and every recipe at every factor, as
    soon as each is measured on pages.

    compressors: one per recipe, with a shared model and text. load: the decode step whose time is
    predicted. Sizes at which a recipe would store nothing in some layer are left out.
    """
    model, tokenizer = compressors[0].model, compressors[0].tokenizer

    def on_pages(compressed: Any, label: str, bits: int | None = None) -> Measured:
        pages = replace(what, cache=CacheConfig(bits=bits))
        return measure(compressed, tokenizer, pages, progress, label)

    def timed(row: Row, compressed: Any, bits: int | None = None) -> Row:
        step = predict(model.config, stored(compressed), load, bits=bits)
        return row if step is None else replace(row, step_ms=step.ms, step_estimated=step.estimated)

    original = on_pages(model, ORIGINAL)
    yield timed(result_row(model, ORIGINAL, 1.0, original), model)
    for number in bits:
        name = f"int{number}"
        row = result_row(model, name, number / 16, on_pages(model, name, number), original)
        yield timed(row, model, number)
    statistics = shared_statistics(compressors, progress)
    for compressor in compressors:
        prepared, name = compressor.prepare(statistics, progress), compressor.recipe.name
        for factor in factors:
            for prefer, spec in plans(prepared, factor, levels):
                folded, label = prepared.folded_copy(spec), named(name, prefer)
                results = on_pages(folded, f"{label} {factor:g}x")
                yield timed(result_row(folded, label, 1 / factor, results, original), folded)


def stored(model: Any) -> CacheSpec:
    """Return the spec of what a model, folded or plain, stores."""
    return spec_of(model) or plain_spec(family_of(model.config).geometry(model.config))


def plans(
    prepared: Prepared, factor: float, levels: Sequence[int] | None = None
) -> Iterator[tuple[Prefer, CacheSpec]]:
    """Yield the plans of a cache `factor` times smaller, each with what it prefers (`Prefer`).

    Bits and dimensions are planned together if the recipe predicts losses, otherwise dimensions
    alone. A plan for speed follows if a GPU reads it in one pass. Nothing is yielded if the recipe
    would store nothing in some layer.
    """
    compressor = prepared.compressor
    with suppress(SettingError):
        if not predicts(compressor.recipe):
            yield "balanced", prepared.plan(1 / factor, 1)
            return
        yield "balanced", prepared.plan_factor(factor, levels)
        if levels in (None, LEVELS) and plans_for_speed(compressor.basis, compressor.geometry):
            spec = prepared.plan_factor(factor, prefer="speed")
            if fastest_layout(compressor.model.config, spec) is not None:
                yield "speed", spec


def named(recipe: str, prefer: Prefer) -> str:
    """The name of a recipe's plan in a table."""
    return recipe if prefer == "balanced" else f"{recipe} for {prefer}"


def predicts(recipe: Any) -> bool:
    """Whether a recipe predicts losses, and so can plan bits."""
    return builder_of(recipe).predicts_loss


def loss(row: Row) -> float:
    """The increase in cross-entropy (nats/token), the mean over texts; a decrease counts as 0."""
    increases = [mean for mean, _ in row.delta_nll.values()]
    return max(0.0, sum(increases) / len(increases)) if increases else 0.0


def frontier(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that lose less than every smaller one, smallest first."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.kept_fraction, loss(row))):
        if not best or loss(row) < loss(best[-1]):
            best.append(row)
    return best


def fastest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that lose less than every one with a faster predicted step, fastest first."""
    best: list[Row] = []
    timed = [row for row in rows if row.step_ms is not None]
    for row in sorted(timed, key=lambda row: (row.step_ms or 0.0, loss(row))):
        if not best or loss(row) < loss(best[-1]):
            best.append(row)
    return best


def knee(rows: Sequence[Row]) -> Row:
    """Return the row whose size and loss cost least together: a smaller cache loses more than WORTH
    nats times the share of the cache that it saves."""
    return min(rows, key=lambda row: row.kept_fraction + loss(row) / WORTH)
