"""Downstream tasks from JSONL files. A kind of row is a class in one file, and a line in TASKS."""

from pathlib import Path

from kvfold.evaluation.tasks.asked import AskedTask
from kvfold.evaluation.tasks.base import Task
from kvfold.evaluation.tasks.choice import ChoiceTask
from kvfold.evaluation.tasks.generation import GenerationTask
from kvfold.utils.text import json_object, numbered_lines

TASKS: dict[str, type[Task]] = {
    "generation": GenerationTask,
    "asked": AskedTask,
    "choice": ChoiceTask,
}
LEGAL_ROWS = " or ".join(kind.legal for kind in TASKS.values())
SCORES = tuple(dict.fromkeys(score for kind in TASKS.values() for score in kind.scores))
HEADLINES = tuple(dict.fromkeys(kind.scores[0] for kind in TASKS.values()))


def read_tasks(path: str | Path) -> list[Task]:
    """Rows of a .jsonl, .jsonl.gz or .jsonl.xz file; blank lines are skipped.

    Raises ValueError naming file, line, the keys received and the legal sets of keys.
    """
    return [_parse(line, f"{path} line {i}") for i, line in numbered_lines(path)]


def _parse(line: str, where: str) -> Task:
    """The row in `line`. Raises ValueError where no kind, or more than one, has its keys."""
    try:
        row = json_object(line)
    except ValueError as error:
        raise ValueError(f"task {where}: {error}; legal rows: {LEGAL_ROWS}") from None
    kinds = [kind for kind in TASKS.values() if kind.fits(set(row))]
    if len(kinds) != 1:
        keys = ", ".join(row) or "none"
        raise ValueError(f"task {where}: keys {keys}; legal rows: {LEGAL_ROWS}")
    return kinds[0].parse(row, where)
