"""Drivers: a model, or many folds of one model, on the same windows and questions.

Plain functions, for scripts as well as for the command line. Shape legend: n windows, T = ctx.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kvfold import recipes as named
from kvfold.artifact import spec_of
from kvfold.compression.calibration_text import CALIBRATION_TOKENS
from kvfold.compression.compressor import Compressor, shared_statistics
from kvfold.compression.progress import Progress, stage
from kvfold.compression.statistics import Statistics
from kvfold.compression.target import check_keep
from kvfold.config import CacheConfig
from kvfold.engine.build import build_runner
from kvfold.evaluation.compare import Row
from kvfold.evaluation.needle import NeedleResult, evaluate_needle
from kvfold.evaluation.paged import Footprint, PagedReader, paged_perplexity
from kvfold.evaluation.perplexity import (
    PerplexityResult,
    check_length,
    max_positions,
    paired_difference,
    perplexity,
)
from kvfold.evaluation.tasks import ChoiceTask, GenerationTask, TaskResult, run_tasks
from kvfold.models.copies import shared_copy
from kvfold.models.families import family_of
from kvfold.text import running, windows

ORIGINAL = "original"
QUESTION_ROOM = 64  # tokens of a question and its answer beyond the context
NEEDLE_LENGTHS = (512, 1024, 2048, 4096)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a model is measured on: windows int64 [n, T] by text name, `needle` contexts a length.

    `chunk` tokens are fed at a time and `batch` windows together; `lengths` None means those of
    NEEDLE_LENGTHS that the model has positions for. `cache`: measure on the paged cache, as it
    says, instead of transformers'; then `agnostic` needle contexts are compressed before their
    question is seen, and `scored_from` as in `paged_perplexity`.
    """

    windows: Mapping[str, Tensor]
    chunk: int = 512
    batch: int = 1
    needle: int = 0
    lengths: Sequence[int] | None = None
    cache: CacheConfig | None = None
    agnostic: bool = True
    scored_from: int | None = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Results by text name and by context length in tokens; what a paged cache held."""

    texts: dict[str, PerplexityResult]
    needle: dict[int, NeedleResult]
    footprint: Footprint | None = None

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of the largest cache that measuring a text took."""
        return max((result.cache_bytes_allocated for result in self.texts.values()), default=None)


def text_windows(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, str],
    *,
    ctx: int,
    max_tokens: int | None = None,
) -> dict[str, Tensor]:
    """Windows of every text. Raises ValueError naming a text that does not fill one."""
    check_length(model, ctx)
    found = {}
    for name, text in texts.items():
        try:
            found[name] = windows(tokenizer, running(text), ctx, max_tokens)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return found


def measure(
    model: Any,
    tokenizer: Any,
    what: Measurement,
    progress: Progress | None = None,
    label: str = "",
) -> Measured:
    """Perplexity on every text, and retrieval at every length."""
    if what.cache is not None:
        return _measure_paged(model, tokenizer, what, what.cache, progress, label)
    texts = {
        name: perplexity(
            model,
            rows,
            chunk=what.chunk,
            batch=what.batch,
            progress=stage(progress, f"{label} {name}"),
        )
        for name, rows in what.windows.items()
    }
    needle: list[NeedleResult] = []
    if what.needle:
        needle = evaluate_needle(
            model,
            tokenizer,
            lengths=what.lengths or needle_lengths(model),
            num_contexts=what.needle,
            chunk=what.chunk,
            progress=stage(progress, f"{label} needle"),
        )
    return Measured(texts=texts, needle={result.length: result for result in needle})


def _measure_paged(
    model: Any,
    tokenizer: Any,
    what: Measurement,
    cache: CacheConfig,
    progress: Progress | None,
    label: str,
) -> Measured:
    """The same on pages. The model itself stays as it is."""
    lengths = (what.lengths or needle_lengths(model)) if what.needle else ()
    longest = max([*lengths, *(rows.shape[1] for rows in what.windows.values())])
    most = min(longest + QUESTION_ROOM, max_positions(model) or longest + QUESTION_ROOM)
    runner = build_runner(shared_copy(model), cache, num_slots=1, max_tokens=most)
    texts, held = {}, None
    for name, rows in what.windows.items():
        report = stage(progress, f"{label} {name}")
        texts[name], held = paged_perplexity(
            runner, rows, chunk=what.chunk, scored_from=what.scored_from, progress=report
        )
    needle: list[NeedleResult] = []
    if lengths:
        reader = PagedReader(runner, what.chunk, agnostic=what.agnostic)
        needle = evaluate_needle(
            model,
            tokenizer,
            lengths=lengths,
            num_contexts=what.needle,
            reader=reader,
            progress=stage(progress, f"{label} needle"),
        )
        reader.close()
        held = held or reader.footprint
    by_length = {result.length: result for result in needle}
    return Measured(texts=texts, needle=by_length, footprint=held)


