"""Load on an engine in this process: times of its own clock, and a limit that ends all."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import serving_speed as script
from kvfold.bench.synthetic_engine import random_model
from kvfold.engine.api.llm import LLM
from kvfold.engine.requests.request import CacheParams
from lab import serve_engine as load


@pytest.fixture(scope="module")
def llm() -> LLM:
    model = random_model("tiny", None, torch.device("cpu"))
    return LLM(model, max_tokens=256, max_sequences=4, kv_bytes=2**20)


def jobs(llm: LLM, *times: float, outputs: int = 6, **cache) -> list[load.Job]:
    prompts = load.random_prompts(len(times), 40, llm.model.config.vocab_size, "x")
    params = CacheParams(**cache)
    return [
        load.Job(prompt=prompt, outputs=outputs, cache=params, due=due)
        for prompt, due in zip(prompts, times, strict=True)
    ]


def test_nobody_waits_for_time_to_pass(llm: LLM) -> None:
    """An hour between two requests costs nothing, and counts in no latency."""
    found = load.drive(llm.engine, jobs(llm, 0.0, 3600.0))
    first, second = found.jobs
    assert found.complete and found.seconds > 3600
    assert 0 < first.first < first.end < 60 and 3600 < second.first < second.end < 3660
    assert 0 < second.per_token < 10
    assert found.tokens_per_s == pytest.approx(12 / found.seconds)


def test_steps_are_told_apart(llm: LLM) -> None:
    found = load.drive(llm.engine, jobs(llm, 0.0, 0.0, 0.0))
    assert (len(found.reading.times), found.reading.decodes) == (1, 0)
    assert (len(found.decoding.times), found.decoding.decodes, found.decoding.largest) == (5, 15, 3)
    assert 0 < found.used_bytes <= llm.runner.pool.num_bytes


def test_what_is_left_at_the_limit_is_cancelled(llm: LLM) -> None:
    found = load.drive(llm.engine, jobs(llm, 0.0, 1e9, outputs=3), limit=1e3)
    assert [job.done for job in found.jobs] == [True, False] and not found.complete
    long = load.drive(llm.engine, jobs(llm, 0.0, outputs=200), limit=0.02)
    assert not long.complete and not llm.engine.has_work


def test_tokens_that_others_computed_are_told(llm: LLM) -> None:
    load.drive(llm.engine, jobs(llm, 0.0))
    assert load.drive(llm.engine, jobs(llm, 0.0)).jobs[0].cached == 32
    assert load.drive(llm.engine, jobs(llm, 0.0, prefix_caching=False)).jobs[0].cached == 0


def test_arrivals() -> None:
    times = load.poisson(2000, 4.0, seed=1)
    assert times[0] == 0 and times == sorted(times)
    assert times[-1] == pytest.approx(500, rel=0.1)


def test_rates_close_in_on_what_is_sustained() -> None:
    rates = script.Rates(6.0)
    for sustained, wanted in ((True, 7.8), (True, 10.14), (False, 8.893), (True, 9.496)):
        rates.learn(rates.next, sustained)
        assert rates.next == pytest.approx(wanted, abs=1e-3)
    rates = script.Rates(6.0)
    rates.learn(6.0, False)
    assert rates.next == pytest.approx(6 / 1.3)


@pytest.mark.slow
def test_the_script_writes_what_engines_of_their_own_found(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    words = f"--json {path} --shape tiny --device cpu --kv-bytes 600000 --engines kv-compress,none"
    words += " --outputs 8 --shrink 16 --seconds 100 --start 600 --only throughput"
    run = subprocess.run(
        [sys.executable, script.__file__, *words.split()], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(path.read_text())
    (engine,), (none,) = found["engines"], found["failed"]
    assert engine["engine"] == "kv-compress" and none["why"] == "KeyError: 'none'"
    long, *others = found["rows"]
    assert (long["tokens"], long["rate"], long["kept"], long["complete"]) == (375, 64, 128, True)
    assert long["requests"] == long["ended"] == 12
    assert long["compressions"] > 12  # each prompt, and those that grew while they were decoded
    assert all(x["kept"] == max(128, math.ceil(x["tokens"] / x["rate"])) for x in others)
