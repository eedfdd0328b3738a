"""The benchmark of accuracy budgets asks as `kvfold eval` does."""

import json

import pytest

import accuracy_budget
from answered_questions import answered, write
from kvfold.evaluation.tasks import read_tasks
from kvfold.evaluation.tasks.run import run_tasks
from kvfold.hub.loading import load, load_tokenizer


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


def test_sizes_are_found_once_for_all_budgets(tmp_path, capsys):
    path, result = tmp_path / "questions.jsonl", tmp_path / "result.json"
    write(answered(load("reference:gqa"), load_tokenizer("reference:gqa"), 10), path)
    words = ["--model", "reference:gqa", "--tasks", path, "--rows", 10, "--recipes", "zack-equal"]
    words += ["--shares", 0.6, 0.8, "--ratios", 1.5, "--calib-tokens", 4096, "--ctx", 64]
    words += ["--windows", 1, "--tolerance", 0.2, "--statistics", tmp_path, "--json", result]
    accuracy_budget.main([str(word) for word in words])
    record = json.loads(result.read_text())
    assert [row["budget"] for row in record["searches"]] == [
        "accuracy>=0.6",
        "accuracy>=0.8",
        "ppl<=1.5",
    ]
    first, second, _ = record["searches"]
    assert first["reached"] >= 0.6 and second["reached"] >= 0.8
    assert first["keep"] <= second["keep"] and first["largest_rank"] <= 64
    capsys.readouterr()
    accuracy_budget.main([str(word) for word in words])  # which measures nothing again
    assert "answers" not in capsys.readouterr().out
    assert json.loads(result.read_text()) == record
    with pytest.raises(ValueError, match="other settings"):
        accuracy_budget.main([str(word) for word in [*words, "--rows", 9]])
