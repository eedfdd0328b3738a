"""The engine's loop with a stub model whose next token is a hash of what its cache holds.

The stub keeps tokens by (slot, position). A token that is lost, written twice, put elsewhere or
left over from another sequence changes the hash, and so every token after it.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from kvfold.cache.pool import Pool, PoolFull
from kvfold.engine import request as sequences
from kvfold.engine.engine import Engine, Hooks, StepOutput
from kvfold.engine.request import Batch, CacheParams, SamplingParams, TextStream
from kvfold.engine.sampler import sample
from kvfold.engine.scheduler import Schedule
from kvfold.spec import CacheSpec, Geometry, Latent, LayerSpec
from kvfold.spec.layout import CacheLayout, cache_layout

VOCAB, PAGE, EOS = 29, 4, 0
TABLE = 3 * torch.randn(997, VOCAB, generator=torch.Generator().manual_seed(0))


def logits_after(seen: Sequence[int | None]) -> Tensor:
    return TABLE[hash(tuple(-2 if x is None else x for x in seen)) % len(TABLE)]


class FakePool:
    """Pages of two groups, counted on the host alone: fast enough for long runs."""

    def __init__(self, num_pages: int, *, num_slots: int, max_tokens: int) -> None:
        self.num_pages, self.num_slots, self.max_tokens = num_pages, num_slots, max_tokens
        self.host_lengths = np.zeros((num_slots, 2), dtype=np.int64)
        self.is_open = [False] * num_slots
        self.layout = SimpleNamespace(most_at=lambda row: max_tokens)  # no tails

    @property
    def used_bytes(self) -> int:
        return int((-(-self.host_lengths // PAGE)).sum())

    def capacity(self) -> int:
        return min(self.num_pages // 2 * PAGE, self.max_tokens)

    def fits(self, tokens: int) -> bool:
        return tokens <= self.capacity()

    def open(self) -> int:
        slot = self.is_open.index(False)
        self.is_open[slot] = True
        return slot

    def close(self, slot: int) -> None:
        assert self.is_open[slot]
        self.host_lengths[slot], self.is_open[slot] = 0, False

    def grown(self, slots: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        assert all(self.is_open[slot] for slot in slots) and len(set(slots)) == len(slots)
        lengths = self.host_lengths.copy()
        lengths[list(slots)] += np.array(tokens, dtype=np.int64)[:, None]
        return lengths

    def can_extend(self, slots: Sequence[int], tokens: Sequence[int]) -> bool:
        lengths = self.grown(slots, tokens)
        pages = (-(-lengths // PAGE)).sum()
        return bool(pages <= self.num_pages and lengths.max() <= self.max_tokens)

    def extend(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        if not self.can_extend(slots, tokens):
            raise PoolFull
        self.host_lengths = self.grown(slots, tokens)

    def shrink(self, slot: int, lengths: np.ndarray) -> None:
        assert (lengths <= self.host_lengths[slot]).all()
        self.host_lengths[slot] = lengths

    def check_integrity(self) -> None:
        assert self.used_bytes <= self.num_pages
        closed = [not is_open for is_open in self.is_open]
        assert not self.host_lengths[closed].any()


def two_classes() -> CacheLayout:
    """Two layers of one group each, with pages of different bytes, so that slabs are traded."""
    geometry = Geometry(
        hidden_size=8,
        num_query_heads=1,
        num_kv_heads=1,
        head_dim=24,
        num_layers=2,
        rope=True,
        key_norm=False,
        scaling=1.0,
    )
    layers = tuple(
        LayerSpec(keys="plain", values="plain", latents=(Latent(side="kv", heads=(0,), rank=rank),))
        for rank in (8, 24)
    )
    return cache_layout(CacheSpec(geometry=geometry, layers=layers), page=PAGE)


def real_pool(num_pages: int, *, num_slots: int, max_tokens: int) -> Pool:
    layout = two_classes()
    return Pool(
        layout, num_pages // 2 * layout.page_bytes, num_slots=num_slots, max_tokens=max_tokens
    )


POOLS = {"fake": FakePool, "real": real_pool}


class StubRunner:
    """Checks every batch against the rules of the scheduler; can fail, or give NaN, on demand."""

    def __init__(self, pool: Pool, *, chunk: int, max_batch_tokens: int) -> None:
        self.pool, self.chunk, self.max_batch_tokens = pool, chunk, max_batch_tokens
        self.cells: dict[tuple[int, int], int] = {}
        self.rows = np.zeros_like(pool.host_lengths)
        self.fail: BaseException | None = None
        self.poisoned: set[int] = set()
        self.batches: list[list[tuple[int, int, int]]] = []  # (id, start, tokens)
        self.rounds: list[list[int]] = []  # ids compressed together

    def run(self, batch: Batch) -> Tensor:
        self.check(batch)
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        found = []
        for piece in batch.chunks:
            slot, stop = piece.request.slot, piece.start + len(piece.tokens)
            self.cells |= {(slot, piece.start + i): t for i, t in enumerate(piece.tokens)}
            if piece.wants_logits:
                logits = logits_after([self.cells.get((slot, p)) for p in range(stop)])
                bad = piece.request.id in self.poisoned
                found.append(logits * torch.nan if bad else logits)
        return torch.stack(found) if found else torch.empty(0, VOCAB)

    def check(self, batch: Batch) -> None:
        decode = [piece.is_decode for piece in batch.chunks]
        assert decode == sorted(decode, reverse=True) and sum(decode) == batch.num_decode
        sizes = [len(piece.tokens) for piece in batch.chunks]
        assert sum(sizes) <= self.max_batch_tokens and max(sizes) <= self.chunk and min(sizes) >= 1
        assert all(len(p.tokens) == 1 and p.wants_logits for p in batch.chunks if p.is_decode)
        for piece in batch.chunks:
            slot = piece.request.slot
            self.rows[slot] = (0 if piece.start == 0 else self.rows[slot]) + len(piece.tokens)
            assert (self.rows[slot] == self.pool.host_lengths[slot]).all()
        self.batches.append([(p.request.id, p.start, len(p.tokens)) for p in batch.chunks])

    def needs_compression(self, sequence: sequences.Request) -> bool:
        most = sequence.cache.max_cache_tokens
        return most is not None and self.pool.host_lengths[sequence.slot].max() > most

    def compress(self, chosen: list[sequences.Request]) -> None:
        """Forget the oldest; the second group keeps one page more, where it has it."""
        self.rounds.append([sequence.id for sequence in chosen])
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        for sequence in chosen:
            slot, most = sequence.slot, sequence.cache.max_cache_tokens
            kept = np.minimum(self.rows[slot], [most, most + PAGE])
            self.pool.shrink(slot, kept)
            self.rows[slot] = kept
            for position in range(sequence.num_computed - most):
                self.cells.pop((slot, position), None)


class Bench:
    """An engine on a stub, and everything it delivered."""

    def __init__(
        self,
        num_pages: int = 1000,
        *,
        num_slots: int = 4,
        max_tokens: int = 10_000,
        pool: str = "fake",
        chunk: int = 7,
        max_batch_tokens: int = 64,
        headroom: int = 1,
        schedule: Schedule | None = None,
        detokenize: Callable[[list[int]], str] | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self.pool = POOLS[pool](num_pages, num_slots=num_slots, max_tokens=max_tokens)
        self.runner = StubRunner(self.pool, chunk=chunk, max_batch_tokens=max_batch_tokens)
        self.engine = Engine(
            self.runner,
            self.pool,
            eos_ids=[EOS],
            detokenize=detokenize,
            hooks=hooks,
            chunk=chunk,
            max_batch_tokens=max_batch_tokens,
            headroom=headroom,
            schedule=schedule,
        )
        self.scheduler = self.engine.scheduler
        self.tokens: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.ended: dict[int, StepOutput] = {}

    def add(self, prompt: Sequence[int], cache: CacheParams | None = None, **sampling) -> int:
        return self.engine.add(prompt, SamplingParams(**sampling), cache)

    def step(self) -> list[StepOutput]:
        outputs = self.engine.step()
        assert len({x.id for x in outputs}) == len(outputs)
        for x in outputs:
            assert x.id not in self.ended
            self.tokens.setdefault(x.id, []).extend(x.token_ids)
            self.text[x.id] = self.text.get(x.id, "") + x.text
            if x.finish_reason:
                self.ended[x.id] = x
        return outputs

    def drain(self, most: int = 5000) -> "Bench":
        while self.engine.has_work:
            self.step()
            assert (most := most - 1)
        self.check()
        assert self.pool.used_bytes == 0
        return self

    def check(self) -> None:
        """Nothing is lost, nothing owned twice, and only running sequences own pages."""
        self.pool.check_integrity()
        scheduler = self.scheduler
        held = [*scheduler.waiting, *scheduler.running, *scheduler.finished]
        assert sorted(s.id for s in held) == sorted(self.engine._requests)
        assert len({s.id for s in held}) == len(held)
        slots = [s.slot for s in scheduler.running]
        assert len(set(slots)) == len(slots) and None not in slots
        assert all(s.slot is None for s in (*scheduler.waiting, *scheduler.finished))
        closed = [slot for slot in range(self.pool.num_slots) if slot not in slots]
        assert not self.pool.host_lengths[closed].any()


def reference(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    return list(alone(tuple(prompt), params))


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    """One request's outputs, without engine, cache or batch."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_new_tokens:
        logits = logits_after(tokens)[None]
        place = [params.seed or 0], [len(tokens)]
        tokens.append(sample(logits, [params], *place).choices([params])[0].token)
        if tokens[-1] == EOS and not params.ignore_eos:
            break
    return tuple(tokens[len(prompt) :])


