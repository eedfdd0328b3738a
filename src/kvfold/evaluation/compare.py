"""Results of a comparison of recipes: one `Row` each, as a terminal table and as JSON.

Nothing here builds or runs a model. Tables and figures are made from rows alone, and rows survive a
round trip through JSON, so that both can be made again from a saved run.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from kvfold.evaluation.perplexity import mean_and_se
from kvfold.evaluation.tasks import HEADLINES
from kvfold.utils.files import finite

NOT_MEASURED = "–"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One compressed model, or the original, on the same texts and windows as its neighbours.

    `keep` is the fraction asked for and `kept_fraction` the one stored: bits a token stores over
    bits of the uncompressed 16-bit cache. `bytes_per_token` and `baseline_bytes_per_token` count
    the same way; `cache_bytes_allocated` is what the cache of this run took, in its own dtype.
    `delta_nll` is (mean, standard error) of the loss less the original's, paired by window, in nats
    per token. `perplexity` and `delta_nll` are keyed by text, `needle` (fractions of questions
    answered exactly) by context length in tokens, `tasks` (scores and standard errors by name,
    `rows`, and how many of them were `truncated`) by file. `seconds` is the time that bases, ranks
    and fold took; calibration, which the rows share, is not in it. `window_nll` holds the loss of
    every window of a text, so that any two rows can be paired. `pool_fraction`: bytes of pages and
    page tables over the uncompressed 16-bit cache, where the cache was paged. `step_ms`: what a
    decode step is predicted to take, `step_estimated` by kernels that were not timed for that.
    """

    recipe: str
    keep: float
    kept_fraction: float
    bytes_per_token: float
    baseline_bytes_per_token: float
    cache_bytes_allocated: int
    perplexity: Mapping[str, float]
    delta_nll: Mapping[str, tuple[float, float]]
    needle: Mapping[int, float] | None = None
    seconds: float | None = None
    window_nll: Mapping[str, Sequence[float]] = field(default_factory=dict)
    pool_fraction: float | None = None
    tasks: Mapping[str, Mapping[str, float]] | None = None
    step_ms: float | None = None
    step_estimated: bool = False


def paired(a: Row, b: Row, text: str) -> tuple[float, float]:
    """Mean and standard error of `a`'s loss less `b`'s on the windows of `text`, nats per token."""
    pairs = zip(a.window_nll[text], b.window_nll[text], strict=True)
    return mean_and_se([x - y for x, y in pairs])


def labels(rows: Sequence[tuple[str, float]]) -> list[str]:
    """Names of rows, (recipe, keep) each: the recipe, and its keep where several rows have it."""
    recipes = [recipe for recipe, _ in rows]
    return [recipe if recipes.count(recipe) == 1 else f"{recipe} {keep:g}" for recipe, keep in rows]


def against(rows: Sequence[Row], baseline: str) -> list[Row]:
    """Rows whose losses are paired with those of the row of that name, as of `labels`, instead of
    the original's. Without that row, as where it was not measured yet, they stay as they are."""
    names = labels([(row.recipe, row.keep) for row in rows])
    if baseline not in names:
        return list(rows)
    base = rows[names.index(baseline)]
    return [
        dataclasses.replace(
            row,
            delta_nll={}
            if row is base
            else {name: paired(row, base, name) for name in row.perplexity},
        )
        for row in rows
    ]


def texts(rows: Sequence[Row]) -> list[str]:
    """Names of the texts that any row was measured on, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.perplexity))


def needle_lengths(rows: Sequence[Row]) -> list[int]:
    """Needle context lengths in tokens that any row was measured at, ascending."""
    return sorted({length for row in rows for length in row.needle or ()})


def task_scores(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Task files and the main scores of their kinds, of which any row has a value."""
    tasks = [pair for row in rows for pair in (row.tasks or {}).items()]
    found = [(name, score) for name, scores in tasks for score in HEADLINES if score in scores]
    return list(dict.fromkeys(found))


def cut(rows: Sequence[Row], name: str) -> str:
    """How many prompts of a task file lost tokens on their left, if any did."""
    found = [row.tasks[name] for row in rows if row.tasks and name in row.tasks]
    most = max(found, key=lambda scores: scores.get("truncated", 0), default={})
    if not most.get("truncated"):
        return ""
    return f", {most['truncated']:g} of {most['rows']:g} prompts cut to the model's positions"


def format_length(tokens: int) -> str:
    """512 -> "512", 4096 -> "4K"."""
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def format_bytes(size: float) -> str:
    """Bytes with three significant digits in B, KiB, MiB or GiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 999.5:
            return f"{size:.4g} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def format_delta(delta: tuple[float, float] | None) -> str:
    """Signed loss increase with its standard error, in nats; a dash if it was not measured."""
    if delta is None:
        return NOT_MEASURED
    mean, se = delta
    digits = 4 if abs(mean) < 0.1 else 3
    error = "" if math.isnan(se) else f" ±{se:.{digits}f}"
    return f"{mean:+.{digits}f}{error}"


def perplexity_increase(delta: tuple[float, float]) -> tuple[float, float]:
    """Per cent more perplexity, and its standard error, of a loss increase and its own in nats."""
    mean, se = min(delta[0], 700.0), delta[1]
    return 100 * math.expm1(mean), 100 * math.exp(mean) * se  # delta method


def format_increase(delta: tuple[float, float]) -> str:
    """A loss increase in words, as per cent of perplexity; the error left out if not defined."""
    mean, se = perplexity_increase(delta)
    error = "" if math.isnan(se) else f" ± {se:.1f}"
    return f"{abs(mean):.1f}{error} % {'less' if round(mean, 1) < 0 else 'more'} perplexity"


def format_perplexity(value: float | None) -> str:
    """Two decimals below 1000, none above; a dash if it was not measured."""
    if value is None:
        return NOT_MEASURED
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def format_needle(row: Row, length: int) -> str:
    """Needle accuracy in per cent at `length`; a dash if it was not measured."""
    accuracy = (row.needle or {}).get(length)
    return NOT_MEASURED if accuracy is None else f"{100 * accuracy:.0f}"


def format_task(row: Row, name: str, score: str) -> str:
    """A task file's score in per cent; a dash if it was not measured."""
    value = (row.tasks or {}).get(name, {}).get(score)
    return NOT_MEASURED if value is None else f"{100 * value:.1f}"


