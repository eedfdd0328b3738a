"""Failures of the runner, of hooks and of readers, and threads: nothing of another's is lost."""

import gc
import random
import sys
import threading
import weakref
from collections import Counter
from itertools import count
from types import FrameType

import pytest
from torch import Tensor

from kvfold.engine.api.stream import OutputDecoder, Stream
from kvfold.engine.core.compression import Schedule
from kvfold.engine.core.engine import Hooks
from kvfold.engine.requests import request as sequences
from kvfold.engine.requests.request import CacheParams, SamplingParams, StepOutput
from stub import EOS, Bench, in_threads, mixed_requests, reference, stream

NINE = {"max_new_tokens": 9, "ignore_eos": True}


@pytest.fixture(autouse=True, params=[False, True], ids=["plain", "ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """All of it with steps that are launched before the one in front is read, and without."""
    monkeypatch.setattr(Bench, "supports_async", request.param)
    return request.param


def started(bench: Bench) -> list[int]:
    """Requests, of which as many run as there are slots."""
    ids = [bench.add([i + 1] * 5, **NINE) for i in range(3)]
    bench.step()
    return ids


def served(bench: Bench, ids: list[int]) -> bool:
    return all(
        bench.tokens[id] == reference([id + 1] * 5, SamplingParams(**NINE))
        and bench.ended[id].finish_reason == "length"
        for id in ids
    )


# The runner --------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_who_makes_the_batch_fail_ends_alone(culprit: int) -> None:
    bench = Bench()
    ids = started(bench)
    bench.runner.culprits = {culprit}
    bench.drain()
    end = bench.ended[culprit]
    assert (end.finish_reason, end.error) == ("error", f"RuntimeError: no kernel for [{culprit}]")
    assert served(bench, [id for id in ids if id != culprit])


def test_a_failure_that_does_not_come_again_ends_nobody() -> None:
    bench = Bench()
    ids = started(bench)
    bench.runner.fail = RuntimeError("out of memory")
    assert len(bench.step()) == 3
    bench.drain()
    assert served(bench, ids)


def test_what_always_fails_ends_all_and_leaves_an_engine_that_serves() -> None:
    bench = Bench()
    bench.runner.culprits = set(started(bench))
    bench.drain()
    assert {end.finish_reason for end in bench.ended.values()} == {"error"}
    later = bench.add([7], **NINE)
    bench.drain()
    assert bench.tokens[later] == reference([7], SamplingParams(**NINE))


def test_a_bug_ends_all_that_run_and_is_raised_again() -> None:
    bench = Bench(num_slots=2)
    *batch, waiting = started(bench)
    bench.runner.fail = AssertionError("bug")
    with pytest.raises(AssertionError, match="bug"):
        bench.step()
    bench.check()
    assert bench.pool.used_bytes == 0
    ended = {x.id: x.finish_reason for x in bench.step() if x.finish_reason}
    assert ended == dict.fromkeys(batch, "error")
    bench.drain()
    assert served(bench, [waiting])


def test_an_interrupt_is_raised_again_and_nothing_is_lost() -> None:
    bench = Bench(num_slots=2)
    ids = started(bench)
    bench.runner.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        bench.step()
    bench.check()
    assert bench.pool.used_bytes == 0
    bench.drain()
    assert served(bench, ids)


def test_whom_compression_fails_for_ends_alone() -> None:
    bench = Bench(chunk=64)
    cache = CacheParams(max_cache_tokens=8)
    victim, neighbour = (bench.add([i] * 20, cache, **NINE) for i in (1, 2))
    plain = bench.add([2] * 20, **NINE)
    bench.step()
    bench.runner.culprits = {victim}
    bench.drain()
    assert bench.ended[victim].error == f"RuntimeError: no kernel for [{victim}]"
    alone = Bench(chunk=64)
    alone.add([2] * 20, cache, **NINE)
    assert bench.tokens[neighbour] == alone.drain().tokens[0]
    assert len(bench.tokens[plain]) == 9


def test_nan_logits_end_one_request(ahead: bool) -> None:
    bench = Bench()
    ids = started(bench)
    bench.runner.poisoned = {ids[1]}
    bench.drain()
    assert bench.ended[ids[1]].finish_reason == "error"
    assert "not finite" in bench.ended[ids[1]].error
    assert [len(bench.tokens[id]) for id in ids] == [9, 1 + ahead, 9]  # a step was launched


def test_where_tokens_are_packed_together_all_of_a_batch_end() -> None:
    """What was written over must not be packed again: an error, not other tokens."""
    bench = Bench()
    bench.runner.can_retry = False
    ids = started(bench)
    bench.runner.culprits = {ids[1]}
    bench.drain()
    assert {end.finish_reason for end in bench.ended.values()} == {"error"}


def test_a_failed_batch_holds_no_memory_while_its_halves_run() -> None:
    class Activations:
        """Of a forward pass."""

    alive: list[weakref.ref[Activations]] = []
    bench = Bench()
    run = bench.runner.run

    def run_out(batch: sequences.Batch, tokens: Tensor | None = None) -> Tensor:
        activations = Activations()
        assert not any(other() for other in alive)
        alive.append(weakref.ref(activations))
        if len(batch.chunks) > 1:
            raise RuntimeError("out of memory")
        return run(batch, tokens)

    ids = started(bench)
    bench.runner.run = run_out
    bench.drain()
    assert served(bench, ids) and len(alive) > 9


@pytest.mark.parametrize("when", range(0, 330, 6))
def test_an_interrupt_of_the_scheduler_leaves_an_engine_that_serves(when: int) -> None:
    lines = count()

    def interrupt(frame: FrameType, event: str, _: object):
        if event == "line" and next(lines) == when:
            raise KeyboardInterrupt
        return interrupt

    def trace(frame: FrameType, event: str, _: object):
        return interrupt if frame.f_code.co_filename.endswith("scheduler.py") else None

    bench = Bench(16, num_slots=2, pool="real", max_tokens=60)
    for i in range(3):
        bench.add([i + 1] * 8, CacheParams(max_cache_tokens=4), max_new_tokens=6)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(4):
            bench.engine.step()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    later = bench.engine.add([7] * 5, SamplingParams(**NINE))
    for _ in range(100):
        for output in bench.engine.step():
            bench.tokens.setdefault(output.id, []).extend(output.token_ids)
    assert not bench.engine.has_work and bench.pool.used_bytes == 0
    bench.check()
    assert bench.tokens[later] == reference([7] * 5, SamplingParams(**NINE))


def test_an_interrupt_ends_whom_eviction_let_grow_past_the_pool() -> None:
    bench = Bench(12, headroom=0, schedule=Schedule(before_preempt=False, every=1))
    one = bench.add([1] * 8, CacheParams(max_cache_tokens=8), max_new_tokens=200, ignore_eos=True)
    for _ in range(60):
        bench.step()
    bench.runner.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        bench.step()
    bench.drain()
    assert bench.ended[one].finish_reason == "pool"


# Positions ---------------------------------------------------------------------------------------


def test_positions_end_a_request_whatever_was_evicted() -> None:
    """Rows do not tell how far it went: 8 are kept, and the table has 40 positions."""
    bench = Bench(max_tokens=40, chunk=64, schedule=Schedule(every=1))
    one = bench.add([1] * 20, CacheParams(max_cache_tokens=8), max_new_tokens=500, ignore_eos=True)
    other = bench.add([2] * 5, **NINE)
    bench.drain()
    assert bench.ended[one].finish_reason == "length"
    assert len(bench.tokens[one]) == 21  # the last token is never fed
    assert max(start for batch in bench.runner.batches for _, start, _ in batch) == 39
    assert len(bench.tokens[other]) == 9


# Hooks and readers -------------------------------------------------------------------------------


class Failing(Hooks):
    """Fails in the hook of that name."""

    def __init__(self, name: str) -> None:
        setattr(self, name, self.fail)

    def fail(self, *_: object) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("name", [name for name in vars(Hooks) if name.startswith("on_")])
def test_a_hook_that_fails_ends_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(hooks=Failing(name))
    ids = started(bench)
    bench.drain()
    assert served(bench, ids) and not bench.engine.has_work
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("error", [AssertionError, KeyboardInterrupt])
def test_an_interrupted_delivery_goes_on(error: type[BaseException]) -> None:
    class Interrupted(Hooks):
        def on_request_finish(self, request: sequences.Request) -> None:
            if request.id == 0:
                raise error

    bench = Bench(hooks=Interrupted())
    ids = started(bench)
    for _ in range(40):
        try:
            bench.step()
        except KeyboardInterrupt:
            bench.check()
    assert served(bench, ids) and not bench.engine.has_work


def test_a_hook_may_add_and_cancel_between_steps_but_not_step() -> None:
    class Busy(Hooks):
        def on_request_init(self, request: sequences.Request) -> None:
            with pytest.raises(RuntimeError, match="a step within a step"):
                bench.engine.step()

        def on_generation_step_end(self, chunks: object) -> None:
            if not added:
                assert bench.engine.cancel(ids[1])
                added.append(bench.add([4] * 5, **NINE))
                with pytest.raises(RuntimeError, match="a step within a step"):
                    bench.engine.step()

    added: list[int] = []
    bench = Bench(hooks=Busy())
    ids = started(bench)
    bench.drain()
    assert bench.ended[ids[1]].finish_reason == "cancelled" and len(bench.tokens[ids[1]]) == 2
    assert served(bench, [ids[0], ids[2], *added])


def test_a_reader_that_fails_costs_nobody_else() -> None:
    def fail(output: StepOutput) -> None:
        raise ZeroDivisionError

    bench = Bench()
    bench.engine.add([9] * 3, SamplingParams(**NINE), deliver=fail)
    ids = [bench.add([i + 1] * 5, **NINE) for i in (1, 2)]
    bench.drain()
    for id in ids:
        assert bench.tokens[id] == reference([id + 1] * 5, SamplingParams(**NINE))


def test_a_request_may_be_cancelled_before_it_is_queued() -> None:
    bench = Bench()
    request = bench.engine.request([1] * 5)
    bench.engine._requests[request.id] = request  # as another thread sees it on its way
    assert bench.engine.cancel(request.id)
    bench.engine.submit(request)
    bench.drain()
    assert bench.ended[request.id].finish_reason == "cancelled"


def test_a_stream_may_be_closed_while_it_is_read() -> None:
    class Closing(OutputDecoder):
        def decode_output(self, output: StepOutput) -> StepOutput:
            outputs.close()
            return super().decode_output(output)

    bench = Bench()
    params = SamplingParams(max_new_tokens=1)
    request = bench.engine.request([1] * 5, params)
    answer = Closing(None, [1] * 5, params, whole=False)
    outputs = Stream(bench.engine).submit([(request, answer)])
    assert [x.finish_reason for x in outputs] == ["length"]


# Threads -----------------------------------------------------------------------------------------


def test_one_thread_steps_and_others_add_and_cancel() -> None:
    bench = Bench(40, pool="real", num_slots=5, max_tokens=70)
    requests, done = mixed_requests(60), threading.Event()
    asked: dict[int, int] = {}

    def work(number: int) -> None:
        if number == 0:
            while not done.is_set() or bench.engine.has_work:
                bench.step()
            return
        rng = random.Random(number)
        for i in range(60):
            which = rng.randrange(len(requests))
            id = bench.engine.add(*requests[which])
            asked[id] = which
            if i % 3 == 0:
                bench.engine.cancel(id)
        if number == 3:
            done.set()

    in_threads(4, work)
    bench.drain()
    assert bench.ended.keys() == asked.keys()
    for id, which in asked.items():
        reason, wanted = bench.ended[id].finish_reason, reference(*requests[which])
        assert reason in ("eos", "length", "cancelled"), bench.ended[id].error
        tokens = bench.tokens.get(id, [])
        assert tokens == (wanted[: len(tokens)] if reason == "cancelled" else wanted)


def test_streams_of_several_threads_run_together() -> None:
    bench = Bench(40, pool="real", num_slots=5, max_tokens=70)
    requests = mixed_requests(40)

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(25):
            prompt, params = rng.choice(requests)
            found: list[int] = []
            with stream(bench, prompt, params) as outputs:
                for output in outputs:
                    found += output.token_ids
                    if rng.random() < 0.02:
                        break
                else:
                    assert found == reference(prompt, params)
            assert found == reference(prompt, params)[: len(found)]

    in_threads(4, work)
    bench.drain()


def test_a_stream_that_is_lost_within_a_step_is_cancelled_after_it(ahead: bool) -> None:
    """As the garbage collector does it, which runs wherever it likes."""
    bench = Bench(40, pool="real")
    lost = [stream(bench, [1] * 5, SamplingParams(**NINE))]
    kept = stream(bench, [2] * 5, SamplingParams(**NINE))
    next(kept)
    name = "schedule_async" if ahead else "schedule"
    schedule = getattr(bench.scheduler, name)

    def schedule_and_collect(*batch: sequences.Batch) -> sequences.Batch:
        lost.clear()
        gc.collect()
        found = schedule(*batch)
        assert len(found.chunks) == 2  # not in here
        setattr(bench.scheduler, name, schedule)
        return found

    setattr(bench.scheduler, name, schedule_and_collect)
    next(kept)
    assert [x.id for x in bench.scheduler.running] == [1]
    bench.check()
    tokens = [token for output in kept for token in output.token_ids]
    assert len(tokens) == 7
    bench.step()
    assert not bench.engine.has_work and bench.pool.used_bytes == 0


def test_reasons_are_told_apart() -> None:
    bench = Bench(20)
    prompt = next([i] for i in range(29) if EOS in reference([i], SamplingParams()))
    ids = {
        "eos": bench.add(prompt),
        "length": bench.add([3], **NINE),
        "cancelled": bench.add([4], **NINE),
    }
    bench.engine.cancel(ids["cancelled"])
    bench.drain()
    ids["pool"] = bench.add([5], max_new_tokens=500, ignore_eos=True)
    bench.drain()
    ids["error"] = bench.add([6], **NINE)
    bench.runner.culprits = {ids["error"]}
    bench.drain()
    assert {id: end.finish_reason for id, end in bench.ended.items()} == {
        id: reason for reason, id in ids.items()
    }
    assert Counter(end.error is None for end in bench.ended.values())[False] == 1