def mixed_requests(count: int, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 9, 17, 30]))],
            SamplingParams(
                max_new_tokens=rng.choice([1, 5, 33, 33]),
                temperature=rng.choice([0.0, 0.0, 0.0, 1.5]),
                top_k=rng.choice([None, 5]),
                seed=i,
                ignore_eos=rng.random() < 0.7,
            ),
        )
        for i in range(count)
    ]


# Tokens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_pages", [1000, 34])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
@pytest.mark.parametrize("pool", POOLS)
def test_outputs_equal_an_unbatched_run(pool: str, chunk: int, num_pages: int) -> None:
    bench = Bench(num_pages, pool=pool, chunk=chunk)
    requests = mixed_requests(16)
    ids = [bench.engine.add(prompt, params) for prompt, params in requests]
    bench.drain()
    for id, (prompt, params) in zip(ids, requests, strict=True):
        assert bench.tokens[id] == reference(prompt, params)
        stopped = bench.tokens[id][-1] == EOS and not params.ignore_eos
        assert bench.ended[id].finish_reason == ("stop" if stopped else "length")
    assert (bench.scheduler.num_preemptions > 0) == (num_pages < 1000)


def test_batches_are_as_large_as_allowed() -> None:
    bench = Bench(chunk=7, max_batch_tokens=16)
    for length in (20, 3, 9):
        bench.add([1] * length, max_new_tokens=4, ignore_eos=True)
    bench.drain()
    assert bench.runner.batches[:4] == [
        [(0, 0, 7), (1, 0, 3), (2, 0, 6)],
        [(1, 3, 1), (0, 7, 7), (2, 6, 3)],
        [(1, 4, 1), (2, 9, 1), (0, 14, 6)],
        [(0, 20, 1), (1, 5, 1), (2, 10, 1)],
    ]


