"""Suites of questions whose answers are checked.

A suite is a class in a file of its own, and a line in SUITES. Help, docs/suites.md and the
conformance tests (tests/evaluation/test_suites.py) follow from SUITES.
"""

from pathlib import Path
from typing import Any

from kvfold.evaluation.suites.base import Question, Suite
from kvfold.evaluation.suites.gsm8k import GSM8K
from kvfold.evaluation.suites.humaneval import HumanEval
from kvfold.evaluation.suites.longbench import LongBench
from kvfold.evaluation.suites.longeval import LongEval
from kvfold.evaluation.suites.ruler import RULER
from kvfold.utils.progress import Report

SUITES: dict[str, Suite] = {
    "code": HumanEval(),
    "math": GSM8K(),
    "longbench": LongBench(),
    "longeval": LongEval(),
    "ruler": RULER(),
}


def find_file(name: str, folder: Path) -> Path:
    """Return the path of a suite's file in a folder, under one of its published names. Raises
    ValueError if there is none."""
    try:
        return SUITES[name].find(folder)
    except ValueError as error:
        raise ValueError(f"suite {name}: {error}, such as {name}=FILE") from None


def read_suite(
    name: str,
    path: str | Path | None = None,
    rows: int | None = None,
    *,
    length: int | None = None,
    tokenizer: Any = None,
    report: Report | None = None,
) -> list[Question]:
    """Read the first `rows` questions (None: all) of a file or, of a suite with several tasks or
    data sets, of each. For `length`, `tokenizer` and `report` see `Suite.read`.

    Raises ValueError that names the file, the line and what is legal.
    """
    file = None if path is None else Path(path)
    where = f"suite {name}" if file is None else f"suite {name}: {file}"
    return SUITES[name].read(
        file, where, rows=rows, length=length, tokenizer=tokenizer, report=report
    )
