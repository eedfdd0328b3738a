"""kvfold bench decode: time between tokens and to the first one, in tables and as JSON."""

import sys
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvfold.cli import bench_common as shared
from kvfold.cli import common
from kvfold.cli.bench_common import Results, check_names, empty_table, say, versions
from kvfold.cli.options import parse_list

if TYPE_CHECKING:
    from kvfold.bench.decode import FirstToken, Row

WIDTH = 120  # of tables in a log
GB = ("cache GB", "peak GB", "predicted GB")


def decode(
    *,
    shape: shared.ServedShape = "llama-3.1-8b",
    batch: shared.Batches = "1,8,64",
    tokens: shared.Lengths = "8192",
    variants: str = "transformers,bf16-full,bf16-half,int8-half,int4-half",
    steps: int = 20,
    prefill: bool = False,
    json: shared.Output = None,
) -> None:
    """Time an engine's steps on random weights, its cache filled as if prompts had been read.

    What does not fit into the memory, or fails, is named with its reason; the rest goes on.

    Parameters
    ----------
    variants
        Names separated by commas: transformers (its dynamic cache, SDPA), transformers-static (its
        static one, as a CUDA graph), or as in bench attention.
    steps
        Steps that are timed, and as many again, after four that are not.
    prefill
        Time the first token of one prompt of every length too.
    """
    common.check_outputs(json=json)
    import torch

    from kvfold.bench import contenders
    from kvfold.hub.loading import default_device

    names = parse_list(variants, "--variants", str)
    check_names("--variants", names, contenders.NAMES)
    check_names("--shape", [shape], contenders.served.WIDTHS)
    if steps < 2:
        raise ValueError(f"--steps must be at least 2, got {steps}")
    batches, lengths = (
        parse_list(text, option, int) for text, option in ((batch, "--batch"), (tokens, "--tokens"))
    )
    for option, least in (("--batch", min(batches)), ("--tokens", min(lengths) - 1)):
        if least < 1:
            raise ValueError(f"{option} is too small; legal: batches from 1, tokens from 2")
    settings: dict[str, Any] = {"shape": shape, "batch": batches, "tokens": lengths}
    settings |= {"variants": names, "steps": steps, "prefill": prefill}
    device = torch.device(default_device())
    kinds = ("rows", "first_tokens", "skipped")
    results = Results(json, "decode", settings, versions(device), kinds)
    try:
        for name in names:
            measure(results, name, device)
    finally:
        print_results(results.found)


def measure(results: Results, name: str, device: Any) -> None:
    """All batches and lengths of one contender, whose model is built once."""
    from kvfold.bench import decode as bench
    from kvfold.bench.common import reason
    from kvfold.bench.contenders import contender

    asked = results.about["settings"]
    shape, steps = asked["shape"], asked["steps"]
    bench.release(device)
    try:
        of = contender(shape, name, device)
    except Exception as error:  # whatever it is, the others run on
        skip(results, name, "all", "all", reason(error))
        return
    for tokens, batch in product(asked["tokens"], [*asked["batch"], *[None] * asked["prefill"]]):
        found: Row | FirstToken | str
        try:
            bench.release(device)
            if batch is None:
                found = bench.measure_first(of, shape, name, tokens, device)
            else:
                found = bench.measure_step(of, shape, name, batch, tokens, steps, device)
        except Exception as error:  # as above
            found = reason(error)
        if isinstance(found, str):
            skip(results, name, "first token" if batch is None else batch, tokens, found)
        else:
            what = "to the first token" if batch is None else f"a step of {batch}"
            say(f"{name}, {tokens} tokens: {found.ms:.2f} ms {what}")
            results.add("first_tokens" if batch is None else "rows", found)


def skip(results: Results, name: str, batch: int | str, tokens: int | str, reason: str) -> None:
    say(f"{name} at {batch} x {tokens}: {reason}")
    case = {"variant": name, "batch": batch, "tokens": tokens, "reason": reason}
    results.add("skipped", case)


def print_results(found: dict[str, list[Any]]) -> None:
    """Print what has been measured, and what has not."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table(found["rows"]))
    if found["first_tokens"]:
        console.print(first_table(found["first_tokens"]))
    for case in found["skipped"]:
        print(f"{case['variant']} at {case['batch']} x {case['tokens']}: {case['reason']}")


def table(rows: "Sequence[Row]") -> Table:
    """One line a row; bytes in GB."""
    found = empty_table("cache", "B x T", "ms", "p10-p90", "again", "tokens/s", *GB)
    for row in rows:
        found.add_row(
            row.variant,
            f"{row.batch} x {row.tokens}",
            f"{row.ms:.2f}",
            f"{row.ms_p10:.2f}-{row.ms_p90:.2f}",
            f"{row.repeat_ms:.2f}",
            f"{row.tokens_per_s:.0f}",
            *(f"{x / 1e9:.2f}" for x in (row.cache_bytes, row.peak_bytes, row.predicted_bytes)),
        )
    return found


def first_table(rows: "Sequence[FirstToken]") -> Table:
    """One line a prompt length."""
    found = empty_table("cache", "T", "chunk", "ms to the first token", "low-high", "tokens/s")
    for row in rows:
        low_high = f"{row.ms_low:.1f}-{row.ms_high:.1f}"
        chunk = "all" if row.chunk is None else str(row.chunk)
        numbers = f"{row.ms:.1f}", low_high, f"{row.tokens_per_s:.0f}"
        found.add_row(row.variant, str(row.tokens), chunk, *numbers)
    return found
