"""Downstream tasks, read from JSONL files with one example per line.

A kind of task is a class in a file of its own, and a line in TASKS. Help, docs/tasks.md and the
conformance tests (tests/evaluation/test_tasks.py) follow from TASKS.
"""

from pathlib import Path

from kvfold.evaluation.tasks.base import Task
from kvfold.evaluation.tasks.choice import ChoiceTask
from kvfold.evaluation.tasks.generation import GenerationTask
from kvfold.evaluation.tasks.late_question import LateQuestionTask
from kvfold.utils.text import json_object, numbered_lines

TASKS: dict[str, type[Task]] = {
    "generation": GenerationTask,
    "late-question": LateQuestionTask,
    "choice": ChoiceTask,
}
LEGAL_EXAMPLES = " or ".join(kind.legal for kind in TASKS.values())
SCORES = tuple(dict.fromkeys(score for kind in TASKS.values() for score in kind.scores))
HEADLINES = tuple(dict.fromkeys(kind.scores[0] for kind in TASKS.values()))


def read_tasks(path: str | Path) -> list[Task]:
    """Read the examples of a .jsonl, .jsonl.gz or .jsonl.xz file; blank lines are skipped.

    Raises ValueError that names file, line, the keys received and the legal sets of keys.
    """
    return [_parse(line, f"{path} line {i}") for i, line in numbered_lines(path)]


def _parse(line: str, where: str) -> Task:
    """Parse a line. Raises ValueError if its keys fit no kind of task, or more than one."""
    try:
        example = json_object(line)
    except ValueError as error:
        raise ValueError(f"task {where}: {error}; legal examples: {LEGAL_EXAMPLES}") from None
    kinds = [kind for kind in TASKS.values() if kind.fits(set(example))]
    if len(kinds) != 1:
        keys = ", ".join(example) or "none"
        raise ValueError(f"task {where}: keys {keys}; legal examples: {LEGAL_EXAMPLES}")
    return kinds[0].parse(example, where)