def test_eos_and_logprobs() -> None:
    bench = Bench()
    prompt = next([i] for i in range(VOCAB) if EOS in reference([i], SamplingParams()))
    plain = bench.add(prompt, logprobs=2)
    on = bench.add(prompt, ignore_eos=True, max_new_tokens=60)
    seen = {plain: [], on: []}
    while bench.engine.has_work:
        for x in bench.step():
            seen[x.id].append(x.logprobs)
    tokens = bench.tokens[plain]
    assert tokens[-1] == EOS and bench.ended[plain].finish_reason == "stop"
    assert bench.tokens[on][: len(tokens)] == tokens and len(bench.tokens[on]) == 60
    entries = [entry for step in seen[plain] for entry in step]
    assert [entry.top[0][0] for entry in entries] == tokens
    assert all(len(entry.top) == 2 and entry.top[0][1] == entry.chosen for entry in entries)
    assert set(seen[on]) == {None}


def test_a_prefill_without_decodes_keeps_its_chunk() -> None:
    bench = Bench(chunk=10, max_batch_tokens=16)
    for i in range(2):
        bench.add([i + 1] * 40, max_new_tokens=1)
    bench.drain()
    assert bench.runner.batches[:2] == [[(0, 0, 10), (1, 0, 6)], [(0, 10, 10), (1, 6, 6)]]


