"""Results of a comparison of methods: one `Row` each, as a terminal table and as JSON.

Nothing here builds or runs a model. Tables and figures are drawn from rows alone, and `from_json`
reads rows that `to_json` wrote, so that both can be drawn again from a saved run.
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
    """A row of the table: a compressed model, or the original, measured on the same windows as the
    other rows.

    keep: the requested fraction of the cache; kept_fraction: the bits that a token stores over
    those of the uncompressed 16-bit cache, which bytes_per_token and baseline_bytes_per_token
    count, too. cache_bytes_allocated: bytes of this run's cache, in its dtype.
    perplexity: by text. delta_nll: by text, the mean and the standard error of the loss minus the
    original's, paired by window, in nats per token. window_nll: by text, the loss of every window.
    needle: by context length in tokens, the fraction of questions answered exactly. tasks: by file,
    scores and standard errors by name, `rows` (examples), and how many of them were `truncated`.
    seconds: of bases, ranks and folding, without the calibration that all rows share.
    pool_fraction: bytes of pages and page tables over the uncompressed 16-bit cache; None if the
    cache was not paged. dtype: of the model, in which pages hold what is not quantised; None in
    older files. step_ms: the predicted time of a decode step; step_estimated: by kernels that were
    not timed for that.
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
    dtype: str | None = None


def paired(a: Row, b: Row, text: str) -> tuple[float, float]:
    """Mean and standard error of `a`'s loss minus `b`'s on the windows of `text`, nats/token."""
    pairs = zip(a.window_nll[text], b.window_nll[text], strict=True)
    return mean_and_se([x - y for x, y in pairs])


def labels(rows: Sequence[tuple[str, float]]) -> list[str]:
    """Name each (recipe, keep) by its recipe, and its keep if several have that recipe."""
    recipes = [recipe for recipe, _ in rows]
    return [recipe if recipes.count(recipe) == 1 else f"{recipe} {keep:g}" for recipe, keep in rows]


def against(rows: Sequence[Row], baseline: str) -> list[Row]:
    """Pair the losses of rows with those of the row that `labels` calls `baseline`, instead of the
    original's. Rows stay as they are if that row was not measured yet."""
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
    """The texts that any row was measured on, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.perplexity))


def needle_lengths(rows: Sequence[Row]) -> list[int]:
    """The needle context lengths, in tokens, that any row was measured at, ascending."""
    return sorted({length for row in rows for length in row.needle or ()})


def task_scores(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The task files of any row, each with the main score of its task."""
    tasks = [pair for row in rows for pair in (row.tasks or {}).items()]
    pairs = [(name, score) for name, scores in tasks for score in HEADLINES if score in scores]
    return list(dict.fromkeys(pairs))


def format_truncated(rows: Sequence[Row], name: str) -> str:
    """Say how many prompts of a task file were truncated on their left; "" for none."""
    results = [row.tasks[name] for row in rows if row.tasks and name in row.tasks]
    most = max(results, key=lambda scores: scores.get("truncated", 0), default={})
    if not most.get("truncated"):
        return ""
    return f", {most['truncated']:g} of {most['rows']:g} prompts truncated to the model's positions"


def format_length(tokens: int) -> str:
    """Format a length: 512 is "512", 4096 is "4K"."""
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def format_bytes(size: float) -> str:
    """Format bytes with three significant digits in B, KiB, MiB or GiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 999.5:
            return f"{size:.4g} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def format_delta(delta: tuple[float, float] | None) -> str:
    """Format a loss increase with sign and standard error, in nats; a dash if not measured."""
    if delta is None:
        return NOT_MEASURED
    mean, se = delta
    digits = 4 if abs(mean) < 0.1 else 3
    error = "" if math.isnan(se) else f" ±{se:.{digits}f}"
    return f"{mean:+.{digits}f}{error}"


def perplexity_increase(delta: tuple[float, float]) -> tuple[float, float]:
    """Convert a loss increase and its standard error, in nats, to per cent of perplexity."""
    mean, se = min(delta[0], 700.0), delta[1]
    return 100 * math.expm1(mean), 100 * math.exp(mean) * se  # delta method


def format_increase(delta: tuple[float, float]) -> str:
    """Format a loss increase as per cent of perplexity, without an error that is not defined."""
    mean, se = perplexity_increase(delta)
    error = "" if math.isnan(se) else f" ± {se:.1f}"
    return f"{abs(mean):.1f}{error} % {'less' if round(mean, 1) < 0 else 'more'} perplexity"


def format_perplexity(value: float | None) -> str:
    """Format a perplexity: two decimals below 1000, none above; a dash if not measured."""
    if value is None:
        return NOT_MEASURED
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def format_needle(row: Row, length: int) -> str:
    """Format the needle accuracy at `length` in per cent; a dash if not measured."""
    accuracy = (row.needle or {}).get(length)
    return NOT_MEASURED if accuracy is None else f"{100 * accuracy:.0f}"


def format_task(row: Row, name: str, score: str) -> str:
    """Format a task file's score in per cent; a dash if not measured."""
    value = (row.tasks or {}).get(name, {}).get(score)
    return NOT_MEASURED if value is None else f"{100 * value:.1f}"


