"""kvfold compare: recipes and sizes of one model, on the same text."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from kvfold.cli import common
from kvfold.cli.options import (
    CALIBRATION,
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
    parse_list,
)
from kvfold.errors import renamed
from kvfold.files import write_json
from kvfold.recipes import RECIPES

if TYPE_CHECKING:
    from kvfold.evaluation.compare import Row

NAMES = f"Separated by commas, of {', '.join(RECIPES)}."


def compare(
    model: Model,
    /,
    *,
    recipes: Annotated[str, Parameter(help=NAMES)] = "zack,palu-j,fast,lean,small",
    keep: str = "0.5,0.35,0.25",
    text: Files = (),
    tasks: TaskFiles = (),
    calib: Files = (),
    calib_tokens: int = CALIBRATION.max_tokens,
    align: int | None = None,
    html: Path | None = None,
    json: Path | None = None,
    seed: int = 0,
    windows: Windows = WINDOWS,
    storage: Storage = STORAGE,
    place: Place = PLACE,
) -> None:
    """Fold MODEL in several ways and say what each saves and costs.

    All recipes see the same calibration text; losses are paired with the original's by window.

    Parameters
    ----------
    keep
        Shares of the cache, separated by commas.
    text
        Text files to measure on (.txt, .xz, .gz); without any, a packaged one.
    calib
        Text files to calibrate on instead of ours.
    calib_tokens
        Tokens of calibration text.
    align
        Ranks are multiples of it; 1 compares methods as published.
    html
        File for a report with pictures.
    json
        File for the results; written after every row.
    seed
        Of calibration.
    """
    names = parse_list(recipes, "--recipes", str)
    keeps = parse_list(keep, "--keep", float)
    common.check_outputs(html=html, json=json)
    with renamed(max_tokens="calib_tokens"):
        calibration = Calibration(calib=calib, max_tokens=calib_tokens, seed=seed)
    check_sizes(keeps, align, calibration)
    from kvfold.compression.target import Target

    texts = common.named_texts(text)
    answers = common.read_tasks(tasks)
    config, tokenizer = common.load_config(model), common.load_tokenizer(model)
    with renamed(max_tokens="calib_tokens"):
        for name, size in product(names, keeps):
            common.check_recipe(config, name, calib_tokens, Target(keep=size), align)
    cache = common.cache_config(config, storage, place)
    what = common.measurement(config, tokenizer, windows, cache, texts, answers)
    loaded = common.load(model, place)
    what = replace(what, cache=common.with_policy(loaded, tokenizer, cache))
    from kvfold.evaluation import comparison

    compressors = comparison.compressors_of(
        loaded, tokenizer, names, calib=list(calib) or None, max_tokens=calib_tokens, seed=seed
    )
    settings = common.settings(loaded, windows, storage)
    settings |= {"align": align, "seed": seed, "calib_tokens": calib_tokens}
    files = {"text": text, "tasks": tasks, "calib": calib}
    settings |= {name: list(map(str, paths)) for name, paths in files.items()}
    rows: list[Row] = []

    def keep_row(row: "Row") -> None:
        rows.append(row)
        if json is not None:
            write_json(json, record(model, rows, settings, loaded.device))

    try:
        with common.progress() as progress:
            comparison.compare(
                compressors, keeps, what, align=align, progress=progress, on_row=keep_row
            )
    finally:
        print_rows(rows)
    if html is not None:
        write_html(html, model, rows)


def check_sizes(keeps: "Sequence[float]", align: int | None, calibration: Calibration) -> None:
    """Raises ValueError for what no recipe can do."""
    from kvfold.api import check_files
    from kvfold.compression.target import check_align, check_keep

    for keep in keeps:
        check_keep(keep)
    check_align(align)
    check_files(calibration.calib, None, None)


def record(
    model: str, rows: "Sequence[Row]", settings: dict[str, Any], device: Any
) -> dict[str, Any]:
    """Everything a table or figure is made from."""
    from kvfold.evaluation.compare import to_json

    versions = common.versions(device)
    return {"model": model, "rows": to_json(rows), "settings": settings, "versions": versions}


def print_rows(rows: "Sequence[Row]") -> None:
    """The table of what has been measured, if anything."""
    from kvfold.evaluation.compare import table

    if rows:
        Console().print(table(rows))


def write_html(path: Path, model: str, rows: "Sequence[Row]") -> None:
    from kvfold.evaluation.compare import format_bytes
    from kvfold.report import write_report

    original = rows[0]
    summary = [
        ("model", model),
        ("full cache, a token at 16 bits", format_bytes(original.baseline_bytes_per_token)),
        ("windows measured", str(sum(len(items) for items in original.window_nll.values()))),
    ]
    write_report(path, title=f"Recipes on {model}", summary=summary, rows=rows, ranks=None)
    print(f"wrote {path}")
