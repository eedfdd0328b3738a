"""Steps that are launched before the tokens of the one in front are read: the same outputs, pages
and prefixes as one after another, and nothing launched whose tokens the host must know."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kvfold.engine.core.compression import Schedule
from kvfold.engine.core.engine import Engine
from kvfold.engine.requests.request import Batch, CacheParams, Request, SamplingParams
from kvfold.engine.runner.graphs import DecodeGraphs
from kvfold.engine.runner.runner import ModelRunner
from kvfold.engine.runner.sampler import Sampled
from models import tiny
from stub import EOS, POOLS, VOCAB, Bench, mixed_requests, reference

NINE = {"max_new_tokens": 9, "ignore_eos": True}


def ends_early(after: int = 3) -> tuple[list[int], list[int]]:
    """A prompt whose outputs end with EOS after some others, and these."""
    found = (([i, j], reference([i, j], SamplingParams())) for i in range(9) for j in range(VOCAB))
    return next((x, ids) for x, ids in found if ids[-1] == EOS and len(ids) > after)


@pytest.mark.parametrize("num_pages", [1000, 34])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("pool", POOLS)
def test_outputs_equal_an_unbatched_run(pool: str, chunk: int, num_pages: int) -> None:
    bench = Bench(num_pages, pool=pool, chunk=chunk, ahead=True)
    requests = mixed_requests(16)
    ids = [bench.engine.add(prompt, params) for prompt, params in requests]
    while bench.engine.has_work:
        bench.step()
        bench.check()
    bench.drain()
    for id, (prompt, params) in zip(ids, requests, strict=True):
        assert bench.tokens[id] == reference(prompt, params)
    assert bench.runner.num_ahead > 9
    assert (bench.scheduler.num_preemptions > 0) == (num_pages < 1000)


def test_the_next_step_is_launched_before_the_last_one_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    bench = Bench(ahead=True)
    run, on_host = bench.runner.run, Sampled.on_host
    monkeypatch.setattr(bench.runner, "run", lambda *x: seen.append("launch") or run(*x))
    monkeypatch.setattr(Sampled, "on_host", lambda *x: seen.append("read") or on_host(*x))
    bench.add([1] * 5, **NINE | {"max_new_tokens": 4})
    bench.drain()
    assert seen == ["launch", "launch", "read", "launch", "read", "launch", "read", "read"]


def test_every_step_returns_one_token_of_each_and_limits_cost_no_step() -> None:
    bench = Bench(ahead=True)
    ids = [bench.add([i + 1] * 5, ignore_eos=True, max_new_tokens=4 + i) for i in range(3)]
    sizes = [len(bench.step()) for _ in range(6)]
    assert sizes == [3, 3, 3, 3, 2, 1] and not bench.engine.has_work
    assert [len(x) for x in bench.runner.batches] == sizes
    assert bench.runner.num_ahead == 5
    assert [len(bench.tokens[id]) for id in ids] == [4, 5, 6]


@pytest.mark.parametrize("pool", ["real", "shared"])
def test_one_that_a_token_ends_computes_one_more_that_nobody_gets(pool: str) -> None:
    prompt, ids = ends_early()
    bench = Bench(pool=pool, num_slots=2, ahead=True)
    first, second = bench.add(prompt), bench.add([1] * 5, max_new_tokens=30, ignore_eos=True)
    bench.drain()
    assert bench.tokens[first] == ids
    assert bench.tokens[second] == reference([1] * 5, SamplingParams(max_new_tokens=30))
    rows = [start for batch in bench.runner.batches for id, start, _ in batch if id == first]
    assert rows[-1] == len(prompt) + len(ids) - 1, "the surplus row is that of its end"
    assert len(rows) == 1 + len(ids)


def test_when_all_ended_what_flies_is_nobody_s() -> None:
    bench = Bench(ahead=True)
    bench.add(ends_early()[0])
    bench.drain()
    assert not bench.engine.has_work
    later = bench.add([1] * 5, **NINE)
    assert len(bench.step()) == 1, "its first step is no other's"
    bench.drain()
    assert bench.tokens[later] == reference([1] * 5, SamplingParams(**NINE))


@pytest.mark.parametrize(
    "edits",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 3},
        {"allowed_token_ids": (1, 2, 3)},
        {"bad_words": ((4,),)},
    ],
)
def test_where_tokens_say_what_may_come_the_host_reads_them_first(edits: dict) -> None:
    found = []
    for ahead in (False, True):
        bench = Bench(ahead=ahead)
        bench.add([1] * 5, **NINE)
        bench.add([2] * 5, **NINE, **edits)
        found.append(bench.drain().tokens)
        assert not bench.runner.num_ahead
    assert found[0] == found[1]


def test_once_those_ended_the_others_go_ahead() -> None:
    bench = Bench(ahead=True)
    bench.add([1] * 5, **NINE | {"max_new_tokens": 20})
    bench.add([2] * 5, **NINE, logit_bias={3: 1.0})
    bench.drain()
    assert bench.runner.num_ahead == 20 - 9


def test_who_comes_waits_for_one_step_at_most() -> None:
    bench = Bench(ahead=True)
    bench.add([1] * 5, max_new_tokens=50, ignore_eos=True)
    for _ in range(4):
        bench.step()
    late = bench.add([2] * 5, **NINE)
    bench.step()
    assert [x.id for x in bench.step()] == [0, late]
    bench.drain()
    assert bench.tokens[late] == reference([2] * 5, SamplingParams(**NINE))


def test_behind_a_full_batch_others_wait_and_it_goes_ahead() -> None:
    bench = Bench(num_slots=2, ahead=True)
    ids = [bench.add([i + 1] * 5, max_new_tokens=20, ignore_eos=True) for i in range(4)]
    bench.drain()
    # Of the first pair all but the step behind its prompts, when others might have come in.
    assert bench.runner.num_ahead == 18 + 19
    for id in ids:
        wanted = SamplingParams(max_new_tokens=20, ignore_eos=True)
        assert bench.tokens[id] == reference([id + 1] * 5, wanted)


def test_who_is_cancelled_while_its_step_flies_gets_nothing_more() -> None:
    bench = Bench(pool="shared", ahead=True)
    ids = [bench.add([i + 1] * 5, **NINE) for i in range(3)]
    bench.step()
    bench.step()
    assert bench.engine.cancel(ids[1])
    bench.check()
    again = bench.add([7] * 5, **NINE)  # in its slot
    bench.drain()
    assert len(bench.tokens[ids[1]]) == 2 and bench.ended[ids[1]].finish_reason == "cancelled"
    for id, first in ((ids[0], 1), (ids[2], 3), (again, 7)):
        assert bench.tokens[id] == reference([first] * 5, SamplingParams(**NINE))


def test_prefixes_are_shared_as_without() -> None:
    hits = []
    for ahead in (False, True):
        bench = Bench(pool="shared", ahead=ahead)
        bench.add([1] * 21, **NINE | {"max_new_tokens": 20})
        bench.drain()
        bench.add([1] * 21 + bench.tokens[0] + [2], **NINE)
        bench.drain()
        hits.append(bench.prefixes.num_hits)
        assert bench.runner.num_ahead == (19 + 8) * ahead
    assert hits[0] == hits[1] == 40


def test_a_prompt_that_is_read_beside_them_goes_on_with_every_step() -> None:
    found = []
    for ahead in (False, True):
        bench = Bench(chunk=7, ahead=ahead)
        bench.add([1] * 5, max_new_tokens=20, ignore_eos=True)
        bench.step()
        bench.add([2] * 35, **NINE)
        bench.drain()
        found.append([batch for batch in bench.runner.batches if any(x[0] for x in batch)])
    assert found[0][:5] == [[(0, 5 + i, 1), (1, 7 * i, 7)] for i in range(5)]
    assert [x[1:] for x in found[1][:5]] == [x[1:] for x in found[0][:5]]


@pytest.mark.parametrize(
    "schedule, every",
    [
        ({}, None),
        ({}, 1),
        ({}, 2),
        ({"every": 1}, None),
        ({"every": 3}, None),
        ({"uncompressed": 4}, None),
    ],
)
def test_what_is_over_its_budget_is_compressed_first(schedule: dict, every: int | None) -> None:
    """With the very tokens and compressions of one step after another."""
    found = []
    for ahead in (False, True):
        bench = Bench(ahead=ahead, schedule=Schedule(**schedule))
        for own in (every, None):
            bench.add([1] * 20, CacheParams(max_cache_tokens=8, every=own), **NINE)
        bench.add([2] * 5, **NINE | {"max_new_tokens": 30})
        found.append((bench.drain().tokens, bench.runner.rounds))
        assert bench.runner.rounds and (bench.runner.num_ahead > 0) == ahead
    assert found[0] == found[1]


def test_a_launch_that_fails_gives_its_pages_back(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(pool="real", ahead=True)
    ids = [bench.add([i + 1] * 5, **NINE) for i in range(3)]
    bench.step()
    before = bench.pool.host_lengths.copy()
    bench.runner.fail = RuntimeError("out of memory")
    assert len(bench.step()) == 3
    assert (bench.pool.host_lengths == before).all() and bench.scheduler.num_steps == 2
    assert "could not be launched ahead" in caplog.text
    bench.drain()
    for id in ids:
        assert bench.tokens[id] == reference([id + 1] * 5, SamplingParams(**NINE))


def test_an_engine_may_be_told_not_to() -> None:
    bench = Bench(ahead=True)
    bench.engine.async_scheduling = False
    bench.add([1] * 5, **NINE)
    bench.drain()
    assert not bench.runner.num_ahead


def test_a_graph_takes_tokens_that_nobody_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        return torch.stack((tokens, positions, slots), 1)

    def capture(graphs: DecodeGraphs, size: int, forward) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: graphs._step(size, forward))

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    graphs = DecodeGraphs(torch.device("cpu"), most=4, padding_slot=9)
    chunks = []
    for slot in range(3):
        request = Request(id=slot, token_ids=[7], num_prompt=1, sampling=SamplingParams())
        request.start(slot)
        request.advance(1)
        chunks.append(request.next_decode_chunk())
    batch = Batch(chunks=tuple(chunks))
    found = graphs.run(batch, forward, torch.tensor([5, 6, 8]))
    assert found.tolist() == [[5, 1, 0], [6, 1, 1], [8, 1, 2]]
    assert graphs.inputs[:, 3].tolist() == [0, 0, 9], "padding is still the dummy sequence"


def test_a_model_computes_the_tokens_that_nobody_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_compiled_cases import runner_of

    found = []
    for ahead in (False, True):
        monkeypatch.setattr(ModelRunner, "supports_async", ahead)
        runner = runner_of("llama-gqa")
        engine = Engine(runner, runner.pool)
        drawn = {"max_new_tokens": 20, "temperature": 1.0, "seed": 5}
        for i, sampling in enumerate(({"max_new_tokens": 12}, drawn, {"max_new_tokens": 30})):
            engine.add([i + 3, 5, 9 + i], SamplingParams(**sampling, logprobs=2))
        outputs = []
        while engine.has_work:
            outputs.append(engine.step())
        found.append(outputs)
    assert found[0] == found[1]
    assert tiny("llama-gqa").config.vocab_size > len(outputs) == 30
