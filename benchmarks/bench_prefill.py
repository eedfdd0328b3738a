"""Times attention of a prompt's chunk, kvfold's and others'; a table and JSON.

Run as `python benchmarks/bench_prefill.py --help`.
"""

import sys
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from rich.table import Table

from kvfold.cli import bench_common as shared
from kvfold.cli import common
from kvfold.cli.options import parse_list
from lab.command import run

if TYPE_CHECKING:
    from lab.prefill import Row, Skipped


def prefill(
    *,
    shape: shared.Shape = "llama-3.1-8b",
    batch: shared.Batches = "1",
    tokens: shared.Lengths = "2048,8192,32768",
    chunk: str | None = None,
    variants: str | None = None,
    baselines: str | None = None,
    layers: int = 4,
    rounds: shared.Rounds = 20,
    json: shared.Output = None,
) -> None:
    """Time attention of a prompt's last tokens over all of it, beside the fastest bf16 baseline.

    Every kernel is checked against attention written out before it is timed. All that is timed
    takes turns in one process; times are medians, in microseconds a layer.

    Parameters
    ----------
    chunk
        How many of them are queries, the last ones, separated by commas; by default all.
    variants
        full, half, half-ragged, half-uneven or quarter, separated by commas; by default all. With
        @zack, tiles of queries as in ZACK's paper; with, say, @128x64w8s3r128, cut like that.
    baselines
        sdpa-flash or sdpa-cudnn, separated by commas; by default both.
    layers
        Layers a call, each with its own rows.
    """
    common.check_outputs(json=json)
    import torch

    from kvfold.hub.loading import default_device
    from lab import prefill as bench

    batches, sizes = parse_list(batch, "--batch", int), parse_list(tokens, "--tokens", int)
    chunks = None if chunk is None else parse_list(chunk, "--chunk", int)
    job = bench.Job(
        shape=shape,
        cases=tuple((b, s, t) for b, s in product(batches, sizes) for t in chunks or [s]),
        variants=shared.names(variants, "--variants", bench.KEPT),
        baselines=shared.names(baselines, "--baselines", bench.BASELINES),
        layers=layers,
        rounds=rounds,
    )
    device = torch.device(default_device())
    shared.measure_cases(
        "prefill",
        job,
        lambda case: bench.measure_case(job, case, device),
        print_rows,
        json=json,
        label=f"{shape}, B x S x T",
        versions=shared.versions(device),
    )


def print_rows(rows: "Sequence[Row]", skipped: "Sequence[Skipped]") -> None:
    """Print what has been measured, if anything, and what has not."""
    for case in dict.fromkeys((row.batch, row.tokens, row.chunk) for row in rows):
        own = [row for row in rows if (row.batch, row.tokens, row.chunk) == case]
        print(f"\n{own[0].shape}, {case[0]} x the last {case[2]} of {case[1]} tokens"
              " (* fastest baseline):")  # fmt: skip
        common.print_table(table(own))
    for x in skipped:
        where = f"{x.batch} x {x.chunk} of {x.tokens}"
        print(f"{x.name} at {where} not timed: {x.reason}")


def table(rows: "Sequence[Row]") -> Table:
    """One line a row of one case; times in microseconds a layer, speed-up in times."""
    found = shared.empty_table("kept", "us", "p10-p90", "again", "TFLOP/s", "times")
    for row in rows:
        speedup = row.speedup_vs_fastest
        found.add_row(
            row.variant + " *" * (row.variant == row.fastest_baseline),
            shared.digits(row.us),
            f"{shared.digits(row.us_p10)}-{shared.digits(row.us_p90)}",
            shared.digits(row.repeat_us),
            f"{row.tflops:.3g}",
            "–" if speedup is None else f"{speedup:.2f}",
        )
    return found


if __name__ == "__main__":
    sys.exit(run(prefill))
