"""Downstream tasks from JSONL files. A kind of row is a class in one file, and a line in TASKS."""

from pathlib import Path

from kvfold.evaluation.tasks.base import Task, parse
from kvfold.evaluation.tasks.choice import ChoiceTask
from kvfold.evaluation.tasks.generation import GenerationTask
from kvfold.text import read_text

TASKS: dict[str, type[Task]] = {
    "generation": GenerationTask,
    "choice": ChoiceTask,
}
SCORES = tuple(dict.fromkeys(score for kind in TASKS.values() for score in kind.scores))
HEADLINES = tuple(dict.fromkeys(kind.scores[0] for kind in TASKS.values()))


def read_tasks(path: str | Path) -> list[Task]:
    """Rows of a .jsonl, .jsonl.gz or .jsonl.xz file; blank lines are skipped.

    Raises ValueError naming file, line, the keys received and the legal sets of keys.
    """
    kinds, lines = list(TASKS.values()), enumerate(read_text(path).split("\n"), start=1)
    return [parse(kinds, line, f"{path} line {i}") for i, line in lines if line.strip()]
