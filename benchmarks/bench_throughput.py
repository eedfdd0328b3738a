"""Measures what eviction gains in throughput where memory is short; JSON and plots.

Run as `python benchmarks/bench_throughput.py --help`.
"""

import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvfold.cli import common
from kvfold.cli.advise import ModelOrShape
from kvfold.cli.bench_common import (
    RANDOM,
    Output,
    Results,
    check_names,
    empty_table,
    say,
    versions,
)
from kvfold.cli.bench_serve import check_outputs
from kvfold.cli.options import PLACE, Place, parse_list
from kvfold.config import CacheConfig
from kvfold.utils.errors import SettingError
from kvfold.utils.files import new_file, writing
from lab.command import run

if TYPE_CHECKING:
    from lab.serve_throughput import Row

LENGTHS = "500,1000,2000,4000,6000,8000,10000,12000"
RATES = "1,2,4,8,16,32,64"


def throughput(
    model: ModelOrShape,
    /,
    *,
    tokens: str = LENGTHS,
    rates: str = RATES,
    requests: int = 256,
    outputs: int = 500,
    runs: int = 1,
    evict: str = "kv-compress",
    bits: int | None = None,
    page: int | None = None,
    kv_bytes: int | None = None,
    seed: int = 0,
    place: Place = PLACE,
    json: Output = None,
    plot: Path | None = None,
) -> None:
    """Time prompts that come all at once, at rates of compression (KV-Compress §5.4).

    What does not fit is named with its reason; the rest goes on.

    Parameters
    ----------
    tokens
        Tokens of a prompt, separated by commas.
    rates
        Times fewer tokens to keep, 128 at least; 1 is an engine without eviction.
    requests
        Prompts, all at once.
    outputs
        Tokens of each answer.
    runs
        Times that each is measured, in turns.
    evict
        The policy.
    bits
        Of every number; by default what a checkpoint plans, or 16.
    page
        Rows a page.
    kv_bytes
        Bytes of the page pool; by default a share of what is free.
    seed
        Of the prompts' tokens, which are random.
    plot
        File for a figure: .svg, .png or .pdf.
    """
    check_outputs(json, plot)
    lengths, times = parse_list(tokens, "--tokens", int), parse_list(rates, "--rates", float)
    smallest = {"tokens": min(lengths), "rates": min(times), "requests": requests}
    for name, least in (smallest | {"outputs": outputs, "runs": runs}).items():
        if least < 1:
            raise SettingError(f"`{name}` must be at least 1, got {least:g}")
    CacheConfig(bits=bits, page=page, kv_bytes=kv_bytes, evict=evict, keep_tokens=1.0)
    loaded = load(model, place)
    settings: dict[str, Any] = {"model": model, "tokens": lengths, "rates": times}
    settings |= {"requests": requests, "outputs": outputs, "runs": runs, "evict": evict}
    settings |= {"bits": bits, "page": page, "kv_bytes": kv_bytes, "seed": seed}
    kinds = ("rows", "skipped")
    results = Results(json, "throughput", settings, versions(loaded.device), kinds)
    try:
        for _, rate in product(range(runs), times):
            measure(results, loaded, rate)
    finally:
        show(results.by_kind)
    if plot is not None:
        from lab.throughput_plot import write_throughput

        with writing(plot), new_file(plot) as scratch:
            write_throughput(scratch, results.by_kind["rows"])


def load(model: str, place: Place) -> Any:
    """The model, with random weights where its name begins so."""
    if not model.startswith(RANDOM):
        return common.load(model, place)
    import torch

    from kvfold.bench import synthetic_engine as served
    from kvfold.hub.loading import default_device

    shape = model.removeprefix(RANDOM)
    check_names("MODEL", [shape], served.WIDTHS)
    return served.random_model(shape, None, torch.device(place.device or default_device()))


def measure(results: Results, model: Any, rate: float) -> None:
    """All lengths at one rate, each with an engine that is built and warmed up for it."""
    from kvfold.bench.common import reason
    from kvfold.bench.decode import release
    from lab import serve_throughput as bench

    asked = results.metadata["settings"]
    own = {name: asked[name] for name in ("bits", "page", "kv_bytes")}
    how = {name: asked[name] for name in ("outputs", "seed")}
    for tokens in asked["tokens"]:
        release(model.device)
        try:
            llm = bench.build(
                model,
                rate,
                evict=asked["evict"],
                longest=tokens + asked["outputs"],
                max_sequences=asked["requests"],
                **own,
            )
            bench.measure(llm, tokens, rate, requests=1, **how)  # what is compiled at first use
            row = bench.measure(llm, tokens, rate, requests=asked["requests"], **how)
            del llm
        except Exception as error:  # whatever it is, the others run on
            skipped = {"tokens": tokens, "rate": rate, "reason": reason(error)}
            results.add("skipped", skipped)
            say(f"{tokens} tokens at rate {rate:g}: {skipped['reason']}")
            continue
        results.add("rows", row)
        say(
            f"{tokens} tokens at rate {rate:g}: {row.tokens_per_s:.1f} tokens/s, "
            f"{row.largest_batch} at once"
        )


def show(found: dict[str, list[Any]]) -> None:
    """Print what has been measured, and what has not."""
    common.print_table(table(found["rows"]))
    for case in found["skipped"]:
        print(f"{case['tokens']} tokens at rate {case['rate']:g}: {case['reason']}")


def table(rows: "Sequence[Row]") -> Table:
    """One line a row; gain: over a rate of 1 at the same length, the first that was measured."""
    found = empty_table(
        *("L", "rate", "kept", "tokens/s", "gain", "with prompts", "largest batch", "pre-empted")
    )
    whole: dict[int, float] = {}
    for row in rows:
        if row.rate == 1:
            whole.setdefault(row.tokens, row.tokens_per_s)
    for row in rows:
        base = whole.get(row.tokens)
        found.add_row(
            str(row.tokens),
            f"{row.rate:g}",
            str(row.kept or row.tokens),
            f"{row.tokens_per_s:.1f}",
            "-" if base is None else f"{row.tokens_per_s / base:.2f}",
            f"{row.total_per_s:.0f}",
            str(row.largest_batch),
            str(row.preemptions),
        )
    return found


if __name__ == "__main__":
    sys.exit(run(throughput))