# Room ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_new_tokens", "refused"), [(1, 41), (2, 40)])
def test_a_prompt_that_can_never_fit_is_refused_with_numbers(
    max_new_tokens: int, refused: int
) -> None:
    bench = Bench(20)
    with pytest.raises(ValueError, match=rf"{refused} tokens need room for 41 .* capacity is 40"):
        bench.add([1] * refused, max_new_tokens=max_new_tokens)
    assert not bench.engine.has_work
    id = bench.add([1] * (refused - 1), max_new_tokens=max_new_tokens)
    bench.drain()
    assert len(bench.tokens[id]) == max_new_tokens


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("limits", [{"num_pages": 20}, {"num_pages": 100, "max_tokens": 40}])
def test_a_sequence_that_outgrows_the_pool_ends_with_length(
    pool: str, limits: dict[str, int]
) -> None:
    """40 rows hold the prompt and all tokens but the last; others are not pre-empted in vain."""
    bench = Bench(pool=pool, **limits)
    first = bench.add([1] * 5, max_new_tokens=1000, ignore_eos=True)
    bench.drain()
    params = SamplingParams(max_new_tokens=bench.pool.capacity() - 4, ignore_eos=True)
    assert bench.ended[first].finish_reason == "length"
    assert bench.tokens[first] == reference([1] * 5, params)
    assert bench.scheduler.num_preemptions == 0


def test_one_that_reaches_the_longest_length_does_not_preempt_the_others() -> None:
    bench = Bench(100, max_tokens=40)
    long = bench.add([1] * 30, max_new_tokens=1000, ignore_eos=True)
    short = bench.add([2] * 3, max_new_tokens=30, ignore_eos=True)
    bench.drain()
    assert (len(bench.tokens[long]), len(bench.tokens[short])) == (11, 30)
    assert bench.scheduler.num_preemptions == 0


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    bench = Bench(16, num_slots=3, headroom=0)
    ids = [bench.add([i + 1] * 8, max_new_tokens=14, ignore_eos=True) for i in range(4)]
    while bench.engine.has_work:
        bench.step()
        order = [s.id for s in (*bench.scheduler.running, *bench.scheduler.waiting)]
        assert order == sorted(order)
    starts = [id for batch in bench.runner.batches for id, start, _ in batch if start == 0]
    assert starts.count(ids[0]) == 1 and len(starts) == 4 + bench.scheduler.num_preemptions > 5
    assert list(bench.ended) == ids


def test_headroom_lets_an_admitted_sequence_get_somewhere() -> None:
    """All that run can grow by `headroom` tokens, so none is pre-empted sooner than that."""
    headroom = 10
    bench = Bench(40, headroom=headroom, chunk=64)
    for i in range(8):
        bench.add([i + 1] * 9, max_new_tokens=40, ignore_eos=True)
    bench.drain()
    assert bench.scheduler.num_preemptions
    runs: dict[int, list[int]] = {}
    for batch in bench.runner.batches:
        for id, start, _ in batch:
            if start == 0:
                runs.setdefault(id, []).append(0)
            runs[id][-1] += 1
    assert min(steps for found in runs.values() for steps in found[:-1]) >= headroom


def test_cancel_returns_pages() -> None:
    bench = Bench(20, num_slots=2)
    ids = [bench.add([i + 1] * 9, max_new_tokens=20, ignore_eos=True) for i in range(3)]
    bench.step()  # 0 and 1 prefill, 2 waits
    used = bench.pool.used_bytes
    assert bench.engine.cancel(ids[1]) and bench.pool.used_bytes < used
    assert bench.engine.cancel(ids[2])
    assert not bench.engine.cancel(ids[2]) and not bench.engine.cancel(99)
    bench.check()
    ended = {x.id for x in bench.step() if x.finish_reason == "cancelled"}
    assert ended == {ids[1], ids[2]}
    bench.drain()
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    assert bench.tokens[ids[0]] == reference([1] * 9, params)
    assert not bench.engine.cancel(ids[0])


# Failures ---------------------------------------------------------------------------------------


def started(bench: Bench) -> tuple[list[int], int]:
    """Two requests that run and one that waits."""
    ids = [bench.add([i + 1] * 5, max_new_tokens=9, ignore_eos=True) for i in range(3)]
    bench.step()
    return ids[:2], ids[2]


def test_a_failing_batch_ends_its_requests_only() -> None:
    bench = Bench(num_slots=2)
    batch, waiting = started(bench)
    bench.runner.fail = RuntimeError("out of memory")
    outputs = bench.step()
    assert [(x.id, x.finish_reason, x.error) for x in outputs] == [
        (id, "error", "RuntimeError: out of memory") for id in batch
    ]
    assert bench.pool.used_bytes == 0
    bench.drain()
    assert bench.tokens[waiting] == reference(
        [3] * 5, SamplingParams(max_new_tokens=9, ignore_eos=True)
    )


