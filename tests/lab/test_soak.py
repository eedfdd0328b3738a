"""Random events at length: threads on a stub model, and a router with two servers."""

import gc
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from kvfold.engine.core import scheduler
from kvfold.engine.core.compression import Schedule
from kvfold.engine.requests.request import CacheParams, Request
from memory import resident
from stub import Bench, in_threads, mixed_requests, reference, stream

THREADS = 4
KINDS = ("read", "leave", "add", "cancel", "fail", "spoil", "poison")
CHANCES = (30, 8, 40, 20, 1, 1, 1)


class Forgetful(list):
    """A record that nobody reads."""

    def append(self, _: object) -> None: ...


class Crowd:
    """Threads that use one engine; what each got is compared with what it gets alone."""

    def __init__(self, events: int) -> None:
        self.bench = Bench(
            40,
            pool="real",
            num_slots=5,
            max_tokens=70,
            schedule=Schedule(max_compressed_entries=60),
        )
        self.bench.runner.batches = self.bench.runner.rounds = Forgetful()
        self.requests, self.events = mixed_requests(300), events
        self.harmed: set[int] = set()  # requests that the runner was told to fail
        self.counts: Counter[str] = Counter()

    def run(self, number: int) -> None:
        rng = random.Random(number)
        for _ in range(self.events // THREADS):
            kind = rng.choices(KINDS, CHANCES)[0]
            getattr(self, kind)(rng)
            self.counts[kind] += 1

    def open(self, rng: random.Random):
        prompt, params = rng.choice(self.requests)
        cache = CacheParams(max_cache_tokens=rng.choice([None, None, None, 6]))
        return stream(self.bench, prompt, params, cache), (prompt, params, cache)

    def read(self, rng: random.Random) -> None:
        """A request from its start to its end, while the others do what they do."""
        outputs, (prompt, params, cache) = self.open(rng)
        tokens: list[int] = []
        for output in outputs:
            tokens += output.token_ids
        self.counts[output.finish_reason] += 1
        if output.finish_reason == "error":
            assert output.id in self.harmed or output.error == "RuntimeError: once", output
        elif cache.max_cache_tokens is None:
            wanted = reference(prompt, params)
            cut = output.finish_reason == "cancelled"  # by another thread
            assert tokens == (wanted[: len(tokens)] if cut else wanted)

    def leave(self, rng: random.Random) -> None:
        """One that is given up after some tokens, or lost."""
        outputs, (prompt, params, cache) = self.open(rng)
        tokens: list[int] = []
        for output in outputs:
            tokens += output.token_ids
            if rng.random() < 0.2:
                break
        if cache.max_cache_tokens is None:
            assert tokens == reference(prompt, params)[: len(tokens)]
        if rng.random() < 0.5:
            outputs.close()

    def add(self, rng: random.Random) -> None:
        """Something that nobody reads, now and then, or a step."""
        if len(self.bench.engine._requests) < 12:
            self.bench.engine.add(*rng.choice(self.requests), deliver=lambda output: None)
        else:
            self.bench.engine.step()

    def cancel(self, rng: random.Random) -> None:
        self.bench.engine.cancel(rng.choice(list(self.bench.engine._requests) or [0]))

    def fail(self, rng: random.Random) -> None:
        self.bench.runner.fail = RuntimeError("once")

    def spoil(self, rng: random.Random) -> None:
        self.harm(rng, self.bench.runner.culprits)

    def poison(self, rng: random.Random) -> None:
        self.harm(rng, self.bench.runner.poisoned)

    def harm(self, rng: random.Random, which: set[int]) -> None:
        id = rng.choice(list(self.bench.engine._requests) or [0])
        self.harmed.add(id)
        which.add(id)


def alive() -> list[Request]:
    return [x for x in gc.get_objects() if type(x) is Request]


@pytest.mark.parametrize(
    "events", [1_000, pytest.param(200_000, marks=[pytest.mark.soak, pytest.mark.slow])]
)
def test_nothing_is_lost_in_a_crowd(events: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is logged of failures has frames, and these have requests.
    monkeypatch.setattr(scheduler.logger, "disabled", True)
    gc.collect()
    others = alive()  # of tests before: an engine that failed keeps what it could not deliver
    known = set(map(id, others))
    crowd = Crowd(events)
    crowd.run(THREADS)  # a quarter of the events, to have all that is kept
    crowd.bench.drain()
    before = resident()
    in_threads(THREADS, crowd.run, seconds=3600)
    crowd.bench.drain()
    assert resident() - before < 2**24
    assert not crowd.bench.engine.has_work
    gc.collect()
    assert not [x for x in alive() if id(x) not in known]
    assert crowd.bench.scheduler.num_preemptions > events / 1000
    assert {"eos", "length", "error", "cancelled"} <= crowd.counts.keys()


SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def serving_soak():
    """The harness, which needs `kvfold[server]`."""
    for package in ("fastapi", "uvicorn", "aiohttp"):
        pytest.importorskip(package, reason='needs pip install "kvfold[server]"')
    import soak

    return soak


@pytest.mark.soak
@pytest.mark.slow
def test_a_router_and_two_servers_under_faults(serving_soak) -> None:
    """A minute of what `python benchmarks/soak.py` does for longer."""
    report = serving_soak.soak(serving_soak.Plan(minutes=1, clients=8, seed=1, model="tiny"))
    assert not report["wrong"], (report["wrong"][:5], report["logs"])
    assert report["outcomes"]["equal"] > 20 and report["faults"] and len(report["samples"]) >= 2


def test_the_soak_tells_a_different_answer_from_a_cut_one(serving_soak) -> None:
    """What it calls wrong: another text, another reason, an end without its last event."""
    soak = serving_soak.Soak(serving_soak.Plan(), SOAK.parent)
    asked = serving_soak.Question({}, (("ab", "stop"), ("cd", "length")))

    def streamed(*lines: str):
        joined = serving_soak.Joined(2)
        for line in lines:
            joined.add(line)
        return joined

    def said(index: int, text: str, reason: str | None = None) -> str:
        choice = {"index": index, "text": text, "finish_reason": reason}
        return "data: " + json.dumps({"choices": [choice]})

    whole = [said(0, "a"), said(1, "cd", "length"), said(0, "b", "stop")]
    lost = 'data: {"error": {"code": "replica_lost"}}'
    done = serving_soak.DONE
    assert soak._ended(asked, streamed(*whole, "", done)) == "equal"
    assert soak._ended(asked, streamed(*whole[:2], lost, done)) == "replica_lost"
    for wrong in (
        whole,  # no last event
        [*whole[:2], done],  # cut, and no error says so
        [said(0, "x"), lost, done],
        [*whole[:2], said(0, "b", "length"), done],
        [*whole[:2], lost.replace("replica_lost", "generation_failed"), done],
    ):
        with pytest.raises(AssertionError):
            soak._ended(asked, streamed(*wrong))
    for wrong in ("ata: {}", 'data: {"choi'):
        with pytest.raises((AssertionError, ValueError)):
            streamed(wrong)


@pytest.fixture(scope="module")
def real_soak(serving_soak):
    import soak_real

    return soak_real


@pytest.mark.soak
@pytest.mark.slow
def test_a_real_models_servers_under_faults(real_soak) -> None:
    """Two minutes of what `python benchmarks/soak_real.py` does for longer."""
    report = real_soak.soak_real(real_soak.RealPlan(minutes=2, clients=8, seed=1))
    assert not report["wrong"], (report["wrong"][:5], report["logs"])
    assert report["outcomes"]["equal"] > 5 and report["parted"]["count"] < 200


def test_answers_may_part_at_ties_alone(real_soak, serving_soak) -> None:
    plan = real_soak.RealPlan(tie=0.5, maps="maps", device="cuda", dtype="bfloat16")
    soak = real_soak.RealSoak(plan, SOAK.parent)
    words = " ".join(soak.servers[0].words)
    assert "--maps maps" in words and "--device cuda --dtype bfloat16" in words
    assert "--maps" not in real_soak.RealSoak(real_soak.RealPlan(), SOAK.parent).servers[0].words
    logprobs = {
        "tokens": ["The", " old", " house", " by the sea and the", " ship"],
        "top_logprobs": [
            {"The": -0.1, "A": -3.0},
            {" old": -0.9, " new": -1.1},
            {" house": -0.1, " ship": -3.0},
            {" by the sea and the": -0.1},
            {" ship": -0.1, " man": -5.0},
        ],
    }
    soak.gaps, soak.parted = {"a": real_soak.gaps_of(logprobs)}, []
    wanted = "".join(logprobs["tokens"])
    asked = serving_soak.Question({"prompt": "a"}, ((wanted, "length"),))

    def agrees(text: str, reason: str | None = "length", whole: bool = True) -> bool:
        return soak.agrees(asked, ((text, reason),), whole=whole)

    assert agrees(wanted) and agrees(wanted[:9], None, whole=False) and not soak.parted
    assert agrees("The new ship") and agrees("The new", None, whole=False)
    assert soak.parted == [pytest.approx(0.2)] * 2
    assert not agrees(wanted[:-4] + "man") and not agrees(wanted, "eos")
    soak.parted.clear()
    assert not agrees(wanted + " went") and not agrees(wanted[:-3]) and not soak.parted
