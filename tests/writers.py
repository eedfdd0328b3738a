"""What writes files, for `test_killed_writers.py`: by name, a function of a folder that gives one
which writes a value to OUT in `place` of that folder, and one which reads it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvfold.api import save
from kvfold.cli.main import main
from kvfold.compression.statistics import Statistics
from kvfold.compression.statistics.moments import Moment
from kvfold.engine.packed import PackedContext
from kvfold.files import write_json
from kvfold.loading import load
from kvfold.report import write_report

OUT = "out"
Writer = tuple[Callable[[int], None], Callable[[], Any]]


def out(folder: Path) -> Path:
    return folder / "place" / OUT


def of_json(folder: Path) -> Writer:
    return lambda x: write_json(out(folder), [x] * 9), lambda: json.loads(out(folder).read_text())


def of_packed(folder: Path) -> Writer:
    settings: dict[str, Any] = {"page": 8}
    made = {"key": {"model": "a", "layout": "b"}, "settings": settings}
    made["report"] = {"full_bytes": 1}

    def write(x: int) -> None:
        pages = (torch.full((4, 4096), x, dtype=torch.uint8),)
        rows = np.array([x, 2])
        PackedContext(token_ids=(x, 4), rows=rows, pages=pages, made=made).save(out(folder))

    return write, lambda: PackedContext.load(out(folder)).token_ids


def of_statistics(folder: Path) -> Writer:
    def write(x: int) -> None:
        moment = Moment.of(torch.full((9, 40), float(x)))
        Statistics({}, {0: {"hidden": moment}}).save(out(folder))

    return write, lambda: float(Statistics.load(out(folder), {})[0, "hidden"].second.sum())


def of_report(folder: Path) -> Writer:
    def write(x: int) -> None:
        write_report(out(folder), title=str(x), summary=[], rows=[], ranks=None)

    return write, lambda: out(folder).read_text()


def of_checkpoint(folder: Path) -> Writer:
    model = load("reference:gqa")

    def write(x: int) -> None:
        model.config.rms_norm_eps = x / 8
        save(model, None, out(folder))

    return write, lambda: load(str(out(folder))).config.rms_norm_eps


def command(*words: str, flag: str = "--json") -> Callable[[Path], Writer]:
    """A command of kvfold that reads or computes another value; of its JSON without times."""

    def of(folder: Path) -> Writer:
        def write(x: int) -> None:
            text = folder / "text.txt"
            text.write_text(f"The ship went out to sea {x} times. " * 40)
            named = [word.replace("TEXT", str(text)).replace("VALUE", str(x)) for word in words]
            assert main([*named, flag, str(out(folder))]) == 0

        def read() -> Any:
            if flag == "--output":
                return PackedContext.load(out(folder)).token_ids
            found = json.loads(out(folder).read_text())
            return found.get("nll") or found["rows"]

        return write, read

    return of


WRITERS: dict[str, Callable[[Path], Writer]] = {
    "json": of_json,
    "packed": of_packed,
    "statistics": of_statistics,
    "report": of_report,
    "checkpoint": of_checkpoint,
    "kvfold pack": command(
        *("pack", "reference:gqa", "--context", "TEXT", "--no-sample", "--factor", "2"),
        flag="--output",
    ),
    "kvfold eval": command(
        *("eval", "reference:gqa", "--text", "TEXT", "--ctx", "32", "--max-tokens", "64")
    ),
    "kvfold capacity": command("capacity", "reference:gqa", "--context", "20VALUE"),
}
REPLACES = dict.fromkeys(WRITERS, True) | {"checkpoint": False}
