"""kvfold frontier: finds the best compression of a model at every size."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from kvfold.cli import common
from kvfold.cli.compare import NAMES, print_rows, record
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
    Windows,
    flag,
    parse_levels,
    parse_list,
)
from kvfold.config import CacheConfig
from kvfold.utils.errors import renamed
from kvfold.utils.files import write_json

if TYPE_CHECKING:
    from kvfold.evaluation.compare import Row


def frontier(
    model: Model,
    /,
    *,
    recipes: Annotated[str, Parameter(help=NAMES)] = "palu-j,swift,lean,small",
    factors: str = "2,3,4,5,6,8",
    bits: str = "8,4",
    levels: str | None = None,
    text: Files = (),
    calib: Files = (),
    calib_tokens: int | None = None,
    html: Path | None = None,
    json: Path | None = None,
    batch: int | None = None,
    context: int | None = None,
    seed: int = 0,
    windows: Windows = WINDOWS,
    place: Place = PLACE,
) -> None:
    """Measure the loss of MODEL at many cache sizes, and print the command for the best of each
    size.

    Recipes that predict losses choose dimensions and bits together; the others reduce dimensions
    only. Everything runs on the paged cache.

    Parameters
    ----------
    factors
        How many times smaller the cache becomes; several numbers with commas.
    bits
        Also measure the uncompressed model with a cache of these bits; several with commas.
    levels
        Bits that a plan may choose from, as --set levels of compress.
    text
        Text files to measure on (.txt, .xz, .gz); by default a packaged text.
    calib
        Text files to calibrate on (.txt, .xz, .gz); by default a packaged text.
    calib_tokens
        Tokens to calibrate on; more take longer. By default 32768 on a GPU, 12288 on a CPU.
    html
        File for a report with plots.
    json
        File for the results as JSON; it is written after every measurement.
    batch
        Sequences of the decode step whose time is predicted; by default 64.
    context
        Tokens per sequence in that step; by default 8192, or the model's maximum if that is less.
    seed
        Seed of what calibration draws at random.
    """
    from kvfold.compression.planning.step_time import load_of
    from kvfold.compression.planning.target import Target
    from kvfold.config import DEFAULT_KEEP

    names = parse_list(recipes, "--recipes", str)
    sizes = parse_list(factors, "--factors", float, "2,4,8")
    numbers = parse_list(bits, "--bits", int, "8,4")
    chosen = check_sizes(sizes, parse_levels(levels))
    common.check_outputs(html=html, json=json)
    with renamed(max_tokens="calib_tokens"):
        calibration = Calibration(calib=calib, max_tokens=calib_tokens, seed=seed)
    check_files(calib, numbers)
    texts = common.named_texts(text)
    common.check_original(model, "frontier")
    config, tokenizer = common.load_config(model), common.load_tokenizer(model)
    load = load_of(config, batch, context)
    with renamed(max_tokens="calib_tokens"):
        for name in names:  # sizes that are too small are left out
            common.check_recipe(config, name, calib_tokens, Target(keep=DEFAULT_KEEP), None)
    cache = common.cache_config(config, Storage(paged=True), place)
    what = common.measurement(config, tokenizer, windows, cache, texts, {})
    loaded = common.load(model, place)
    from kvfold.evaluation import comparison
    from kvfold.evaluation.frontier import measured

    compressors = comparison.compressors_of(
        loaded, tokenizer, names, calib=list(calib) or None, max_tokens=calib_tokens, seed=seed
    )
    settings = common.settings(loaded, windows, STORAGE) | {"levels": chosen, "seed": seed}
    settings |= {"step": {"batch": load.batch, "context": load.context}}
    settings |= {"calib_tokens": compressors[0].max_tokens, "calib": list(map(str, calib))}
    settings |= {"text": list(map(str, text))}
    flags = flags_of(calibration)
    rows: list[Row] = []
    try:
        with common.progress() as progress:
            for row in measured(
                compressors, sizes, numbers, what, levels=chosen, load=load, progress=progress
            ):
                rows.append(row)
                if json is not None:
                    so_far = record(model, rows, settings, loaded.device)
                    write_json(json, so_far | {"frontier": points(model, rows, flags, levels)})
    finally:
        print_rows(rows)
    best = points(model, rows, flags, levels)
    print_points(best)
    print(f"ms a step: predicted for {load} tokens on one NVIDIA H200")
    if html is not None:
        write_html(html, model, rows, best)


def check_sizes(factors: Sequence[float], levels: tuple[int, ...] | None) -> tuple[int, ...]:
    """The bits that a plan chooses from. Raises ValueError for factors or levels that are not
    legal."""
    from kvfold.compression.planning.target import Target

    with renamed(factor="factors"):
        targets = [Target(factor=factor, levels=levels) for factor in factors]
    return targets[0].levels or ()


def check_files(calib: Sequence[Path], bits: Sequence[int]) -> None:
    """Raises ValueError for text that cannot be read, and for illegal bits."""
    from kvfold import api

    api.check_files(calib, None, None)
    for number in bits:
        CacheConfig(bits=number)


def flags_of(calibration: Calibration) -> list[str]:
    """The flags of `kvfold compress` that calibrate in the same way."""
    flags = [f"--calib {shlex.join(map(str, calibration.calib))}"] if calibration.calib else []
    if calibration.max_tokens != CALIBRATION.max_tokens:
        flags.append(flag("calib_tokens", str(calibration.max_tokens)))
    if calibration.seed != CALIBRATION.seed:
        flags.append(f"--set seed={calibration.seed}")
    return flags


def points(
    model: str, rows: "Sequence[Row]", flags: Sequence[str], levels: str | None
) -> list[dict[str, Any]]:
    """The results that no smaller or no faster one beats, with their commands, smallest first.

    step_ms: predicted time of a decode step.
    """
    from kvfold.evaluation.frontier import fastest, frontier, knee, loss

    small, fast = frontier(rows), fastest(rows)
    turning = knee(small)
    best = sorted({id(x): x for x in (*small, *fast)}.values(), key=lambda x: x.kept_fraction)
    return [
        {
            "recipe": row.recipe,
            "keep": row.keep,
            "bytes_per_token": row.bytes_per_token,
            "times": 1 / row.kept_fraction,
            "loss": loss(row),
            "step_ms": row.step_ms,
            "step_estimated": row.step_estimated,
            "best_of_size": row in small,
            "best_of_speed": row in fast,
            "knee": row is turning,
            "command": command(model, row, flags, levels),
        }
        for row in best
    ]


def command(model: str, row: "Row", flags: Sequence[str], levels: str | None) -> str:
    """The command that makes the cache of a result."""
    from kvfold import recipes
    from kvfold.evaluation.frontier import predicts

    (name, _, prefer), factor = row.recipe.partition(" for "), f"{1 / row.keep:g}"
    if name not in recipes.RECIPES:  # the original, or its numbers in fewer bits
        bits = [f"--bits {name.removeprefix('int')}"] if name.startswith("int") else []
        return " ".join(["kvfold generate", shlex.quote(model), *bits])
    size = [f"--set keep={row.keep:.6g}", "--set align=1"]
    if predicts(recipes.get(name)):
        size = [f"--factor {factor}", *([f"--set levels={levels}"] if levels else [])]
    if prefer:
        size = [f"--factor {factor}", f"--set prefer={prefer}"]
    words = ["kvfold compress --fold", shlex.quote(model), f"--recipe {name}", *size, *flags]
    return " ".join([*words, f"--output {row.recipe.replace(' for ', '-')}-{factor}x"])


def print_points(best: Sequence[dict[str, Any]]) -> None:
    """Print the best results by size and by speed, and mark the knee. ~ marks a rough estimate."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("bytes/token", "smaller", "loss, nats", "ms a step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("command")
    for x in best:
        size, times = f"{x['bytes_per_token']:.0f}", f"{x['times']:.1f}x"
        ms = f"{'~' * x['step_estimated']}{x['step_ms']:.2f}" if x["step_ms"] else "-"
        mark = "knee: " if x["knee"] else ""
        table.add_row(size, times, f"{x['loss']:.4f}", ms, mark + x["command"])
    common.print_table(table)


def write_html(
    path: Path, model: str, rows: "Sequence[Row]", best: Sequence[dict[str, Any]]
) -> None:
    from kvfold.evaluation.compare import format_bytes
    from kvfold.evaluation.report import write_report

    knee = next(x for x in best if x["knee"])
    summary = [
        ("model", model),
        ("full cache, a token at 16 bits", format_bytes(rows[0].baseline_bytes_per_token)),
        ("the knee", f"{knee['times']:.1f}x smaller, +{knee['loss']:.4f} nats/token"),
    ]
    title = f"Loss against size on {model}"
    write_report(path, title=title, summary=summary, rows=rows, ranks=None, frontier=best)
    print(f"wrote {path}")