def short_name(path: str) -> str:
    """Shorten a path to the name of its file: "data/arc.jsonl.xz" is "arc"."""
    return Path(path).name.split(".")[0] or path


def format_storage(row: Row) -> tuple[str, str, str, str, str]:
    """Format the requested keep, the kept fraction, the compression factor, bytes per token and
    bytes of the cache."""
    factor = f"{1 / row.kept_fraction:.1f}×" if row.kept_fraction else "∞"
    size = f"{row.bytes_per_token:.0f}"
    cache = format_bytes(row.cache_bytes_allocated)
    return f"{row.keep:.3g}", f"{row.kept_fraction:.3f}", factor, size, cache


def paged(rows: Sequence[Row]) -> bool:
    """Whether any row was measured on pages."""
    return any(row.pool_fraction is not None for row in rows)


def format_pool(row: Row) -> str:
    """Format the bytes of pages over those of the 16-bit cache; a dash if it was not paged."""
    return NOT_MEASURED if row.pool_fraction is None else f"{row.pool_fraction:.3f}"


def wide_dtype(rows: Sequence[Row]) -> str:
    """The dtype of pages that is wider than 16 bits, such as "fp32", and doubles `pool_fraction`
    where numbers are not quantised; "" if there is none."""
    names = {row.dtype for row in rows if row.pool_fraction is not None} & {"float32", "float64"}
    return ", ".join(sorted(name.replace("float", "fp") for name in names if name))


def format_seconds(row: Row) -> str:
    """Format seconds, with one decimal below ten; a dash if not measured."""
    if row.seconds is None:
        return NOT_MEASURED
    return f"{row.seconds:.1f}" if row.seconds < 9.95 else f"{row.seconds:.0f}"


def table(rows: Sequence[Row], conditions: str = "", baseline: str = "original") -> Table:
    """Build a rich table of rows; perplexity and loss increase share a column per text.

    conditions: sentences on what was scored and how, for the caption. baseline: the row that losses
    are paired with.
    """
    names, lengths, scores = texts(rows), needle_lengths(rows), task_scores(rows)
    sizes = [format_length(length) for length in lengths]
    dtype = wide_dtype(rows)
    result = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    result.caption_justify = "left"
    result.caption = (
        "kept: bits stored over bits of the 16-bit cache."
        + f" pool: bytes of{f' {dtype}' if dtype else ''} pages over the same." * paged(rows)
        + f" Texts: perplexity and loss increase over {baseline} in nats per token, paired ± one"
        " standard error."
        + (f" {', '.join(sizes)}: % of needle questions answered." if sizes else "")
        + "".join(
            f" {short_name(name)}: {score}, %{format_truncated(rows, name)}."
            for name, score in scores
        )
        + " s: seconds of compression, without the calibration that all rows share."
        + (f" {conditions}" if conditions else "")
    )
    result.add_column("recipe", max_width=20)
    pages = [f"pool\n{dtype}".strip()] * paged(rows)
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
    """Convert rows to plain values for `json.dumps`. A standard error that is not defined becomes
    null."""
    return [finite(dataclasses.asdict(row)) for row in rows]


def from_json(saved: str | Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Row]:
    """Read rows that `to_json` wrote, in this version or in one with fewer measurements.

    saved: the rows, a record with "rows" as `compare --json` writes it, or the JSON text of either.
    Raises ValueError for invalid JSON, and for missing or unknown keys, which it names.
    """
    record = json.loads(saved) if isinstance(saved, str) else saved
    rows = record.get("rows") if isinstance(record, Mapping) else record
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
    read: dict[str, Any] = {name: x if x is None else _numbers(x) for name, x in values.items()}
    if read.get("needle"):
        read["needle"] = {int(length): share for length, share in read["needle"].items()}
    return Row(**read)


def _numbers(value: Any) -> Any:
    """Convert a measurement from JSON, where null is a number that is not defined."""
    if isinstance(value, Mapping):
        return {name: _numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return tuple(map(_numbers, value))
    return math.nan if value is None else value
