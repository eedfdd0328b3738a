"""The budget search: how it reads a budget, and what it finds."""

from types import SimpleNamespace

import pytest
import transformers as hf

from kvfold.calibration.text import calibration_windows
from kvfold.evaluation.budget import held_out
from kvfold.hub.loading import load_tokenizer
from kvfold.utils.search import LOWEST, Budget, parse_budget, parse_ratio, search


@pytest.mark.parametrize(
    ("text", "ratio"), [("ppl<=1.01", 1.01), (" ppl <= 1 ", 1.0), ("ppl<=1.", 1.0)]
)
def test_a_budget_is_a_perplexity_ratio(text, ratio):
    assert parse_budget(text) == Budget(metric="ppl", limit=ratio)
    assert parse_ratio(text) == ratio


@pytest.mark.parametrize(
    ("text", "share"), [("accuracy>=0.99", 0.99), (" accuracy >= .5 ", 0.5), ("accuracy>=0.", None)]
)
def test_a_budget_is_a_share_of_the_accuracy(text, share):
    if share is None:
        with pytest.raises(ValueError, match=r"'accuracy>=SHARE' with a share below 1"):
            parse_budget(text)
    else:
        assert parse_budget(text) == Budget(metric="accuracy", limit=share)
    with pytest.raises(ValueError, match=r"'ppl<=RATIO'"):
        parse_ratio(text)


@pytest.mark.parametrize(
    "text", ["", "1.01", "ppl<1.01", "ppl<=0.99", "ppl<=x", "acc>=0.9", "ppl<=1.01%", "ppl<=nan"]
)
def test_another_budget_is_refused_with_the_legal_form(text):
    with pytest.raises(ValueError, match=r"'ppl<=RATIO'.*'ppl<=1\.01'.*'accuracy>=SHARE'"):
        parse_budget(text)


@pytest.mark.parametrize("threshold", [0.03, 0.2, 0.5, 0.83, 0.985])
def test_the_smallest_keep_within_the_limit_is_found(threshold):
    asked = []

    def ratio_at(keep):
        asked.append(keep)
        return 1.0 if keep >= threshold else 2.0

    keep, ratio = search(ratio_at, 1.01, tolerance=0.01)
    assert threshold <= keep <= threshold + 0.01 and ratio == 1.0
    assert len(asked) <= 9 and all(LOWEST <= one < 1 for one in asked)


def test_the_ends_of_the_range():
    assert search(lambda keep: 1.0, 1.01) == (LOWEST, 1.0)
    keep, ratio = search(lambda keep: 1.0 if keep == 1 else 2.0, 1.01)
    assert (keep, ratio) == (1.0, 1.0)
    with pytest.raises(ValueError, match="low=0"):
        search(lambda keep: 1.0, 1.01, low=0.0)


def test_held_out_windows_are_not_calibrated_on():
    config = hf.LlamaConfig(max_position_embeddings=128)
    job = SimpleNamespace(
        tokenizer=load_tokenizer("reference:gqa"),
        model=SimpleNamespace(config=config),
        calib=None,
        max_tokens=16384,
    )
    used = calibration_windows(job.tokenizer, config, None, job.max_tokens)
    rows = held_out(job, 128)
    assert rows.shape == (16, 128) and len({tuple(row) for row in rows.tolist()}) == 16
    stream = " ".join(map(str, used[:, 1:].flatten().tolist()))
    for row in rows.tolist():
        assert not any(" ".join(map(str, row[i : i + 40])) in stream for i in range(1, 80, 8))
    job.max_tokens = 10**6
    with pytest.raises(ValueError, match="nothing is left"):
        held_out(job, 128)