def answer(
    model: Any,
    tokenizer: Any,
    tasks: Mapping[str, Sequence[GenerationTask | ChoiceTask]],
    *,
    chunk: int = 512,
    progress: Progress | None = None,
) -> dict[str, TaskResult]:
    """Every task file's result."""
    return {
        name: run_tasks(model, tokenizer, rows, chunk=chunk, progress=stage(progress, name))
        for name, rows in tasks.items()
    }


def needle_lengths(model: Any) -> tuple[int, ...]:
    """Those of NEEDLE_LENGTHS that the model has positions for."""
    limit = max_positions(model) or max(NEEDLE_LENGTHS)
    lengths = tuple(length for length in NEEDLE_LENGTHS if length <= limit)
    if not lengths:
        raise ValueError(
            f"needle: the model has {limit} positions, the shortest context takes"
            f" {NEEDLE_LENGTHS[0]}; leave needle out"
        )
    return lengths


def storage(model: Any, held: Footprint | None = None) -> dict[str, float]:
    """kept_fraction, and bytes per token of this cache and of the full one at 16 bits.

    Of what pages hold of a sequence after its prompt, where that was measured; else by the spec.
    """
    spec, geometry = spec_of(model), family_of(model.config).geometry(model.config)
    baseline = 2 * geometry.full_numbers
    if held is not None:
        kept = held.kept_fraction
        return {
            "kept_fraction": kept,
            "bytes_per_token": kept * baseline,
            "baseline_bytes_per_token": baseline,
        }
    return {
        "kept_fraction": spec.kept_fraction if spec else 1.0,
        "bytes_per_token": spec.bytes_per_token() if spec else baseline,
        "baseline_bytes_per_token": baseline,
    }


def compare(
    model: Any,
    tokenizer: Any,
    recipes: Sequence[str],
    keeps: Sequence[float],
    texts: Mapping[str, str],
    *,
    align: int | None = None,
    ctx: int = 1024,
    chunk: int = 512,
    max_tokens: int | None = None,
    batch: int = 1,
    needle: int = 0,
    lengths: Sequence[int] | None = None,
    cache: CacheConfig | None = None,
    agnostic: bool = True,
    calib: list[Any] | None = None,
    calibration_tokens: int = CALIBRATION_TOKENS,
    seed: int = 0,
    statistics: Statistics | None = None,
    progress: Progress | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """The original model and every recipe at every keep, on the same windows and questions.

    All recipes read statistics of one pass over the same calibration text, or the ones given.
    `max_tokens` bounds the tokens of each text; `needle` is the number of contexts a length, of
    four questions each, and `lengths` which lengths (default: NEEDLE_LENGTHS). `cache`: measure on
    the paged cache, the original without bits or eviction but on the same tokens. `on_row` sees
    every row as soon as it is measured; the model is left as it was. Raises ValueError for settings
    that cannot work, before anything is measured.
    """
    compressors = [
        _compressor(model, name, tokenizer, calib=calib, max_tokens=calibration_tokens, seed=seed)
        for name in recipes
    ]
    for keep in keeps:
        check_keep(keep)
    what = Measurement(
        windows=text_windows(model, tokenizer, texts, ctx=ctx, max_tokens=max_tokens),
        chunk=chunk,
        batch=batch,
        needle=needle,
        lengths=lengths,
        cache=cache,
        agnostic=agnostic,
        scored_from=ctx // 2 if cache is not None and cache.evict else None,
    )
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


def _compressor(model: Any, recipe: str, tokenizer: Any, **settings: Any) -> Compressor:
    config = named.get(recipe)
    try:
        return Compressor(model, config, tokenizer, **settings)
    except ValueError as error:
        raise ValueError(f"recipe {recipe}: {error}") from None


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
        seconds=seconds,
        window_nll={name: result.window_nll for name, result in measured.texts.items()},
    )
