"""The benchmark of accuracy budgets asks as `kvfold eval` does."""

import sys
from pathlib import Path

import pytest

from answered_questions import answered, write
from kvfold.evaluation.tasks import read_tasks
from kvfold.evaluation.tasks.run import run_tasks
from kvfold.hub.loading import load, load_tokenizer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import accuracy_budget


def test_packed_questions_have_the_likelihoods_of_single_ones(tmp_path, monkeypatch):
    model, tokenizer = load("reference:gqa"), load_tokenizer("reference:gqa")
    path = write(answered(model, tokenizer, 12), tmp_path / "questions.jsonl")
    likelihoods = []

    def score(self, tokenizer, answers):
        likelihoods.append([x for answer in answers for x in answer.log_likelihoods])
        return {"accuracy": 1.0, "accuracy_per_byte": 1.0}

    monkeypatch.setattr("kvfold.evaluation.tasks.choice.ChoiceTask.score", score)
    run_tasks(model, tokenizer, read_tasks(path)[:10])
    single, likelihoods[:] = [*likelihoods], []
    monkeypatch.setattr(accuracy_budget, "PACKED", 96)
    accuracy_budget.Questions(path, 10, tokenizer).scores(model)
    assert len(likelihoods) == len(single) == 10
    for ours, theirs in zip(likelihoods, single, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