@pytest.mark.parametrize("error", [AssertionError("bug"), KeyboardInterrupt()])
def test_bugs_and_interrupts_are_raised_again(error: BaseException) -> None:
    bench = Bench(num_slots=2)
    batch, waiting = started(bench)
    bench.runner.fail = error
    with pytest.raises(type(error)):
        bench.step()
    bench.check()
    assert bench.pool.used_bytes == 0
    ended = {x.id: x.finish_reason for x in bench.step() if x.finish_reason}
    assert ended == dict.fromkeys(batch, "error")
    bench.drain()
    assert bench.ended[waiting].finish_reason == "length"


def test_a_failing_compression_ends_whom_it_compressed() -> None:
    bench = Bench(chunk=64)
    victim = bench.add([1] * 20, CacheParams(max_cache_tokens=8), ignore_eos=True)
    other = bench.add([2] * 20, max_new_tokens=9, ignore_eos=True)
    bench.step()
    bench.runner.fail = RuntimeError("no kernel")
    bench.drain()
    assert bench.ended[victim].error == "RuntimeError: no kernel"
    assert len(bench.tokens[other]) == 9


def test_nan_logits_end_one_request() -> None:
    bench = Bench()
    ids = [bench.add([i + 1] * 5, max_new_tokens=9, ignore_eos=True) for i in range(3)]
    bench.step()
    bench.runner.poisoned = {ids[1]}
    bench.drain()
    assert bench.ended[ids[1]].finish_reason == "error"
    assert "not finite" in bench.ended[ids[1]].error
    assert [len(bench.tokens[id]) for id in ids] == [9, 1, 9]


def test_a_failing_detokenizer_ends_one_request() -> None:
    def detokenize(ids: list[int]) -> str:
        return "".join("abcdefghijklmnopqrstuvwxyz:;"[i] for i in ids)

    bench = Bench(detokenize=detokenize)
    for i in range(6):
        bench.add([i + 1], max_new_tokens=30, ignore_eos=True)
    bench.drain()
    for id, end in bench.ended.items():
        beyond = [i for i, token in enumerate(bench.tokens[id]) if token > 27]
        assert (end.finish_reason == "error") == bool(beyond)
        whole = bench.tokens[id][: beyond[0]] if beyond else bench.tokens[id]
        assert bench.text[id] == detokenize(whole)
    assert {end.finish_reason for end in bench.ended.values()} == {"error", "length"}


# Hooks ------------------------------------------------------------------------------------------


class Recorder(Hooks):
    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.act: Callable[[int], object] = lambda id: None

    def on_request_init(self, sequence: sequences.Request) -> None:
        self.calls.append(("init", [sequence.id]))

    def on_context_step_end(self, pieces: Sequence[sequences.ScheduledChunk]) -> None:
        assert all(piece.request.slot is not None for piece in pieces)
        self.calls.append(("context", [piece.request.id for piece in pieces]))

    def on_generation_step_end(self, pieces: Sequence[sequences.ScheduledChunk]) -> None:
        assert all(piece.request.slot is not None for piece in pieces)
        self.calls.append(("generation", [piece.request.id for piece in pieces]))
        for piece in pieces:
            self.act(piece.request.id)

    def on_request_finish(self, sequence: sequences.Request) -> None:
        assert sequence.slot is None
        self.calls.append((sequence.finish_reason, [sequence.id]))


def test_hooks_are_called_in_order() -> None:
    hooks = Recorder()
    bench = Bench(hooks=hooks)
    bench.add([1] * 9, max_new_tokens=2, ignore_eos=True)
    bench.add([2] * 3, max_new_tokens=2, ignore_eos=True)
    bench.drain()
    assert hooks.calls == [
        ("init", [0]),
        ("init", [1]),
        ("context", [0, 1]),
        ("context", [0]),
        ("generation", [1]),
        ("length", [1]),
        ("generation", [0]),
        ("length", [0]),
    ]


def test_a_hook_may_cancel_and_may_fail() -> None:
    hooks = Recorder()
    bench = Bench(hooks=hooks)
    ids = [bench.add([i + 1] * 3, max_new_tokens=5, ignore_eos=True) for i in range(3)]
    hooks.act = lambda id: id == ids[1] and bench.engine.cancel(id)
    bench.drain()
    assert [bench.ended[id].finish_reason for id in ids] == ["length", "cancelled", "length"]
    assert [len(bench.tokens[id]) for id in ids] == [5, 1, 5]
    late = [bench.add([i], max_new_tokens=5, ignore_eos=True) for i in (1, 2)]
    hooks.act = lambda id: bench.engine.cancel(id) and 1 / 0
    bench.drain()
    assert bench.ended[late[0]].finish_reason == "cancelled"
    assert bench.ended[late[1]].error == "ZeroDivisionError: division by zero"


