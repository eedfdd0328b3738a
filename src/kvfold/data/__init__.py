"""Packaged text: calibration excerpts, needle filler and word lists (all UTF-8)."""

from importlib.resources import files

__all__ = ["read_text"]


def read_text(name: str) -> str:
    """The packaged file `name`, decoded as UTF-8. Raises FileNotFoundError if there is none."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