def short_name(path: str) -> str:
    """ "data/arc.jsonl.xz" -> "arc"."""
    return Path(path).name.split(".")[0] or path


def format_storage(row: Row) -> tuple[str, str, str, str, str]:
    """Keep asked, kept fraction, compression factor, bytes a token, bytes the cache took."""
    factor = f"{1 / row.kept_fraction:.1f}×" if row.kept_fraction else "∞"
    size = f"{row.bytes_per_token:.0f}"
    cache = format_bytes(row.cache_bytes_allocated)
    return f"{row.keep:.3g}", f"{row.kept_fraction:.3f}", factor, size, cache


def paged(rows: Sequence[Row]) -> bool:
    """Whether any row was measured on pages."""
    return any(row.pool_fraction is not None for row in rows)


def format_pool(row: Row) -> str:
    """Bytes of pages over those of the 16-bit cache; a dash if it was not paged."""
    return NOT_MEASURED if row.pool_fraction is None else f"{row.pool_fraction:.3f}"


def format_seconds(row: Row) -> str:
    """Seconds, with one decimal below ten; a dash if they were not measured."""
    if row.seconds is None:
        return NOT_MEASURED
    return f"{row.seconds:.1f}" if row.seconds < 9.95 else f"{row.seconds:.0f}"


def table(rows: Sequence[Row], conditions: str = "", baseline: str = "original") -> Table:
    """Rows as a rich table; perplexity and loss increase share a column per text and wrap there.
    conditions: what was scored and how; baseline: the row that losses are paired with."""
    names, lengths, scores = texts(rows), needle_lengths(rows), task_scores(rows)
    sizes = [format_length(length) for length in lengths]
    result = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    result.caption_justify = "left"
    result.caption = (
        "kept: bits stored over bits of the 16-bit cache."
        + " pool: bytes of pages over the same." * paged(rows)
        + f" Texts: perplexity and loss increase over {baseline} in nats per token, paired ± one"
        " standard error."
        + (f" {', '.join(sizes)}: % of needle questions answered." if sizes else "")
        + "".join(f" {short_name(name)}: {score}, %{cut(rows, name)}." for name, score in scores)
        + (f" {conditions}" if conditions else "")
    )
    result.add_column("recipe", max_width=20)
    pages = ["pool"] * paged(rows)
    for name in ("keep", "kept", "less", "B/tok", "cache", *pages):
        result.add_column(name, justify="right", no_wrap=True)
    for name in names:
        result.add_column(name, justify="right", min_width=7)
    for name in [*sizes, *(short_name(name) for name, _ in scores), "s"]:
        result.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        losses = [_loss(row, name) for name in names]
        needles = [format_needle(row, length) for length in lengths]
        tasks = [format_task(row, *score) for score in scores]
        pool = [format_pool(row)] * paged(rows)
        measured = (*pool, *losses, *needles, *tasks, format_seconds(row))
        result.add_row(row.recipe, *format_storage(row), *measured)
    return result


def _loss(row: Row, name: str) -> str:
    value = format_perplexity(row.perplexity.get(name))
    return f"{value} {format_delta(row.delta_nll[name])}" if name in row.delta_nll else value


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain values for `json.dumps`; a standard error that is not defined becomes null."""
    return [finite(dataclasses.asdict(row)) for row in rows]


def from_json(saved: str | Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows as `to_json` wrote them, of this version or one with fewer measurements.

    saved: the rows, a record that has them under "rows", as `compare --json` writes one, or the
    JSON text of either. Raises ValueError for text that is no JSON, and for missing or unknown keys
    by name.
    """
    found = json.loads(saved) if isinstance(saved, str) else saved
    rows = found.get("rows") if isinstance(found, Mapping) else found
    if not isinstance(rows, Sequence) or not all(isinstance(x, Mapping) for x in rows):
        raise ValueError('no rows: give a list of them, or a record that has them under "rows"')
    return [_row(values) for values in rows]


def _row(values: Mapping[str, Any]) -> Row:
    fields = {field.name: field.default for field in dataclasses.fields(Row)}
    needed = {name for name, default in fields.items() if default is dataclasses.MISSING}
    if wrong := (needed - values.keys()) | (values.keys() - fields.keys()):
        raise ValueError(
            f"row: missing or unknown keys {', '.join(sorted(wrong))}; legal keys: {sorted(fields)}"
        )
    found: dict[str, Any] = {name: x if x is None else _numbers(x) for name, x in values.items()}
    if found.get("needle"):
        found["needle"] = {int(length): share for length, share in found["needle"].items()}
    return Row(**found)


def _numbers(value: Any) -> Any:
    """A measurement read from JSON, where null is a number that is not defined."""
    if isinstance(value, Mapping):
        return {name: _numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return tuple(map(_numbers, value))
    return math.nan if value is None else value
