"""Suites of questions with checked answers: a class in one file, and a line in SUITES."""

from collections import Counter
from pathlib import Path

from kvfold.evaluation.suites.base import Question, Suite
from kvfold.evaluation.suites.gsm8k import GSM8K
from kvfold.evaluation.suites.humaneval import HumanEval
from kvfold.utils.text import json_object, numbered_lines

SUITES: dict[str, Suite] = {"code": HumanEval(), "math": GSM8K()}


def find_file(name: str, folder: Path) -> Path:
    """The file of a suite in a folder, under a name that it is published as. Raises ValueError."""
    for file in SUITES[name].files:
        if (folder / file).is_file():
            return folder / file
    raise ValueError(
        f"suite {name}: {folder} has no {' or '.join(SUITES[name].files)}; name the file, such as"
        f" {name}=FILE"
    )


def read_suite(name: str, path: str | Path, rows: int | None = None) -> list[Question]:
    """Questions of a .jsonl, .jsonl.gz or .jsonl.xz file, the first `rows` of them.

    Raises ValueError naming the file, the line and what is legal.
    """
    suite = SUITES[name]
    found = [
        _question(suite, line, f"suite {name}: {path} line {i}", i)
        for i, line in numbered_lines(path)
    ]
    (id, times), *_ = Counter(x.id for x in found).most_common(1)
    if times > 1:
        raise ValueError(f"suite {name}: {path}: {id} stands on {times} lines; ids must be unique")
    return found[:rows]


def _question(suite: Suite, line: str, where: str, number: int) -> Question:
    legal = f"a row of {suite.title} has the keys {', '.join(suite.keys)}"
    try:
        row = json_object(line)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; {legal}") from None
    if not row.keys() >= set(suite.keys):
        raise ValueError(f"{where}: keys {', '.join(row) or 'none'}; {legal}")
    for key in suite.keys:
        if not isinstance(row[key], str) or not row[key].strip():
            raise ValueError(
                f"{where}: {key} is {row[key]!r:.60}; it must be a text that is not blank"
            )
    try:
        return suite.question(row, number)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