# Compression ------------------------------------------------------------------------------------

ONLY_BEFORE = Schedule(after_prefill=False, before_preempt=True)
NEVER = {"after_prefill": False, "before_preempt": False}


def evicting(bench: Bench, lengths: Sequence[int], budget: int = 8, new: int = 12) -> list[int]:
    cache = CacheParams(max_cache_tokens=budget)
    return [
        bench.add([i + 1] * length, cache, max_new_tokens=new, ignore_eos=True)
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_after_prefill_each_is_compressed_once(chunk: int) -> None:
    """Tokens then depend neither on the chunk nor on what else is served."""
    bench = Bench(chunk=chunk)
    evicting(bench, [20, 5, 30])
    plain = bench.add([9] * 20, max_new_tokens=12, ignore_eos=True)
    bench.drain()
    assert sorted(id for ids in bench.runner.rounds for id in ids) == [0, 2]
    for id, length in ((0, 20), (2, 30)):
        alone = Bench(chunk=64)
        alone.add(
            [id + 1] * length, CacheParams(max_cache_tokens=8), max_new_tokens=12, ignore_eos=True
        )
        assert bench.tokens[id] == alone.drain().tokens[0]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    assert bench.tokens[plain] == reference([9] * 20, params)
    assert bench.tokens[0] != reference([1] * 20, params)


def test_before_preempt_compression_spares_recomputation() -> None:
    def run(schedule: Schedule) -> Bench:
        bench = Bench(40, schedule=schedule)
        evicting(bench, [20, 20, 20], new=30)
        return bench.drain()

    assert run(Schedule(**NEVER)).scheduler.num_preemptions > 0
    bench = run(ONLY_BEFORE)
    assert bench.scheduler.num_preemptions == 0 and bench.runner.rounds


def test_compression_every_so_many_steps() -> None:
    bench = Bench(chunk=64, schedule=Schedule(every=5, **NEVER))
    evicting(bench, [20, 30], new=14)
    steps = []
    while bench.engine.has_work:
        bench.step()
        steps += [bench.scheduler.num_steps] * (len(bench.runner.rounds) > len(steps))
    assert steps == [5, 10]
    assert bench.runner.rounds == [[0, 1], [0, 1]]


def test_compression_after_so_many_uncompressed_tokens() -> None:
    """50 tokens after the prompts: at once; then two more a step."""
    bench = Bench(chunk=64, schedule=Schedule(uncompressed=50, **NEVER))
    evicting(bench, [20, 30], new=60)
    steps = []
    while bench.engine.has_work:
        bench.step()
        steps += [bench.scheduler.num_steps] * (len(bench.runner.rounds) > len(steps))
    assert steps == [2, 27, 52]


def test_capped_rounds_take_the_never_compressed_first() -> None:
    """24 + 20 rows in two groups are the most of a round; the rest follows, step by step."""
    bench = Bench(chunk=64, schedule=Schedule(max_compressed_rows=88, every=8))
    evicting(bench, [24, 20, 60, 9], new=28)
    bench.drain()
    assert bench.runner.rounds[:3] == [[0, 1], [2], [3]]
    # Steps 8, 16 and 24: least recently compressed first.
    assert bench.runner.rounds[3:] == [[0, 1], [2, 3], [0]]


def test_one_longer_than_the_pool_by_eviction_ends_when_it_would_be_preempted() -> None:
    """Its tokens cannot be prefilled again. The other one, older or younger, is not affected."""
    bench = Bench(12, headroom=0, schedule=Schedule(before_preempt=False, every=1))
    (grown,) = evicting(bench, [8], new=200)
    for _ in range(60):
        bench.step()
    assert len(bench.tokens[grown]) > bench.pool.capacity()
    other = bench.add([5] * 8, max_new_tokens=14, ignore_eos=True)
    bench.drain()
    params = SamplingParams(max_new_tokens=14, ignore_eos=True)
    assert bench.tokens[other] == reference([5] * 8, params)
    assert bench.ended[grown].finish_reason == "length"


def test_one_that_can_be_recomputed_is_preempted_before_one_that_cannot() -> None:
    """The younger keeps few rows of more tokens than the pool holds; pre-empted, it would end."""
    bench = Bench(40, chunk=64, schedule=Schedule(before_preempt=False, every=1))
    old = bench.add([1] * 4, max_new_tokens=76, ignore_eos=True)
    (young,) = evicting(bench, [60], new=100)
    bench.drain()
    assert bench.scheduler.num_preemptions == 1
    assert bench.tokens[old] == reference(
        [1] * 4, SamplingParams(max_new_tokens=76, ignore_eos=True)
    )
    assert len(bench.tokens[young]) == 100


def test_recomputed_after_eviction_it_is_compressed_again() -> None:
    bench = Bench(40, schedule=Schedule(before_preempt=False))
    evicting(bench, [20, 20, 20, 20], new=40)
    bench.drain()
    assert bench.scheduler.num_preemptions > 0
    assert all(len(tokens) == 40 for tokens in bench.tokens.values())
    again = Counter(id for ids in bench.runner.rounds for id in ids)
    assert sum(again.values()) >= 4 + bench.scheduler.num_preemptions - 1


# Stop strings -----------------------------------------------------------------------------------

PIECES = ["a", "b", "ab", "ba", "abc", "c", "", "é"[:1], "\N{FIRE}"]


def by_character(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text as it is when a stop string is complete for the first time."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], True
    return text, False


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=14),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_across_tokens(ids: list[int], stops: list[str]) -> None:
    def detokenize(part: list[int]) -> str:
        return "".join(PIECES[i] for i in part)

    stream, shown, stopped = TextStream(detokenize, tuple(stops)), "", False
    for token in ids:
        stopped = stream.push(token)
        shown += stream.take(last=False)
        if stopped:
            break
    wanted, found = by_character(detokenize(ids), stops)
    assert wanted.startswith(shown)
    assert (shown + stream.take(last=True), stopped) == (wanted, found)


def test_text_is_streamed_as_soon_as_it_is_safe() -> None:
    words = ["Hel", "lo E", "N", "D", "o E", "ND."]
    stream = TextStream(lambda ids: "".join(words[i] for i in ids), ("END.", "STOP"))
    shown = []
    for token in range(6):
        stopped = stream.push(token)
        shown.append(stream.take(last=stopped))
    assert shown == ["Hel", "lo ", "", "", "ENDo ", ""]
    assert stopped and stream.text == "Hello ENDo "


def test_half_a_character_is_not_shown() -> None:
    raw = "aé🔥b".encode()
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), ())
    shown = []
    for byte in raw:
        stream.push(byte)
        shown.append(stream.take(last=False))
    assert shown == ["a", "", "é", "", "", "", "🔥", "b"]
    stream.push(raw[1])
    assert stream.take(last=False) == ""
    assert stream.take(last=True) == "\N{REPLACEMENT CHARACTER}"


