"""What every kind of task of the registry must do. A new kind needs no change here.

KVFOLD_WRITE=1 writes the table of docs/tasks.md.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvfold
from generated_pages import check_page, description, row
from kvfold.config import CacheConfig
from kvfold.evaluation.measure import Measurement, measure
from kvfold.evaluation.tasks import HEADLINES, SCORES, TASKS, Task, read_tasks
from kvfold.evaluation.tasks.base import Prompt, TaskAnswer
from kvfold.hub.loading import load_tokenizer
from tolerance import model_terms, rounding

KINDS = pytest.mark.parametrize("kind", TASKS.values(), ids=TASKS)


def parsed(kind: type[Task]) -> Task:
    return kind.parse(kind.example, "example")


def answer_to(prompt: Prompt) -> TaskAnswer:
    """Any answer to a prompt."""
    likelihoods = [-float(i + 1) for i, _ in enumerate(prompt.endings)]
    return TaskAnswer(log_likelihoods=likelihoods, tokens=[5] * prompt.num_new)


@KINDS
def test_its_example_is_of_this_kind_alone(kind: type[Task], tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text(json.dumps(dict(kind.example) | {"another key": 1}), encoding="utf-8")
    assert read_tasks(path) == [parsed(kind)] and type(parsed(kind)) is kind
    assert all(f'"{key}"' in kind.legal for key in kind.example)


@KINDS
def test_an_example_without_a_key_is_refused(kind: type[Task], tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    optional = re.search(r"\[(.*)\]", kind.legal)
    for key in kind.example:
        if optional and key in optional[1]:
            continue
        fewer = {name: value for name, value in kind.example.items() if name != key}
        path.write_text(json.dumps(fewer), encoding="utf-8")
        with pytest.raises(ValueError, match=r"line 1: keys .*; legal examples: ") as caught:
            read_tasks(path)
        assert kind.legal in str(caught.value)


@KINDS
def test_a_value_of_another_type_is_named(kind: type[Task]) -> None:
    for key in kind.example:
        with pytest.raises(ValueError, match=f"task example: {key} is "):
            kind.parse({**kind.example, key: {"not": "legal"}}, "example")


@KINDS
def test_it_asks_and_scores(kind: type[Task]) -> None:
    tokenizer, task = load_tokenizer("reference:gqa"), parsed(kind)
    prompts = task.prompts(tokenizer)
    assert prompts and all(x.context and x.num_following for x in prompts)
    scores = task.score(tokenizer, [answer_to(x) for x in prompts])
    assert set(scores) == set(kind.scores) <= set(SCORES) and kind.scores[0] in HEADLINES
    assert all(0 <= value <= 1 for value in scores.values())


@KINDS
def test_it_runs_through_transformers_cache_and_on_pages(kind: type[Task]) -> None:
    model, tokenizer = kvfold.reference("gqa"), load_tokenizer("reference:gqa")
    dense, paged, coded = (
        measure(model, tokenizer, Measurement(tasks={"x": [parsed(kind)]}, cache=cache)).tasks["x"]
        for cache in (None, CacheConfig(), CacheConfig(bits=4))
    )
    assert replace(dense, scores={}) == replace(paged, scores={})
    error = rounding(torch.float32, model_terms(model.config, 64))  # of at most 64 tokens
    for name, score in dense.scores.items():
        assert paged.scores[name].mean == pytest.approx(score.mean, abs=error)
    assert set(coded.scores) == set(kind.scores)


def test_the_page_has_every_kind() -> None:
    table = row("Task", "Line of the file", "How it is asked and scored", "Scores")
    table += row("---", "---", "---", "---")
    for name, kind in TASKS.items():
        scores = ", ".join(f"`{score}`" for score in kind.scores)
        table += row(f"`{name}`", f"`{kind.legal}`", description(kind), scores)
    check_page("tasks.md", "tasks", Path(__file__), table)
