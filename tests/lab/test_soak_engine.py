"""benchmarks/soak_engine.py in short, and what it found."""

import logging
from dataclasses import replace

import pytest

import soak_engine
from kvfold import LLM, SamplingParams
from kvfold.engine.core import launched
from kvfold.engine.runner import sampler
from models import tiny

PLAN = soak_engine.Plan(events=900, turn=450, questions=24, open=60)


@pytest.fixture(autouse=True)
def quiet_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("kvfold"), "disabled", True)
    monkeypatch.setattr(logging.getLogger("kvfold.engine.core.scheduler"), "disabled", True)
    monkeypatch.setattr(logging.getLogger("kvfold.engine.core.engine"), "disabled", True)


IN_TESTS = {"prefixes": (), "evicting": pytest.mark.slow}  # `make soak` runs all


@pytest.mark.parametrize(
    "cache",
    [pytest.param(x, marks=IN_TESTS.get(x, pytest.mark.soak)) for x in soak_engine.CACHES],
)
def test_every_answer_is_that_of_the_request_alone(cache: str) -> None:
    if soak_engine.CACHES[cache].get("guided"):
        pytest.importorskip("xgrammar", reason='needs pip install "kvfold[structured]"')
    report = soak_engine.Soak(replace(PLAN, caches=cache)).run()
    assert not report["wrong"], report["wrong"][:3]
    assert report["events"] >= PLAN.events and report["faults"]
    assert {"equal", "left", "cancelled", "error", "refused"} <= report["outcomes"].keys()


def test_the_soak_tells_a_different_answer() -> None:
    one = ("ab", (1, 2), "length", (-1.0,))
    assert soak_engine.same(one, ("ab", (1, 2), "length", (-1.0001,)))
    for other in (
        ("ac", (1, 2), "length", (-1.0,)),
        ("ab", (1, 3), "length", (-1.0,)),
        ("ab", (1, 2), "eos", (-1.0,)),
        ("ab", (1, 2), "length", (-1.1,)),
        ("ab", (1, 2), "length", ()),
    ):
        assert not soak_engine.same(one, other)


@pytest.mark.parametrize("evict", ["kv-compress", "knorm", None])
def test_a_step_that_fails_after_the_model_changes_no_answer(
    evict: str | None, monkeypatch
) -> None:
    """Attention that was added to metrics is not added again: who was in that step ends with an
    error. All others get what they get alone."""
    settings = {} if evict is None else {"evict": evict, "max_cache_tokens": 20, "page": 4}
    llm = LLM(tiny("llama-gqa"), max_sequences=4, max_tokens=120, kv_bytes=2**20, **settings)
    prompts = [[3 + (i * j) % 90 for j in range(1, 40)] for i in (3, 5, 7)]
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    wanted = [llm.generate([x], sampling)[0].token_ids for x in prompts]
    draw, calls = sampler.sample, []

    def sample(logits, *rest):
        found = draw(logits, *rest)
        calls.append(len(logits))
        if len(logits) == 3 and calls.count(3) in (1, 4, 9):
            raise ValueError("no memory for the logits")
        return found

    monkeypatch.setattr(launched, "sample", sample)
    found = llm.generate(prompts, sampling)
    if evict == "kv-compress":
        assert {x.error for x in found} == {"ValueError: no memory for the logits"}
        found = llm.generate(prompts[:2], sampling)
    else:
        assert calls.count(3) > 9
    assert [x.token_ids for x in found] == wanted[: len(found)]
