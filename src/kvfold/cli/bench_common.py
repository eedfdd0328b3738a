"""Shared parts of the commands of `kvfold bench`."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from kvfold.cli import common
from kvfold.cli.options import parse_list
from kvfold.utils.files import write_json
from kvfold.utils.versions import version_of

Shape = Annotated[
    str,
    Parameter(
        help="Shape of the model: llama-3.1-8b, llama-3.1-70b, llama-2-7b, llama-2-7b-norope,"
        " qwen2.5-1.5b or tiny."
    ),
]
ServedShape = Annotated[
    str,
    Parameter(
        help="Shape of the model: llama-3.1-8b, llama-3.1-70b, llama-2-7b, qwen2.5-1.5b or tiny."
    ),
]
RANDOM = "random:"  # before the name of a shape, in place of a model
Batches = Annotated[str, Parameter(help="Sequences in a batch; several numbers with commas.")]
Lengths = Annotated[
    str,
    Parameter(
        help="Tokens of a sequence; several numbers with commas. Every batch is timed with every"
        " length."
    ),
]
Rounds = Annotated[int, Parameter(help="Times that each is called, in two sets.")]
Output = Annotated[
    Path | None, Parameter(help="File for the results as JSON; it is written as they come.")
]


def names(text: str | None, option: str, default: Iterable[str]) -> tuple[str, ...]:
    """The names in an option's text; `default` for None."""
    return tuple(default) if text is None else tuple(parse_list(text, option, str))


def check_names(option: str, names: Sequence[str], legal: Sequence[str] | dict[str, Any]) -> None:
    """Raises ValueError for an unknown name."""
    if unknown := [name for name in names if name not in legal]:
        raise ValueError(f"{option}: {unknown[0]!r} is none of {', '.join(legal)}")


def versions(device: Any) -> dict[str, str | None]:
    """Versions of everything that decides the results, compilers of kernels included."""
    return {**common.versions(device), "triton": version_of("triton")}


def empty_table(first: str, *rest: str) -> Table:
    """A table with a text column, followed by columns of numbers."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in rest:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def digits(x: float) -> str:
    """A number with four significant digits, or all of its whole ones: 0.4512, 45.12, 451234."""
    return f"{x:.4g}" if abs(x) < 9999.5 else f"{x:.0f}"


def say(line: str) -> None:
    """Print a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


class Results:
    """The results of a benchmark, by kind. Its file, if any, is written after every result."""

    def __init__(
        self,
        path: Path | None,
        benchmark: str,
        settings: dict[str, Any],
        versions: dict[str, str | None],
        kinds: Sequence[str],
        **more: Any,
    ) -> None:
        self.path, self.by_kind = path, {kind: list[Any]() for kind in kinds}
        self.metadata = {"benchmark": benchmark, "settings": settings, "versions": versions, **more}

    def add(self, kind: str, *results: Any) -> None:
        """Add dictionaries or dataclasses."""
        self.by_kind[kind] += results
        if self.path is not None:
            plain = {
                kind: [x if isinstance(x, dict) else asdict(x) for x in items]
                for kind, items in self.by_kind.items()
            }
            write_json(self.path, self.metadata | plain)


def measure_cases(
    benchmark: str,
    job: Any,
    measure: Callable[[Any], tuple[list[Any], list[Any]]],
    show: Callable[[list[Any], list[Any]], None],
    *,
    json: Path | None,
    label: str,
    versions: dict[str, str | None],
    **more: Any,
) -> None:
    """Measure all cases of a job: results and what was skipped are written after every case, and
    shown at the end."""
    kinds = ("rows", "skipped")
    results = Results(json, benchmark, asdict(job), versions, kinds, **more)
    try:
        with common.progress() as progress:
            for done, case in enumerate(job.cases, start=1):
                for kind, measured in zip(kinds, measure(case), strict=True):
                    results.add(kind, *measured)
                if progress is not None:
                    progress(label, done, len(job.cases))
    finally:
        show(*results.by_kind.values())
