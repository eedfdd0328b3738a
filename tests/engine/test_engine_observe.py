"""Decoding queries that are observed at once, or kept and observed later: the reference's metrics
and evictions."""

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed")

from kvfold import LLM
from kvfold.attention import cpu_paged, fallback, observer
from kvfold.attention.observer import WINDOW, Observer, SequenceChunk
from kvfold.config import Recipe
from kvfold.engine.requests.request import CacheParams, Request, SamplingParams
from kvfold.engine.runner.runner import ModelRunner
from kvfold.ops.backend import use_triton
from matrix import slow
from models import tiny, tokens
from steps import backends, even, folded, runner_of, sequences_of, step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    yield from backends(monkeypatch)


def metrics(runner: ModelRunner, one: Request) -> tuple[Tensor, Tensor]:
    """Of rows by position, and the positions, [G, T]; rows there are none of come last."""
    found, positions, valid = (x[0] for x in runner.eviction.tracked(one.open_slot))
    order = positions.masked_fill(~valid, 2**30).argsort(1)
    return found.gather(1, order), positions.gather(1, order)


def generated(runner: ModelRunner) -> list[list[Tensor]]:
    """Logits, metrics and positions while two sequences generate, are compressed and go on."""
    first, second = sequences_of(runner, 29, 20)
    found = [[step(runner, (first, 29)), step(runner, (second, 20))]]
    for one in (first, second):
        one.cache = CacheParams(max_cache_tokens=16, protected=4)
    for count in (3, 1):
        logits = [step(runner, (first, 1), (second, 1)) for _ in range(count)]
        found += [logits, *(list(metrics(runner, one)) for one in (first, second))]
        runner.compress([first, second])
        assert runner.pool.host_lengths[first.open_slot].sum() < 4 * first.num_computed
        found += [list(metrics(runner, one)) for one in (first, second)]
    return found


