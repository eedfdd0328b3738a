"""Load on an engine in this process: times of its own clock, and a limit that ends all."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from kvfold.bench import serve_engine as load
from kvfold.bench.synthetic_engine import random_model
from kvfold.engine.llm import LLM
from kvfold.engine.request import CacheParams

FILE = Path(__file__).parents[1] / "benchmarks" / "serving_speed.py"


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
    assert (found.reading.count, found.reading.decodes) == (1, 0)
    assert (found.decoding.count, found.decoding.decodes, found.decoding.largest) == (5, 15, 3)
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


@pytest.mark.parametrize("part", ["throughput", "latency"])
def test_the_script(part: str, tmp_path: Path, monkeypatch) -> None:
    spec = importlib.util.spec_from_file_location("serving_speed", FILE)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    path = tmp_path / "found.json"
    words = f"{part} --json {path} --shape tiny --device cpu --kv-bytes 400000 --planned int4-full"
    words += " --outputs 8 --shrink 16 --span 0.5 --seconds 45 --bound 1e-3"
    monkeypatch.setattr("sys.argv", ["serving_speed", *words.split()])
    monkeypatch.setattr(script, "MOST_POINTS", 1)
    script.main()
    found = json.loads(path.read_text())
    assert found["failed"] == [] and {x["engine"] for x in found["rows"]} >= {
        "bf16-full",
        "int4-full",
    }
    if part == "throughput":
        less = next(x for x in found["rows"] if (x["tokens"], x["rate"]) == (375, 64))
        assert less["complete"] and less["kept"] == 128 and less["compressions"] == less["requests"]
