"""The fastest within a budget: by predicted time, measured from the fastest on."""

import json

import pytest

from cli_cases import FEW, plain, printed  # noqa: F401
from commands import refused
from kvfold.compression.planning.step_time import DecodeLoad, Prediction
from kvfold.evaluation import fastest

MS = {"post_rope": 2.0, "pre_rope": 3.0, "plain": 9.0}


@pytest.fixture
def timed(monkeypatch):
    """Step times by kind of key and size, of shapes that no kernel serves; and the loads asked."""
    loads = []

    def predict(config, spec, load):
        loads.append(load)
        ms = MS[spec.layers[0].keys] + spec.bytes_per_token() / 1e4
        return Prediction(ms=ms, device="stub", estimated=False)

    monkeypatch.setattr(fastest, "predict", predict)
    monkeypatch.setattr(fastest, "FACTORS", (2.0, 8.0))
    return loads


def asked(*more):
    return ["--fold", "--budget", *more, "--fastest", "--batch", "2", "--context", "64", *FEW]


def test_the_fastest_within_the_budget_is_made(plain, tmp_path, capsys, timed):
    path = tmp_path / "out"
    out = printed(capsys, "compress", plain, *asked("ppl<=9"), "--output", path)
    tried = [line for line in out.splitlines() if "ms a step, predicted;" in line]
    assert len(tried) == 1 and tried[0].split()[0] in ("fast", "swift") and " 8x" in tried[0]
    assert set(timed) == {DecodeLoad(batch=2, context=64)}
    made = json.loads((path / "config.json").read_text())["quantization_config"]["provenance"]
    assert made["factor"] == 8 and made["ratio"] < 9 and made["budget"] == "ppl<=9"


def test_sizes_beyond_one_that_loses_too_much_are_not_measured(
    plain,
    tmp_path,
    capsys,
    timed,
    monkeypatch,
):
    ratios = {"original": 1.0, "fast 8x": 2.0, "swift 8x": 2.0, "fast 2x": 1.5, "swift 2x": 1.5}
    seen = []

    def measure(model, tokenizer, what, progress, label):
        seen.append(label.removeprefix("search "))
        found = type("R", (), {"perplexity": ratios.get(seen[-1], 1.005)})
        return type("M", (), {"texts": {fastest.TEXT: found}})

    monkeypatch.setattr(fastest, "measure", measure)
    out = printed(capsys, "compress", plain, *asked("ppl<=1.01"), "--output", tmp_path / "out")
    assert {*seen[:5]} == {*ratios} and seen[5].split()[0] in ("lean", "small") and len(seen) == 6
    assert "1.0050 times the perplexity" in out
    monkeypatch.setattr(fastest, "FACTORS", (2.0, 2.0))
    monkeypatch.setitem(MS, "pre_rope", 10.0)  # slower than the original
    seen.clear()
    error = refused(capsys, "compress", plain, *asked("ppl<=1.01"), "--output", tmp_path / "two")
    assert "nothing is predicted to be faster than the original at 2 x 64" in error
    assert sorted(seen) == ["fast 2x", "original", "swift 2x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fastest"], "give --budget too"),
        (["--batch", "2"], "give --set fastest too"),
        (["--fastest", "--budget", "ppl<=1.1", "--recipe", "lean"], "leave --recipe out"),
        (["--fastest", "--budget", "ppl<=1.1", "--align", "8"], "leave --set align out"),
        (["--fastest", "--budget", "ppl<=1.1", "--stats", "s.pt"], "leave --stats out"),
        (["--fastest", "--budget", "ppl<=1.1", "--prefer", "speed"], "leave --set prefer out"),
    ],
)
def test_what_it_needs_and_excludes(plain, tmp_path, capsys, arguments, message):
    assert message in refused(
        capsys, "compress", plain, "--fold", *arguments, "--output", tmp_path / "out"
    )
