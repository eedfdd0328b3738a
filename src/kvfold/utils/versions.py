"""The versions of transformers that kvfold works with, and what differs. Imports nothing of it."""

from importlib.metadata import version
from typing import Any

OLDEST_TRANSFORMERS = (5, 17)


def check_transformers(found: str | None = None) -> None:
    """Raises ValueError if the installed transformers (or `found`) is too old."""
    found = version("transformers") if found is None else found
    if _minor(found) < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise ValueError(
            f"transformers {found} is too old, kvfold needs {oldest} or newer;"
            f' run: pip install "transformers>={oldest},<5.25"'
        )


def _minor(found: str) -> tuple[int, ...]:
    return tuple(int(part) for part in found.split(".")[:2])


# What transformers' models call the cache they are given was renamed.
CACHE = "cache" if _minor(version("transformers")) >= (5, 24) else "past_key_values"


def given(cache: Any) -> dict[str, Any]:
    """The argument that hands a model of transformers its cache."""
    return {CACHE: cache}