def test_stop_strings_end_a_request() -> None:
    def detokenize(ids: list[int]) -> str:
        return "".join(f"{i:02d}" for i in ids)

    bench = Bench(detokenize=detokenize)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    text = detokenize(reference([7], params))
    stop = text[13:18]  # begins inside a token, ends inside another
    where = text.index(stop)
    id = bench.add([7], max_new_tokens=30, ignore_eos=True, stop=(stop, "never"))
    other = bench.add([7], max_new_tokens=30, ignore_eos=True)
    bench.drain()
    assert bench.text[id] == text[:where] and bench.text[other] == text
    assert bench.ended[id].finish_reason == "stop"
    assert len(bench.tokens[id]) == -(-(where + 5) // 2)


def test_eos_never_becomes_text() -> None:
    bench = Bench(detokenize=lambda ids: "".join(chr(97 + i) for i in ids))
    prompt = next([i] for i in range(VOCAB) if EOS in reference([i], SamplingParams()))
    id = bench.add(prompt)
    bench.drain()
    assert len(bench.text[id]) == len(bench.tokens[id]) - 1


# Mistakes ---------------------------------------------------------------------------------------


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"prompt_ids must hold at least 1 token"):
        Bench().add([])
    with pytest.raises(ValueError, match=r"stop must be empty .* got \('x',\)"):
        Bench().add([1], stop=("x",))
    with pytest.raises(ValueError, match=r"max_batch_tokens .* num_slots=4.* got 3"):
        Bench(max_batch_tokens=3)
    with pytest.raises(ValueError, match=r"chunk .* got 0"):
        Bench(chunk=0)
    with pytest.raises(ValueError, match=r"every must be at least 1.* got 0"):
        Schedule(every=0)
    for wrong in ({"max_cache_tokens": 0}, {"keep_tokens": 1.5}, {"protected": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CacheParams(**wrong)
    with pytest.raises(ValueError, match="give one"):
        CacheParams(max_cache_tokens=8, keep_tokens=0.5)
    with pytest.raises(ValueError, match="protected must be at most max_cache_tokens=8; got 9"):
        CacheParams(max_cache_tokens=8, protected=9)


# Random events ----------------------------------------------------------------------------------


class Events:
    """Random requests, steps, cancels and failures; every end is checked against the reference."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.requests: dict[int, tuple[list[int], SamplingParams, CacheParams]] = {}
        self.checked: set[int] = set()

    def add(self, prompt: list[int], params: SamplingParams, cache: CacheParams) -> None:
        self.requests[self.bench.engine.add(prompt, params, cache)] = (prompt, params, cache)

    def cancel(self, which: int) -> None:
        if alive := sorted(self.bench.engine._requests):
            self.bench.engine.cancel(alive[which % len(alive)])

    def step(self) -> None:
        for output in self.bench.step():
            if output.finish_reason:
                self.check_end(output.id)

    def check_end(self, id: int) -> None:
        self.checked.add(id)
        prompt, params, cache = self.requests[id]
        tokens, reason = self.bench.tokens[id], self.bench.ended[id].finish_reason
        if cache.max_cache_tokens is not None:
            assert len(tokens) <= params.max_new_tokens
            return
        wanted = reference(prompt, params)
        assert tokens == wanted[: len(tokens)]
        full = len(prompt) + len(tokens) > self.bench.pool.capacity()
        if reason == "stop" or (reason == "length" and not full):
            assert tokens == wanted

    def finish(self) -> None:
        self.bench.drain()
        for id in set(self.bench.ended) - self.checked:
            self.check_end(id)
        assert self.bench.ended.keys() == self.requests.keys()


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)
samplings = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 9),
    ignore_eos=st.booleans(),
)
caches = st.builds(CacheParams, max_cache_tokens=st.sampled_from([None, None, 4, 10]))
schedules = st.builds(
    Schedule,
    after_prefill=st.booleans(),
    before_preempt=st.booleans(),
    every=st.sampled_from([None, 3]),
    uncompressed=st.sampled_from([None, 20]),
    max_compressed_rows=st.sampled_from([None, 30]),
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.sampled_from([24, 40]),
        chunk=st.sampled_from([1, 7, 64]),
        headroom=st.sampled_from([0, 5]),
        schedule=schedules,
    )
    def start(self, num_pages: int, chunk: int, headroom: int, schedule: Schedule) -> None:
        self.bench = Bench(
            num_pages,
            pool="real",
            num_slots=3,
            max_tokens=60,
            chunk=chunk,
            max_batch_tokens=24,
            headroom=headroom,
            schedule=schedule,
        )
        self.events = Events(self.bench)

    @rule(prompt=prompts, params=samplings, cache=caches)
    def add(self, prompt: list[int], params: SamplingParams, cache: CacheParams) -> None:
        self.events.add(prompt, params, cache)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.events.step()

    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        self.events.cancel(which)

    @rule(what=st.sampled_from(["fail", "nan", "compress"]), which=st.integers(0, 20))
    def disturb(self, what: str, which: int) -> None:
        if what == "fail":
            self.bench.runner.fail = RuntimeError("stub")
        elif what == "nan":
            self.bench.runner.poisoned.add(which)
        else:
            over = self.bench.scheduler._compressible(self.bench.scheduler.running)
            self.bench.scheduler._compress(over)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check()

    def teardown(self) -> None:
        if hasattr(self, "events"):
            self.events.finish()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_many_random_events() -> None:
    """20,000 of them. About one in ten adds a request, and pages are short most of the time."""
    rng = random.Random(1)
    bench = Bench(40, num_slots=5, max_tokens=70, schedule=Schedule(max_compressed_rows=60))
    events, requests = Events(bench), mixed_requests(300)
    for i in range(20_000):
        chance = rng.random()
        if chance < 0.1 and len(bench.engine._requests) < 12:
            limits = CacheParams(max_cache_tokens=rng.choice([None, None, 6, 12]))
            events.add(*rng.choice(requests), limits)
        elif chance < 0.13:
            events.cancel(rng.randrange(20))
        elif chance < 0.133:
            bench.runner.fail = RuntimeError("stub")
        else:
            events.step()
        if i % 4 == 0:
            bench.check()
    events.finish()
    assert bench.scheduler.num_preemptions > 50
    assert Counter(x.finish_reason for x in bench.ended.values()).keys() == {
        "stop",
        "length",
        "cancelled",
        "error",
    }
