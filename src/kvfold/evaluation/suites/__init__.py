"""Suites of questions whose answers are checked.

A suite is a class in a file of its own, and a line in SUITES. Help, docs/suites.md and the
conformance tests (tests/evaluation/test_suites.py) follow from SUITES.
"""

from collections import Counter
from pathlib import Path

from kvfold.evaluation.suites.base import Question, Suite
from kvfold.evaluation.suites.gsm8k import GSM8K
from kvfold.evaluation.suites.humaneval import HumanEval
from kvfold.utils.text import json_object, numbered_lines

SUITES: dict[str, Suite] = {"code": HumanEval(), "math": GSM8K()}


def find_file(name: str, folder: Path) -> Path:
    """Return the path of a suite's file in a folder, under one of its published names. Raises
    ValueError if there is none."""
    for file in SUITES[name].files:
        if (folder / file).is_file():
            return folder / file
    raise ValueError(
        f"suite {name}: {folder} has no {' or '.join(SUITES[name].files)}; name the file, such as"
        f" {name}=FILE"
    )


def read_suite(name: str, path: str | Path, rows: int | None = None) -> list[Question]:
    """Read the first `rows` questions (None: all) of a .jsonl, .jsonl.gz or .jsonl.xz file.

    Raises ValueError that names the file, the line and what is legal.
    """
    suite = SUITES[name]
    questions = [
        _question(suite, line, f"suite {name}: {path} line {i}", i)
        for i, line in numbered_lines(path)
    ]
    (id, lines), *_ = Counter(x.id for x in questions).most_common(1)
    if lines > 1:
        raise ValueError(f"suite {name}: {path}: {id} is on {lines} lines; ids must be unique")
    return questions[:rows]


def _question(suite: Suite, line: str, where: str, number: int) -> Question:
    legal = f"a line of {suite.title} has the keys {', '.join(suite.keys)}"
    try:
        fields = json_object(line)
    except ValueError as error:
        raise ValueError(f"{where}: {error}; {legal}") from None
    if not fields.keys() >= set(suite.keys):
        raise ValueError(f"{where}: keys {', '.join(fields) or 'none'}; {legal}")
    for key in suite.keys:
        if not isinstance(fields[key], str) or not fields[key].strip():
            raise ValueError(
                f"{where}: {key} is {fields[key]!r:.60}; it must be a text that is not blank"
            )
    try:
        return suite.question(fields, number)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
