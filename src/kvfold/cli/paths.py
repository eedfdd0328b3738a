"""Checks that a command does not write over the files that it reads."""

import dataclasses
import os
from collections.abc import Iterator
from inspect import BoundArguments, Parameter
from pathlib import Path
from typing import Any

from kvfold.cli.options import flag
from kvfold.utils.files import check_apart

OUTPUTS = ("html", "json", "output", "plot", "result_dir")  # parameters that name what to write
REUSED = "stats"  # a file that is read if it exists, else written


def check_paths(bound: BoundArguments) -> None:
    """Raises ValueError if a command would write over a file that it reads, or write one twice."""
    outputs: dict[str, Path] = {}
    inputs: dict[str, list[Path]] = {}
    for name, value in bound.arguments.items():
        positional = bound.signature.parameters[name].kind is Parameter.POSITIONAL_ONLY
        for field, part in _settings(name, value):
            word = field.upper() if positional else flag(field)
            if field in OUTPUTS or (field == REUSED and part is not None and not part.exists()):
                outputs |= {} if part is None else {word: part}
            elif paths := list(_existing(part)):
                inputs[word] = paths
    check_apart(outputs, inputs)


def _settings(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """An argument with its name; for a dataclass of settings, each field with its name."""
    if not dataclasses.is_dataclass(value):
        yield name, value
        return
    for field in dataclasses.fields(value):
        yield from _settings(field.name, getattr(value, field.name))


def _existing(value: Any) -> Iterator[Path]:
    """Existing files and folders that a value names: a path, a list with commas, NAME=FILE, or
    several of these."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _existing(item)
    elif isinstance(value, str | Path):
        parts = [str(value), *str(value).split(",")]
        for part in (*parts, *(x.partition("=")[2] for x in parts)):
            if part and os.path.exists(part):
                yield Path(part)
