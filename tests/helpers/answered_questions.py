"""Questions with two choices that a model answers right, whatever it was trained on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvfold.evaluation.tasks.choice import ChoiceTask
from kvfold.evaluation.tasks.run import run_tasks

WORDS = ["ship", "sea", "house", "night", "king", "road", "horse", "door", "river", "fire"]


def answered(model: Any, tokenizer: Any, count: int) -> list[ChoiceTask]:
    """Questions about words, with what the model chooses as the right answer."""
    tasks = []
    for i in range(count):
        first, second, third = (WORDS[(i * step + i // 10) % 10] for step in (1, 3, 7))
        context = f"Number {i}: the old {first} was near the {second}, and the {third} was"
        choices = (f" {WORDS[(i + 3) % 10]} again.", f" {WORDS[(i + 8) % 10]} alone.")
        tasks.append(ChoiceTask(contexts=(context,) * 2, choices=choices, label=0))
    right = run_tasks(model, tokenizer, tasks).main_scores
    return [replace(x, label=int(not score)) for x, score in zip(tasks, right, strict=True)]


def write(tasks: list[ChoiceTask], path: Path) -> Path:
    """Write questions as lines of a file."""
    lines = ({"context": x.contexts[0], "choices": x.choices, "label": x.label} for x in tasks)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
