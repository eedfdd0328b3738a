"""How kernels are cut, from tables of what was measured. Nothing is tried out at run time."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a kernel is cut: rows a tile, tiles in flight, warps, slices a multiprocessor, and most
    registers a thread."""

    block: int = 32
    stages: int = 3
    warps: int = 1
    slices: int = 8
    registers: int | None = None


def load(file: Path) -> list[tuple[dict[str, Any], Tuning]]:
    """Every entry of a table: what it holds for, and the fastest cut."""
    entries = json.loads(file.read_text("utf-8"))["entries"]
    return [(x, Tuning(**x["tuning"])) for x in entries]
