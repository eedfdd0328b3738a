"""kvfold compare: measures several recipes and sizes of one model on the same text."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvfold import recipes as known
from kvfold.cli import common
from kvfold.cli.options import (
    PLACE,
    STORAGE,
    WINDOWS,
    Calibration,
    Files,
    Model,
    Place,
    Storage,
    TaskFiles,
    Windows,
)
from kvfold.utils.errors import SettingError, renamed
from kvfold.utils.files import write_json

if TYPE_CHECKING:
    from kvfold.cli.methods import StoredMethod
    from kvfold.evaluation.compare import Row
    from kvfold.evaluation.comparison import Method

NAMES = f"Recipes, separated by commas: {known.NAMES}."
DEFAULT_RECIPES, DEFAULT_KEEPS = "zack,palu-j,fast,lean,small", "0.5,0.35,0.25"


def compare(
    model: Model,
    /,
    *,
    recipes: Annotated[str, Parameter(help=NAMES)] = DEFAULT_RECIPES,
    keep: str = DEFAULT_KEEPS,
    methods: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    baseline: Annotated[str, Parameter(allow_leading_hyphen=True)] = "original",
    text: Files = (),
    tasks: TaskFiles = (),
    calib: Files = (),
    calib_tokens: int | None = None,
    stats: Path | None = None,
    align: int | None = None,
    html: Path | None = None,
    json: Path | None = None,
    seed: int = 0,
    windows: Windows = WINDOWS,
    storage: Storage = STORAGE,
    place: Place = PLACE,
) -> None:
    """Compare compression methods on MODEL: the size and the loss of each, in one table.

    All methods are calibrated and measured on the same text, and losses are paired window by
    window.

    Parameters
    ----------
    keep
        Shares of the cache to keep, for all --recipes; several shares with commas.
    methods
        Methods to compare, instead of --recipes and --keep, separated by semicolons. A method is a
        recipe and a size, options of the cache, or both: "swift 4x; zdc .5 --bits 4; --bits 8".
        Names of published methods work too, such as "KIVI 2 bits"; the words ours, published and
        papers stand for many methods each.
    baseline
        The method that losses are paired with: as in --methods, or a recipe and its share, such as
        "zack 0.5".
    text
        Text files to measure on (.txt, .xz, .gz); by default a packaged text.
    calib
        Text files to calibrate on (.txt, .xz, .gz); by default a packaged text.
    calib_tokens
        Tokens to calibrate on; more take longer. By default 32768 on a GPU, 12288 on a CPU.
    stats
        File for the results of the calibration pass: read if it exists and fits the model, else
        written.
    align
        Make ranks multiples of this number; 1 compares methods as published.
    html
        File for a report with plots.
    json
        File for the results as JSON; it is written after every method.
    seed
        Seed of what calibration draws at random.
    """
    wanted = requested(methods, recipes, keep, align, storage)
    check_baseline(baseline, [method for method, _ in wanted])
    common.check_outputs(html=html, json=json)
    with renamed(max_tokens="calib_tokens"):
        calibration = Calibration(calib=calib, stats=stats, max_tokens=calib_tokens, seed=seed)
    check_files(calibration)
    texts = common.named_texts(text)
    answers = common.read_tasks(tasks)
    common.check_original(model, "compare")
    config, tokenizer = common.load_config(model), common.load_tokenizer(model)
    with renamed(max_tokens="calib_tokens"):
        chosen = [check_method(config, *pair, calib_tokens, place) for pair in wanted]
    caches = [method.cache for method in chosen]
    evicting = next((cache for cache in caches if cache and cache.evict), caches[0])
    what = common.measurement(config, tokenizer, windows, evicting, texts, answers)
    loaded = common.load(model, place)
    chosen = [
        replace(method, cache=common.with_policy(loaded, tokenizer, method.cache))
        for method in chosen
    ]
    from kvfold.evaluation import comparison
    from kvfold.evaluation.compare import against

    compressors = comparison.compressors_of(
        loaded,
        tokenizer,
        list(dict.fromkeys(method.recipe.name for method in chosen if method.recipe)),
        calib=list(calib) or None,
        max_tokens=calib_tokens,
        seed=seed,
    )
    settings = common.settings(loaded, windows, storage)
    read = compressors[0].max_tokens if compressors else None
    settings |= {"align": align, "seed": seed, "calib_tokens": read, "methods": methods}
    settings |= {"baseline": baseline, "scored_from": comparison.scored_from(caches, what)}
    files = {"text": text, "tasks": tasks, "calib": calib}
    settings |= {name: list(map(str, paths)) for name, paths in files.items()}
    rows: list[Row] = []

    def keep_row(row: "Row") -> None:
        rows.append(row)
        if json is not None:
            write_json(json, record(model, rows, settings, loaded.device))

    try:
        with common.progress() as progress:
            comparison.compare_methods(
                loaded,
                tokenizer,
                chosen,
                what,
                compressors=compressors,
                statistics=stats,
                progress=progress,
                on_row=keep_row,
            )
    finally:
        shown = against(rows, baseline)
        step = compressors[0].align(align) if compressors else None
        conditions = comparison.conditions(what, caches, loaded.dtype, step)
        print_rows(shown, conditions, baseline)
    if html is not None:
        write_html(html, model, shown, conditions, baseline)


def check_baseline(baseline: str, methods: "Sequence[Method]") -> None:
    """Raises SettingError for a baseline that is not compared."""
    from kvfold.evaluation.compare import labels
    from kvfold.evaluation.comparison import ORIGINAL

    names = labels([(ORIGINAL, 1.0), *((method.name, method.keep) for method in methods)])
    if baseline not in names:
        raise SettingError(f"`baseline` must be one of {', '.join(names)}; got {baseline!r}")


def requested(
    methods: str | None, recipes: str, keep: str, align: int | None, storage: Storage
) -> "list[StoredMethod]":
    """The methods to compare, by the options. Raises ValueError for options that exclude each
    other, or are not legal."""
    from kvfold.cli.methods import by_recipe, read

    if methods is None:
        return by_recipe(recipes, keep, align, storage)
    excluded = {"recipes": recipes != DEFAULT_RECIPES, "keep": keep != DEFAULT_KEEPS}
    excluded |= {"align": align is not None}
    excluded |= {x.name: getattr(storage, x.name) != x.default for x in fields(storage)}
    for name in (name for name, changed in excluded.items() if changed):
        raise SettingError(
            f"`methods` sets the recipe, size and cache of every method: leave `{name}` out, or"
            " write it into a method"
        )
    return read(methods)


def check_method(
    config: Any, method: "Method", storage: Storage, calib_tokens: int | None, place: Place
) -> "Method":
    """A method with its cache. Raises ValueError if it does not work with a model of this
    config."""
    from kvfold.engine.runner.build import layout_of

    recipe, target = method.recipe, method.target
    if recipe is not None:
        common.check_recipe(config, recipe, calib_tokens, target, method.align)
    cache = common.cache_config(config, storage, place, planned=target.plans_bits)
    if cache is not None and not (recipe and recipe.codebooks):
        layout_of(config, common.saved_spec(config), cache, None, itemsize=4)
    return replace(method, cache=cache)


def check_files(calibration: Calibration) -> None:
    """Raises ValueError for files that cannot be read or written, before the work starts."""
    from kvfold import api

    api.check_files(calibration.calib, calibration.stats, None)


def record(
    model: str, rows: "Sequence[Row]", settings: dict[str, Any], device: Any
) -> dict[str, Any]:
    """The JSON record: everything that a table or figure is made from."""
    from kvfold.evaluation.compare import to_json

    versions = common.versions(device)
    return {"model": model, "rows": to_json(rows), "settings": settings, "versions": versions}


def print_rows(rows: "Sequence[Row]", conditions: str = "", baseline: str = "original") -> None:
    """Print the table of `evaluation.compare`, if anything was measured."""
    from kvfold.evaluation.compare import table

    if rows:
        common.print_table(table(rows, conditions, baseline))


def write_html(
    path: Path, model: str, rows: "Sequence[Row]", conditions: str = "", baseline: str = "original"
) -> None:
    """Write the table with what was scored, and the figures."""
    from kvfold.evaluation.compare import format_bytes
    from kvfold.evaluation.report import write_report

    original = rows[0]
    summary = [
        ("model", model),
        ("full cache, a token at 16 bits", format_bytes(original.baseline_bytes_per_token)),
        ("windows measured", str(sum(len(items) for items in original.window_nll.values()))),
    ]
    write_report(
        path,
        title=f"Recipes on {model}",
        summary=summary,
        rows=rows,
        ranks=None,
        conditions=conditions,
        baseline=baseline,
    )
    print(f"wrote {path}")
