"""Common parts of the commands of `kvfold bench`."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from kvfold.cli import common
from kvfold.cli.options import parse_list
from kvfold.utils.files import write_json

Shape = Annotated[
    str,
    Parameter(
        help="llama-3.1-8b, llama-3.1-70b, llama-2-7b, llama-2-7b-norope, qwen2.5-1.5b or tiny."
    ),
]
ServedShape = Annotated[
    str, Parameter(help="llama-3.1-8b, llama-3.1-70b, llama-2-7b, qwen2.5-1.5b or tiny.")
]
RANDOM = "random:"  # before the name of a shape, in place of a model
Served = Annotated[
    str,
    Parameter(
        help="A model as elsewhere, or random: before a shape of bench decode, such as random:tiny."
    ),
]
Batches = Annotated[str, Parameter(help="Numbers of sequences, separated by commas.")]
Lengths = Annotated[
    str,
    Parameter(
        help="Tokens of a sequence, separated by commas; every batch is timed with every one."
    ),
]
Rounds = Annotated[int, Parameter(help="Calls of each, then as many again.")]
Output = Annotated[Path | None, Parameter(help="File for the results; written as they come.")]


def names(text: str | None, option: str, default: Iterable[str]) -> tuple[str, ...]:
    """Of an option, `default` where it is not given."""
    return tuple(default) if text is None else tuple(parse_list(text, option, str))


def check_names(option: str, names: Sequence[str], legal: Sequence[str] | dict[str, Any]) -> None:
    """Raises ValueError for a name that is not legal."""
    if unknown := [name for name in names if name not in legal]:
        raise ValueError(f"{option}: {unknown[0]!r} is none of {', '.join(legal)}")


def versions(device: Any) -> dict[str, str | None]:
    """Versions it was made with, kernels included."""
    return {**common.versions(device), "triton": installed("triton")}


def installed(package: str) -> str | None:
    """Its version."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def empty_table(first: str, *rest: str) -> Table:
    """Its first column is text, the rest numbers."""
    found = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    found.add_column(first, no_wrap=True)
    for name in rest:
        found.add_column(name, justify="right", no_wrap=True)
    return found


def say(line: str) -> None:
    """Progress, for a log."""
    print(line, file=sys.stderr, flush=True)


class Results:
    """Results of a benchmark, by kind; its file, if there is one, is written after each."""

    def __init__(
        self,
        path: Path | None,
        benchmark: str,
        settings: dict[str, Any],
        versions: dict[str, str | None],
        kinds: Sequence[str],
        **more: Any,
    ) -> None:
        self.path, self.found = path, {kind: list[Any]() for kind in kinds}
        self.about = {"benchmark": benchmark, "settings": settings, "versions": versions, **more}

    def add(self, kind: str, *found: Any) -> None:
        """found: dictionaries or dataclasses."""
        self.found[kind] += found
        if self.path is not None:
            plain = {
                kind: [x if isinstance(x, dict) else asdict(x) for x in items]
                for kind, items in self.found.items()
            }
            write_json(self.path, self.about | plain)


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
    """Rows and what was skipped of a job's cases, written after each and shown in the end."""
    kinds = ("rows", "skipped")
    results = Results(json, benchmark, asdict(job), versions, kinds, **more)
    try:
        with common.progress() as progress:
            for done, case in enumerate(job.cases, start=1):
                for kind, found in zip(kinds, measure(case), strict=True):
                    results.add(kind, *found)
                if progress is not None:
                    progress(label, done, len(job.cases))
    finally:
        show(*results.found.values())
