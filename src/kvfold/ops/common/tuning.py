"""Tuning parameters of kernels, from tables of measurements. Nothing is tuned at run time."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Tuning of a kernel: tokens per tile, pipeline stages, warps, slices per multiprocessor, and
    the limit of registers per thread."""

    block: int = 32
    stages: int = 3
    warps: int = 1
    slices: int = 8
    registers: int | None = None


def load(file: Path) -> list[tuple[dict[str, Any], Tuning]]:
    """Read a table: for each entry, the shapes it applies to and the fastest tuning."""
    entries = json.loads(file.read_text("utf-8"))["entries"]
    return [(x, Tuning(**x["tuning"])) for x in entries]
