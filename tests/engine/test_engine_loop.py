"""The engine's loop with a stub model: what it serves, in which order, and what it keeps."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine_loop_cases import Events
from kvfold.engine.core.compression import Schedule
from kvfold.engine.core.engine import Hooks
from kvfold.engine.requests import request as sequences
from kvfold.engine.requests.request import CacheParams, SamplingParams
from stub import EOS, PAGE, POOLS, VOCAB, Bench, StubRunner, mixed_requests, reference

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
        assert bench.ended[id].finish_reason == ("eos" if stopped else "length")
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
    assert tokens[-1] == EOS and bench.ended[plain].finish_reason == "eos"
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


def test_where_nobody_decodes_a_chunk_is_all_of_a_step() -> None:
    bench = Bench(chunk=10, max_batch_tokens=32)
    bench.runner.supports_long_chunks = True
    for length in (40, 45):
        bench.add([1] * length, max_new_tokens=3, ignore_eos=True)
    bench.drain()
    assert bench.runner.batches[:4] == [
        [(0, 0, 32)],
        [(0, 32, 8), (1, 0, 24)],
        [(0, 40, 1), (1, 24, 10)],
        [(0, 41, 1), (1, 34, 10)],
    ]
    for id, length in enumerate((40, 45)):
        assert bench.tokens[id] == reference([1] * length, SamplingParams(max_new_tokens=3))


# Room ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_new_tokens", "refused"), [(1, 41), (2, 40)])
def test_a_prompt_that_can_never_fit_is_refused_with_numbers(
    max_new_tokens: int, refused: int
) -> None:
    bench = Bench(20)
    with pytest.raises(ValueError, match=r"20 bytes holds 40 tokens .* with 41: use 22 bytes"):
        bench.add([1] * refused, max_new_tokens=max_new_tokens)
    assert not bench.engine.has_work
    id = bench.add([1] * (refused - 1), max_new_tokens=max_new_tokens)
    bench.drain()
    assert len(bench.tokens[id]) == max_new_tokens


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"num_pages": 20}, "pool"), ({"num_pages": 100, "max_tokens": 40}, "length")],
)
def test_a_sequence_that_outgrows_the_pool_ends_and_says_of_what(
    pool: str, limits: dict[str, int], reason: str
) -> None:
    """40 rows hold the prompt and all tokens but the last; others are not pre-empted in vain."""
    bench = Bench(pool=pool, **limits)
    first = bench.add([1] * 5, max_new_tokens=1000, ignore_eos=True)
    bench.drain()
    params = SamplingParams(max_new_tokens=bench.pool.capacity() - 4, ignore_eos=True)
    assert bench.ended[first].finish_reason == reason
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


# Order -------------------------------------------------------------------------------------------


def test_all_that_fit_are_admitted_at_once() -> None:
    bench = Bench(1000, num_slots=200, max_batch_tokens=400, chunk=64)
    for i in range(250):
        bench.add([i % 20 + 1] * 2, max_new_tokens=2, ignore_eos=True)
    bench.step()
    assert len(bench.runner.batches[0]) == 200
    bench.drain()


def test_a_small_request_does_not_wait_behind_one_without_pages() -> None:
    bench = Bench(40, headroom=0, chunk=64)
    bench.add([1] * 60, max_new_tokens=20, ignore_eos=True)
    large = bench.add([2] * 60, max_new_tokens=5, ignore_eos=True)
    small = bench.add([3] * 3, max_new_tokens=2, ignore_eos=True)
    bench.step()
    bench.step()
    assert small in bench.ended and large not in bench.ended
    bench.drain()
    assert bench.tokens[large] == reference(
        [2] * 60, SamplingParams(max_new_tokens=5, ignore_eos=True)
    )


def test_one_without_pages_is_overtaken_by_as_many_rows_as_it_needs() -> None:
    """64 rows wait, and 16 x 4 pass; the rest comes after it, however many they are."""
    bench = Bench(40, headroom=0, chunk=64)
    bench.add([1] * 60, max_new_tokens=80, ignore_eos=True)
    large = bench.add([2] * 60, max_new_tokens=5, ignore_eos=True)
    small = [bench.add([3] * 3, max_new_tokens=2, ignore_eos=True) for _ in range(40)]
    bench.drain()
    starts = [id for batch in bench.runner.batches for id, start, _ in batch if start == 0]
    assert starts.index(large) == 1 + 16
    assert len(bench.ended) == 2 + len(small)


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


@pytest.mark.parametrize("chunk", [1, 8, 11, 64])
def test_what_is_looked_at_together_comes_together(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks end at multiples of `prefill_multiple`, or with their prompt, whatever else is served;
    and nobody waits for ever."""
    monkeypatch.setattr(StubRunner, "prefill_multiple", 8)
    bench = Bench(200, chunk=max(chunk // 8, 1) * 8, max_batch_tokens=30, num_slots=6)
    lengths = [30, 5, 8, 41, 16, 9, 1]
    for i, length in enumerate(lengths):
        bench.add([i + 1] * length, max_new_tokens=5 + i, ignore_eos=True)
        bench.step()
    bench.drain()
    for id, start, count in (x for batch in bench.runner.batches for x in batch):
        if start < lengths[id]:
            assert start + count == lengths[id] or (start + count) % 8 == 0
    for i, length in enumerate(lengths):
        params = SamplingParams(max_new_tokens=5 + i, ignore_eos=True)
        assert bench.tokens[i] == reference([i + 1] * length, params)


# Contexts that are read again ---------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True])
def test_others_decode_while_a_context_is_read_again(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece a step; whose rows are read waits, and its tokens are those it gets alone."""
    monkeypatch.setattr(StubRunner, "piece", 6)
    bench = Bench(chunk=64, ahead=ahead)
    plain = bench.add([9] * 5, max_new_tokens=30, ignore_eos=True)
    bench.step()
    (id,) = evicting(bench, [20], new=12)
    while not bench.tokens.get(id):
        bench.step()
    told = len(bench.tokens[plain])
    while len(bench.runner.pieces) < 4:
        bench.step()
    assert bench.runner.pieces == [(id, end) for end in (6, 12, 18, 20)]
    assert bench.runner.rounds == [[id]]  # with the last piece
    assert len(bench.tokens[plain]) == told + 4 and len(bench.tokens[id]) == 2
    bench.drain()
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    assert bench.tokens[plain] == reference([9] * 5, params)
    alone = Bench(chunk=64)
    (other,) = evicting(alone, [20], new=12)
    assert bench.tokens[id] == alone.drain().tokens[other]


def test_two_are_read_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StubRunner, "piece", 6)
    bench = Bench(chunk=64)
    evicting(bench, [14, 20, 10])
    bench.step()
    bench.step()
    assert bench.scheduler.compressions.rescoring and bench.scheduler.running[0].id == 0
    bench.engine.cancel(0)  # in the middle of it
    bench.runner.culprits.add(1)
    bench.drain()
    assert [x.finish_reason for _, x in sorted(bench.ended.items())] == [
        "cancelled",
        "error",
        "length",
    ]
    assert [x for x in bench.runner.pieces if x[0] == 2] == [(2, 6), (2, 10)]


def test_where_pages_are_short_nobody_waits_for_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StubRunner, "piece", 3)
    bench = Bench(40, schedule=ONLY_BEFORE)
    evicting(bench, [20, 20, 20], new=30)
    bench.drain()
    assert bench.scheduler.num_preemptions == 0 and bench.runner.rounds and bench.runner.pieces


def test_one_that_pages_forced_through_its_reading_goes_on_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StubRunner, "piece", 3)
    bench = Bench(27, chunk=64, headroom=0)
    (id,) = evicting(bench, [20], new=9)
    bench.add([9] * 30, max_new_tokens=6, ignore_eos=True)
    while not bench.runner.rounds:
        bench.step()
    assert bench.scheduler.num_steps < 20 / 3, "it is read to its end before its turn"
    assert not bench.scheduler.compressions.rescoring and len(bench.tokens[id]) == 2
    bench.drain()
    assert bench.scheduler.num_preemptions == 0 and bench.runner.rounds == [[id]]


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


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_is_compressed_every_so_many_tokens_of_its_own(ahead: bool) -> None:
    """Whatever the others are: then its tokens are those that it gets alone."""

    def run(others: int, every: int | None) -> Bench:
        bench = Bench(chunk=64, num_slots=6, ahead=ahead)
        cache = CacheParams(max_cache_tokens=8, every=every)
        bench.add([1] * 20, cache, max_new_tokens=20, ignore_eos=True)
        for i in range(others):
            bench.step()
            evicting(bench, [12 + i], new=9)
        return bench.drain()

    alone, beside, once = run(0, 6), run(3, 6), run(0, None)
    assert [x for x in alone.runner.rounds if 0 in x] == [[0]] * 4  # at 20, 26, 32 and 38 tokens
    assert sum(0 in x for x in beside.runner.rounds) == 4
    assert alone.tokens[0] == beside.tokens[0] != once.tokens[0]
    assert once.runner.rounds == [[0]]
    assert not ahead or alone.runner.num_ahead > 8


def test_within_its_budget_a_request_is_left_alone_until_it_is_over() -> None:
    bench, cache = Bench(chunk=64), CacheParams(max_cache_tokens=16, every=4)
    bench.add([1] * 10, cache, max_new_tokens=20, ignore_eos=True)
    lengths = []
    while bench.engine.has_work:
        bench.step()
        lengths.append(int(bench.pool.host_lengths.max()))
    assert max(lengths) <= 16 + 4 + PAGE and bench.runner.rounds == [[0]] * 3


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
    bench = Bench(chunk=64, schedule=Schedule(max_compressed_entries=88, every=8))
    evicting(bench, [24, 20, 60, 9], new=28)
    bench.drain()
    assert bench.runner.rounds[:3] == [[0, 1], [2], [3]]
    # Steps 8, 16 and 24: least recently compressed first.
    assert bench.runner.rounds[3:] == [[0, 1], [2, 3], [0]]


def test_others_are_let_in_every_so_many_steps() -> None:
    """All that wait by then at once; at once, too, where nobody would be held up."""
    bench = Bench(chunk=64, schedule=Schedule(admit_every=5))
    found, read = {}, []
    for step in range(1, 24):
        if step in (1, 3, 4, 14):
            found[step] = bench.add([5] * 4, max_new_tokens=9, ignore_eos=True)
        bench.step()
        read += [
            (step, ids) for ids in [[x[0] for x in bench.runner.batches[-1] if x[2] == 4]] if ids
        ]
    assert read == [(1, [found[1]]), (6, [found[3], found[4]]), (14, [found[14]])]
    bench.drain()


def test_one_longer_than_the_pool_by_eviction_is_not_preempted() -> None:
    """Its tokens cannot be prefilled again. The other one waits instead, and loses nothing."""
    bench = Bench(12, headroom=0, schedule=Schedule(before_preempt=False, every=1))
    (grown,) = evicting(bench, [8], new=200)
    for _ in range(60):
        bench.step()
    assert len(bench.tokens[grown]) > bench.pool.capacity()
    other = bench.add([5] * 8, max_new_tokens=14, ignore_eos=True)
    bench.drain()
    params = SamplingParams(max_new_tokens=14, ignore_eos=True)
    assert bench.tokens[other] == reference([5] * 8, params)
    assert bench.ended[grown].finish_reason == "length" and len(bench.tokens[grown]) == 200
    (large,) = evicting(bench, [8], budget=20, new=200)  # 20 and 24 rows are 11 of 12 pages
    bench.drain()
    assert bench.ended[large].finish_reason == "pool" and len(bench.tokens[large]) == 17


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


# Mistakes ---------------------------------------------------------------------------------------


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"prompt_ids must hold at least 1 token"):
        Bench().add([])
    with pytest.raises(ValueError, match=r"stop must be empty, .* got \('x',\)"):
        Bench().add([1], stop=("x",))
    with pytest.raises(ValueError, match=r"max_batch_tokens .* num_slots=4.* got 3"):
        Bench(max_batch_tokens=3)
    with pytest.raises(ValueError, match=r"chunk .* got 0"):
        Bench(chunk=0)
    with pytest.raises(ValueError, match=r"every must be at least 1.* got 0"):
        Schedule(every=0)
    for wrong in ({"max_cache_tokens": 0}, {"keep_tokens": 1.5}, {"protected": -1}, {"every": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CacheParams(**wrong)
    with pytest.raises(ValueError, match="give one"):
        CacheParams(max_cache_tokens=8, keep_tokens=0.5)
    with pytest.raises(ValueError, match="protected must be at most max_cache_tokens=8; got 9"):
        CacheParams(max_cache_tokens=8, protected=9)


# Random events ----------------------------------------------------------------------------------


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
    max_compressed_entries=st.sampled_from([None, 30]),
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

    @rule(what=st.sampled_from(["fail", "culprit", "nan", "compress"]), which=st.integers(0, 20))
    def disturb(self, what: str, which: int) -> None:
        if what == "fail":
            self.bench.runner.fail = RuntimeError("stub")
        elif what == "culprit":
            self.bench.runner.culprits.add(which)
        elif what == "nan":
            self.bench.runner.poisoned.add(which)
        else:
            scheduler = self.bench.scheduler
            scheduler.compressions.free_memory(scheduler.num_steps)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check()

    def teardown(self) -> None:
        if hasattr(self, "events"):
            self.events.finish()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("piece", [0, 4])
def test_many_random_events(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 of them. About one in ten adds a request, and pages are short most of the time."""
    monkeypatch.setattr(StubRunner, "piece", piece)
    rng = random.Random(1)
    bench = Bench(40, num_slots=5, max_tokens=70, schedule=Schedule(max_compressed_entries=60))
    events, requests = Events(bench), mixed_requests(300)
    for i in range(10_000):
        chance = rng.random()
        if chance < 0.1 and len(bench.engine._requests) < 12:
            most = rng.choice([None, None, 6, 12])
            limits = CacheParams(max_cache_tokens=most, every=most and rng.choice([None, 3]))
            events.add(*rng.choice(requests), limits)
        elif chance < 0.13:
            events.cancel(rng.randrange(20))
        elif chance < 0.133:
            bench.runner.culprits |= {rng.choice(list(bench.engine._requests) or [0])}
        else:
            events.step()
        if i % 4 == 0:
            bench.check()
    events.finish()
    assert bench.scheduler.num_preemptions > 50
    assert Counter(x.finish_reason for x in bench.ended.values()).keys() == {
        "eos",
        "length",
        "cancelled",
        "error",
    }
