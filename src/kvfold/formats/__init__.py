"""Number formats: how many numbers become few bytes, and come back."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfold.formats.base import Format

Codebooks = tuple[tuple[float, ...], ...]  # calibrated levels, ascending, of some bits each

# A module beside this, and its class: torch is imported when the class is asked for, not the name.
FORMATS = {
    "integers": "Integers",
    "kivi": "Kivi",
    "kvquant": "KVQuant",
    "gear": "Gear",
}


def format_of(name: str) -> "type[Format]":
    """The class of a format. Raises ValueError for an unknown name."""
    if name not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}; got {name!r}")
    found: type[Format] = getattr(import_module(f"kvfold.formats.{name}"), FORMATS[name])
    return found
