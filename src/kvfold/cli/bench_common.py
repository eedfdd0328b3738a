"""What the commands of `kvfold bench` have in common."""

from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.table import Table

from kvfold.cli import common
from kvfold.cli.options import parse_list


def names(text: str | None, option: str, default: Iterable[str]) -> tuple[str, ...]:
    """Of an option, `default` where it is not given."""
    return tuple(default) if text is None else tuple(parse_list(text, option, str))


def check_names(option: str, names: Sequence[str], legal: Sequence[str] | dict[str, Any]) -> None:
    """Raises ValueError for a name that is not legal."""
    if unknown := [name for name in names if name not in legal]:
        raise ValueError(f"{option}: {unknown[0]!r} is none of {', '.join(legal)}")


def versions(device: Any) -> dict[str, str | None]:
    """What it was made with, kernels included."""
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
