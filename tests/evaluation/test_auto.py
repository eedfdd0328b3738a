"""The policy that is found by measuring a few."""

import pytest

import kvfold
from eviction_view_cases import folded
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation import auto
from kvfold.evaluation.auto import Trial, choose
from kvfold.hub.loading import load_tokenizer
from models import tiny


def test_answers_come_first_and_loss_tells_those_that_answer_alike() -> None:
    found = [
        Trial(policy="cheap", right=0.5, lost=0.01),
        Trial(policy="best", right=1.0, lost=0.2),
        Trial(policy="near", right=0.94, lost=0.05),
    ]
    assert choose(found) == "near"
    assert choose(found[:2]) == "best"


def test_a_model_is_measured_and_stays_as_it_was(monkeypatch) -> None:
    """`reference:gqa` tells its facts by their keys, and nobody asked about them yet."""
    monkeypatch.setattr(auto, "CANDIDATES", ("kv-compress", "keydiff-all"))
    monkeypatch.setattr(auto, "CONTEXTS", 1)
    monkeypatch.setattr(auto, "WINDOWS", 2)
    monkeypatch.setattr(auto, "LENGTH", 384)
    model, tokenizer = kvfold.reference("gqa"), load_tokenizer("reference:gqa")
    found = auto.trials(model, tokenizer, CacheConfig(keep_tokens=0.25, page=16, evict="auto"))
    assert [x.policy for x in found] == ["kv-compress", "keydiff-all"]
    assert found[0].right < found[1].right and found[1].lost > 0
    monkeypatch.setattr(auto, "trials", lambda *_: found)
    assert kvfold.best_policy(model, tokenizer, keep_tokens=0.25) == "keydiff-all"


def test_scores_that_a_model_learned_are_tried() -> None:
    model = folded("llama-gqa", "zack", 0.5)
    assert auto.candidates(model) == auto.CANDIDATES
    for layer in model.model.layers:
        layer.self_attn.add_score_map()
    assert auto.candidates(model) == (*auto.CANDIDATES, "learned")


def test_mistakes_are_explained() -> None:
    with pytest.raises(ValueError, match="measured at a budget: give keep_tokens"):
        kvfold.best_policy(None, None)
    config = CacheConfig(evict="auto", keep_tokens=0.5)
    with pytest.raises(ValueError, match=r"to what kvfold.best_policy\(model, tokenizer"):
        build_runner(tiny("llama-gqa"), config, num_slots=1, max_tokens=64)


def test_the_command_line_says_what_it_found(monkeypatch, capsys) -> None:
    from kvfold.cli import common

    found = [Trial(policy="kvzip", right=0.75, lost=0.04), Trial(policy="h2o", right=0.1, lost=0)]
    monkeypatch.setattr(auto, "trials", lambda *_: found)
    cache = CacheConfig(evict="auto", keep_tokens=0.5)
    assert common.with_policy(None, None, cache) == CacheConfig(evict="kvzip", keep_tokens=0.5)
    said = "kvzip (kvzip 75% answered, +0.040 nats; h2o 10% answered, +0.000 nats)"
    assert capsys.readouterr().err == f"--evict auto: {said}\n"
    assert common.with_policy(None, None, None) is None
