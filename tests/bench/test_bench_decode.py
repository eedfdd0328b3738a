"""Whole engines on random weights: every case is written, whatever another one meets."""

import json

import pytest
import torch

from commands import without_progress
from kvfold.bench import decode, decoders
from kvfold.bench import synthetic_engine as synthetic
from kvfold.cli.main import main
from kvfold.engine.requests.request import CacheParams

CPU = torch.device("cpu")


def run(tmp_path, *options):
    target = tmp_path / "decode.json"
    few = ["--shape", "tiny", "--steps", "2", "--json", str(target)]
    few += [] if "--tokens" in options else ["--tokens", "40"]
    assert main(["bench", "decode", *few, *options]) == 0
    return json.loads(target.read_text())


@pytest.fixture
def free(monkeypatch):
    monkeypatch.setattr(decode, "free_bytes", lambda device: decode.SPARE + 17_000_000)


def test_all_cases_of_every_cache(tmp_path, capsys):
    names = ["transformers", "bf16-full", "int4-half"]
    found = run(tmp_path, "--batch", "1,3", "--prefill", "--variants", ",".join(names))
    assert not found["skipped"]
    rows = {(row["variant"], row["batch"]): row for row in found["rows"]}
    assert set(rows) == {(name, batch) for name in names for batch in (1, 3)}
    for row in rows.values():
        assert 0 < row["ms_p10"] <= row["ms"] <= row["ms_p90"] and row["repeat_ms"] > 0
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms"])
        assert row["predicted_bytes"] > row["cache_bytes"]
    # 2 layers x 2 pages of 32 rows x 2 heads x (32 numbers, or 16 of 4 bits and two scales).
    assert rows["bf16-full", 3]["cache_bytes"] == 3 * 2 * 2 * 32 * 2 * 64
    assert rows["int4-half", 1]["cache_bytes"] == 2 * 2 * 2 * 32 * 12
    first = {row["variant"]: row for row in found["first_tokens"]}
    assert set(first) == set(names) and first["bf16-full"]["chunk"] == 512
    assert all(x["ms_low"] <= x["ms"] <= x["ms_high"] for x in first.values())
    assert first["transformers"]["runs"] == decode.RUNS and first["transformers"]["chunk"] is None
    output = capsys.readouterr()
    assert "bf16-full, 40 tokens:" in output.err and "ms to the first token" in output.out
    assert found["settings"]["batch"] == [1, 3] and found["settings"]["steps"] == 2


def test_what_fails_or_does_not_fit_is_named(tmp_path, free, monkeypatch):
    build = decoders.build_decoder

    def broken(shape, name, device):
        if name == "int8-half":
            raise torch.OutOfMemoryError("no memory\nat all")
        found = build(shape, name, device)
        if name == "int4-half":
            found.model.lm_head.weight.data.fill_(torch.nan)
        return found

    monkeypatch.setattr(decoders, "build_decoder", broken)
    names = "int8-half,int4-half,bf16-half"
    found = run(tmp_path, "--batch", "1,64", "--variants", names)
    assert [(row["variant"], row["batch"]) for row in found["rows"]] == [("bf16-half", 1)]
    reasons = {(x["variant"], x["batch"]): x["reason"] for x in found["skipped"]}
    assert reasons["int8-half", "all"] == "no memory at all"
    assert "logits are not finite" in reasons["int4-half", 1]
    assert "its cache takes" in reasons["bf16-half", 64] and "are free" in reasons["bf16-half", 64]


def test_a_step_decodes_what_was_read():
    """From the first step on all sequences decode, at their own positions."""
    of = decoders.build_decoder("tiny", "bf16-half", CPU)
    engine = synthetic.build_engine(of.model, "tiny", of.variant, batch=3, longest=50)
    synthetic.fill(engine, 3, 40, 10, CacheParams())
    seen = []
    runner = synthetic.runner_of(engine)
    step = runner.run
    runner.run = lambda batch, tokens: seen.append(batch) or step(batch, tokens)
    assert len(synthetic.step(engine)) == 3
    pieces = seen[0].chunks
    assert all(x.is_decode and x.wants_logits and x.start == 39 for x in pieces)
    assert set(runner.pool.host_lengths.flatten()) == {40}
    runner.pool.check_integrity()


def test_code_compiled_for_one_decoder_is_not_the_next_ones():
    made = []
    double = torch.compile(lambda x: 2 * x, backend=lambda graph, _: made.append(1) or graph)
    for expected in (1, 2):
        decoders.build_decoder("tiny", "bf16-half", CPU)
        double(torch.ones(3))
        assert len(made) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--variants", "int5"], "--variants: 'int5' is none of transformers, "),
        (["--variants", "transformers-static"], "'transformers-static' is none of"),
        (["--shape", "gpt-9"], "--shape: 'gpt-9' is none of llama-3.1-8b, "),
        (["--steps", "1"], "--steps must be at least 2, got 1"),
        (["--batch", "0"], "--batch is too small"),
        (["--tokens", "1"], "--tokens is too small"),
    ],
)
def test_bad_settings_are_one_line(capsys, options, message):
    assert main(["bench", "decode", *options]) == 2
    lines = without_progress(capsys.readouterr().err)
    assert len(lines) == 1 and message in lines[0]
