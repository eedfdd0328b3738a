"""kvfold bench decode: the time between tokens of the whole engine, in a table and as JSON."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from kvfold.commands import common
from kvfold.commands.options import parse_list
from kvfold.files import write_json

if TYPE_CHECKING:
    from kvfold.benchmark.decode import Row


def decode(
    *,
    shape: str = "llama-3.1-8b",
    batch: str = "1,8,64",
    tokens: str = "8192",
    variants: str = "transformers,bf16-full,bf16-half,int8-half,int4-half",
    steps: int = 20,
    json: Path | None = None,
) -> None:
    """Time an engine's steps on random weights, its cache filled as if prompts had been read.

    Parameters
    ----------
    shape
        llama-3.1-8b, llama-2-7b or tiny.
    batch
        Numbers of sequences, separated by commas.
    tokens
        Tokens of a sequence, separated by commas; every batch is timed with every one.
    variants
        Names separated by commas: transformers (its own cache, SDPA), or as in bench attention.
    steps
        Steps that are timed, after three that are not.
    json
        File for the results; written after every row.
    """
    common.check_outputs(json=json)
    import torch

    from kvfold.benchmark import decode as bench
    from kvfold.loading import default_device

    names = parse_list(variants, "--variants", str)
    legal = (bench.ORIGINAL, *bench.VARIANTS)
    if unknown := [name for name in names if name not in legal]:
        raise ValueError(f"--variants: {unknown[0]!r} is none of {', '.join(legal)}")
    if shape not in bench.WIDTHS:
        raise ValueError(f"--shape: {shape!r} is none of {', '.join(bench.WIDTHS)}")
    if steps < 2:
        raise ValueError(f"--steps must be at least 2, got {steps}")
    device = torch.device(default_device())
    rows: list[Row] = []
    skipped: list[dict[str, object]] = []
    try:
        for b in parse_list(batch, "--batch", int):
            for t in parse_list(tokens, "--tokens", int):
                for name in names:
                    case = {"variant": name, "batch": b, "tokens": t}
                    try:
                        rows.append(bench.measure(shape, name, b, t, steps, device))
                    except torch.OutOfMemoryError:
                        skipped.append({**case, "reason": "out of memory"})
                    if json is not None:
                        record = {
                            "benchmark": "decode",
                            "settings": {"shape": shape, "steps": steps},
                            "versions": common.versions(device),
                            "rows": [dataclasses.asdict(row) for row in rows],
                            "skipped": skipped,
                        }
                        write_json(json, record)
    finally:
        Console().print(table(rows))
        for case in skipped:
            print(f"{case['variant']} at {case['batch']} x {case['tokens']}: {case['reason']}")


def table(rows: "list[Row]") -> Table:
    """One line a row; bytes in GB."""
    found = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    found.add_column("cache", no_wrap=True)
    for name in ("B x T", "ms", "p10-p90", "tokens/s", "cache GB", "peak GB", "predicted GB"):
        found.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        found.add_row(
            row.variant,
            f"{row.batch} x {row.tokens}",
            f"{row.ms:.2f}",
            f"{row.ms_p10:.2f}-{row.ms_p90:.2f}",
            f"{row.tokens_per_s:.0f}",
            *(f"{x / 1e9:.2f}" for x in (row.cache_bytes, row.peak_bytes, row.predicted_bytes)),
        )
    return found
