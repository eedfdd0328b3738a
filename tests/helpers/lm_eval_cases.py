"""Tasks of local files for lm-evaluation-harness."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason='needs pip install "kvfold[lm-eval]"')

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from lm_eval_engines import CHOICES, LINES

STORY = "The sun rises in the east, over the hills, and sets in the west behind the sea. "
ROWS = [
    {"context": 4 * STORY + "The sun rises in the", "choices": [" east.", " kettle."], "label": 0},
    {"context": "Two and two are", "choices": [" a sea.", " four.", " hills, é."], "label": 1},
    {"context": "A week has seven", "choices": [" suns.", " days."], "label": 1},
]
ANSWERS = (
    LINES
    + """output_type: generate_until
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """A folder of tasks with their rows, and lm-eval's copy of these."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    for name, text in {"choices": CHOICES, "answers": ANSWERS}.items():
        path = folder / f"{name}.yaml"
        path.write_text(text.format(name=name, file=rows, cache=folder / "cache"), encoding="utf-8")
    return folder


def evaluated(folder: Path, names: list[str], model: Any, **settings: Any) -> dict[str, Any]:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    how = {"task_manager": manager, "bootstrap_iters": 0}
    return simple_evaluate(model=model, tasks=names, **how, **settings)


def rounded(results: dict[str, Any]) -> dict[str, float]:
    scores = results["results"]["choices"]
    return {name: scores[name] for name in ("acc,none", "acc_bytes,none")}


def answers_of(results: dict[str, Any]) -> list[str]:
    return [x["resps"][0][0] for x in results["samples"]["answers"]]
