"""Number formats: how the numbers of a token are quantised and packed into bytes."""

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvfold.layout.formats.base import Format

Codebooks = tuple[tuple[float, ...], ...]  # calibrated levels, ascending, one tuple per bit width


class FormatEntry(NamedTuple):
    """A format's class in the module of its name, and what help says about it."""

    class_name: str
    summary: str


# By module of this package. `format_of` imports torch, this table does not.
FORMATS = {
    "integers": FormatEntry("Integers", "a scale for each token"),
    "kivi": FormatEntry(
        "Kivi",
        "keys per channel of a page, values per token, with zero points, not rotated",
    ),
    "kvquant": FormatEntry(
        "KVQuant",
        "calibrated levels and outliers, for a model compressed by recipe kvquant or kvquant-z",
    ),
    "gear": FormatEntry("Gear", "kivi with outliers and a low-rank part of the error"),
}


def format_of(name: str) -> "type[Format]":
    """The class of a format by name. Raises ValueError for an unknown name."""
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}; got {name!r}")
    format_class: type[Format] = getattr(
        import_module(f"kvfold.layout.formats.{name}"), FORMATS[name].class_name
    )
    return format_class
