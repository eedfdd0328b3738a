"""kvfold bench attention: one decode step's attention, ours and others', in a table and as JSON."""

import dataclasses
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from kvfold.cli import bench_common as shared
from kvfold.cli import common
from kvfold.cli.options import parse_list

if TYPE_CHECKING:
    from kvfold.bench.attention import Row, Skipped
    from kvfold.bench.ceiling import Ceiling


def attention(
    *,
    shape: shared.Shape = "llama-3.1-8b",
    batch: shared.Batches = "1,16,64",
    tokens: shared.Lengths = "1024,8192,32768",
    variants: str | None = None,
    baselines: str | None = None,
    layers: int = 32,
    rounds: shared.Rounds = 30,
    json: shared.Output = None,
) -> None:
    """Time one decode step's attention on random paged caches, beside the fastest bf16 baseline.

    Every kernel is checked against attention written out before it is timed. All that is timed
    takes turns in one process; times are medians, in microseconds a layer.

    Parameters
    ----------
    variants
        Names separated by commas, such as bf16-half,lean-35; by default those without rebuilt keys.
    baselines
        Names separated by commas, such as sdpa-cudnn,flashinfer; by default all.
    layers
        Layers a call, each with its own cache where memory allows.
    """
    cases = product(parse_list(batch, "--batch", int), parse_list(tokens, "--tokens", int))
    common.check_outputs(json=json)
    import torch

    from kvfold.bench import attention as bench
    from kvfold.bench.ceiling import measure_ceiling
    from kvfold.hub.loading import default_device

    job = bench.Job(
        shape=shape,
        variants=shared.names(variants, "--variants", bench.DEFAULT),
        baselines=shared.names(baselines, "--baselines", bench.BASELINES),
        layers=layers,
        rounds=rounds,
        cases=tuple(cases),
    )
    from kvfold.ops.decode import decode

    device = torch.device(default_device())
    ceiling = measure_ceiling(device, rounds)
    shared.measure_cases(
        "attention",
        job,
        lambda case: bench.measure_case(job, case[0], case[1], decode, ceiling, device),
        lambda rows, skipped: print_rows(rows, skipped, ceiling),
        json=json,
        label=f"{shape}, B x T",
        versions={**shared.versions(device), "flashinfer": shared.installed("flashinfer-python")},
        ceiling=dataclasses.asdict(ceiling),
    )


def print_rows(rows: "Sequence[Row]", skipped: "Sequence[Skipped]", ceiling: "Ceiling") -> None:
    """Print what has been measured, if anything, and what has not."""
    for batch, tokens in dict.fromkeys((row.batch, row.tokens) for row in rows):
        own = [row for row in rows if (row.batch, row.tokens) == (batch, tokens)]
        print(f"\n{own[0].shape}, {batch} x {tokens} tokens (* fastest baseline):")
        Console().print(table(own))
    if rows:
        read, copy = ceiling.read_tb_per_s, ceiling.copy_tb_per_s
        print(f"\nceiling: {read:.3g} TB/s read ({ceiling.read_by}), {copy:.3g} TB/s copied")
    missing: dict[tuple[str, str], list[str]] = {}
    for x in skipped:
        missing.setdefault((x.name, x.reason), []).append(f"{x.batch} x {x.tokens}")
    for (name, reason), where in missing.items():
        print(f"{name} at {', '.join(where)} not timed: {reason}")


def table(rows: "Sequence[Row]") -> Table:
    """One line a row of one case; times in microseconds a layer, speed-up in times."""
    columns = "us", "p10-p90", "again", "MB", "TB/s", "ceiling", "times"
    found = shared.empty_table("cache", *columns)
    for row in rows:
        speedup = row.speedup_vs_fastest
        found.add_row(
            row.variant + " *" * (row.variant == row.fastest_baseline),
            f"{row.us:.4g}",
            f"{row.us_p10:.4g}-{row.us_p90:.4g}",
            f"{row.repeat_us:.4g}",
            f"{row.bytes / 1e6:.4g}",
            f"{row.tb_per_s:.2f}",
            f"{100 * row.ceiling_fraction:.0f} %",
            "–" if speedup is None else f"{speedup:.2f}",
        )
    return found
