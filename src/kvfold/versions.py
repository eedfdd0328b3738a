"""The versions kvfold works with, asked for before anything is imported."""

from importlib.metadata import version

OLDEST_TRANSFORMERS = (5, 17)


def check_transformers(found: str | None = None) -> None:
    """Raises ValueError if the installed transformers (or `found`) is too old."""
    found = version("transformers") if found is None else found
    numbers = tuple(int(part) for part in found.split(".")[:2])
    if numbers < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise ValueError(
            f"transformers {found} is too old, kvfold needs {oldest} or newer;"
            f' run: pip install "transformers>={oldest},<6"'
        )
