"""Number formats: how the numbers of a token are quantised and packed into bytes."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfold.layout.formats.base import Format

Codebooks = tuple[tuple[float, ...], ...]  # calibrated levels, ascending, one tuple per bit width

# Module of this package -> class. `format_of` imports torch, this table does not.
FORMATS = {
    "integers": "Integers",
    "kivi": "Kivi",
    "kvquant": "KVQuant",
    "gear": "Gear",
}


def format_of(name: str) -> "type[Format]":
    """The class of a format by name. Raises ValueError for an unknown name."""
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}; got {name!r}")
    format_class: type[Format] = getattr(
        import_module(f"kvfold.layout.formats.{name}"), FORMATS[name]
    )
    return format_class