@pytest.mark.parametrize(
    ("recipe", "evict", "settings"),
    [
        (None, "kv-compress", {}),
        slow(None, "kv-compress-full", {}),
        slow(even("swift"), "kv-compress", {"bits": 8}),
        slow(even("swift"), "kv-compress-full", {}),
        (even("lean"), "kv-compress-full", {}),
        (even("small"), "kv-compress", {"bits": 2}),
    ],
)
def test_metrics_and_evictions_are_the_reference_s(
    recipe: Recipe | None, evict: str, settings: dict, backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are kept, queries are added in the middle of it, and again where metrics are
    read; where two passes leave weights, in every step."""
    monkeypatch.setattr(observer, "WINDOW", 2)
    found = []
    for name in ("reference", "triton"):
        backend(name)
        runner = runner_of(folded(recipe), evict=evict, keep_tokens=0.9, **settings)
        kept = name == "triton" and recipe is None
        assert (runner.attention.observer is not None) is kept
        found.append(generated(runner))
    for ours, theirs in zip(*found[::-1], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).abs().max() <= 1e-2 * b.abs().max()


# -- what is kept, and for how long ---------------------------------------------------------------


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> tuple[Observer, list[dict[int, list[int]]]]:
    """An observer, and what it was asked to add: positions by slot, at every call."""
    runner, calls = runner_of(folded(None), evict="kv-compress", keep_tokens=0.9), []
    module = runner.model.model.layers[0].self_attn

    def observe(q, lse, positions, pages, slots, scale, **_) -> None:
        calls.append({})
        for slot, row, total, at in zip(slots.tolist(), q, lse, positions, strict=True):
            counts = at >= 0
            assert (row[:, counts, :] == at[counts, None]).all(), "a query is not where it should"
            assert (total[:, counts] == at[counts]).all()
            calls[-1][slot] = sorted(at[counts].tolist())

    monkeypatch.setattr(observer, "observe", observe)
    for slot in range(runner.pool.num_slots):
        runner.pool.allocate_slot()
        runner.pool.extend([slot], [1])
    return Observer(runner.attention.view, runner.policy.scorer, {0: module.description}), calls


def decode(on: Observer, *sequences: Request) -> None:
    """A step whose queries are their own positions."""
    with on.step(
        [SequenceChunk(x.open_slot, x, x.num_computed) for x in sequences], len(sequences)
    ):
        device = on.queries[0].device
        slots = torch.tensor([x.open_slot for x in sequences], device=device)
        positions = torch.tensor([x.num_computed for x in sequences], device=device)
        q = on.queries[0].new_ones(len(slots), *on.queries[0].shape[1:]) * positions[:, None, None]
        on.buffer(0, slots * WINDOW + positions % WINDOW, q, q[..., 0].float())
    for x in sequences:
        x.num_computed += 1


def sequence(slot: int, computed: int) -> Request:
    one = Request(id=slot, token_ids=[5], num_prompt=1, sampling=SamplingParams(), slot=slot)
    one.num_computed = computed
    return one


def test_all_that_is_kept_is_added_once_one_sequence_has_enough(kept) -> None:
    on, calls = kept
    first, second = sequence(0, 13), sequence(2, 30)
    for _ in range(3):
        decode(on, first)
    for _ in range(WINDOW - 3):
        assert not calls
        decode(on, first, second)
    assert calls == [{0: list(range(13, 21)), 2: list(range(30, 35))}]
    on.flush()
    assert len(calls) == 1
    decode(on, second)
    on.flush()
    assert calls[1:] == [{2: [35]}]


def test_what_belongs_to_others_is_dropped(kept) -> None:
    on, calls = kept
    ended, replaced, restarted = (sequence(slot, 9) for slot in range(3))
    decode(on, ended, replaced, restarted)
    on.view.pool.free_slot(ended.open_slot)
    restarted.num_computed = 0
    with on.step(
        [SequenceChunk(x.open_slot, x, x.num_computed) for x in (sequence(1, 10), restarted)], 0
    ):
        pass
    on.flush()
    assert not calls


def test_sequences_that_do_not_simply_go_on_are_added_first(kept) -> None:
    on, calls = kept
    one = sequence(1, 20)
    decode(on, one)
    decode(on, one)
    one.num_computed = 40  # a chunk came in between
    decode(on, one)
    assert calls == [{1: [20, 21]}]
    one.num_computed = 21  # back to an earlier token
    decode(on, one)
    assert calls[1:] == [{1: [40]}]


def test_what_fails_on_the_way_is_neither_added_later_nor_twice(
    kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    on, calls = kept
    one, other = sequence(0, 20), sequence(2, 30)
    decode(on, one, other)
    turns = [SequenceChunk(x.open_slot, x, x.num_computed) for x in (one, other)]
    with pytest.raises(MemoryError), on.step(turns, 2):
        raise MemoryError
    decode(on, one, other)  # the same step once more
    with monkeypatch.context() as patch:
        patch.setattr(observer, "observe", lambda *_, **__: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            on.flush()
    decode(on, one, other)
    on.flush()
    assert calls == [{0: [22], 2: [32]}]


def test_queries_of_who_evicts_nothing_are_not_kept(kept) -> None:
    on, calls = kept
    one, other = sequence(0, 13), sequence(2, 30)
    turns = [SequenceChunk(0, one, 13, counts=False), SequenceChunk(2, other, 30)]
    with on.step(turns, 2):
        for layer in on.queries:
            at = torch.tensor([30.0], device=on.queries[layer].device)
            row = torch.tensor([2 * WINDOW + 30 % WINDOW], device=at.device)
            q = on.queries[layer].new_ones(1, *on.queries[layer].shape[1:]) * 30
            on.buffer(layer, row, q, q[..., 0].float())
    on.flush()
    assert calls == [{2: [30]}]


@pytest.mark.parametrize("evict", ["kv-compress", "h2o"])
def test_nothing_is_observed_where_no_request_evicts(
    evict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has a budget is, and evicts what it does alone."""
    calls, compute = [], cpu_paged.attention_scores
    for module in (cpu_paged, fallback):
        counted = lambda *x: calls.append(x) or compute(*x)  # noqa: E731
        monkeypatch.setattr(module, "attention_scores", counted)
    monkeypatch.setenv("KVFOLD_BACKEND", "reference")
    use_triton.cache_clear()
    how = {"kv_bytes": 2**22, "page": 4, "max_sequences": 3, "max_tokens": 128}
    llm = LLM(tiny("llama-gqa"), evict=evict, keep_tokens=1, **how)
    prompts = [tokens(1, 40, seed=i)[0].tolist() for i in range(3)]
    asked = SamplingParams(max_new_tokens=9, ignore_eos=True)
    llm.generate(prompts, asked)
    assert not calls
    own = CacheParams(max_cache_tokens=36, every=2)
    alone = llm.generate(prompts[:1], asked, cache=own)
    assert calls and llm.engine.scheduler.compressions.num_evicted > 0
    beside = llm.generate(prompts, asked, cache=[own, CacheParams(), CacheParams()])
    assert beside[0].token_ids == alone[0].token_ids
    use_triton.cache_clear()
