"""Requests that begin alike: what one computed others take, and all have the same tokens."""

import random
from collections import Counter

import pytest

from engine_loop_cases import Events
from kvfold.cache.prefix import BlockHasher
from kvfold.engine.core.compression import Schedule
from kvfold.engine.requests.request import CacheParams, SamplingParams
from prefix_cases import shared_prompts
from stub import EOS, PAGE, Bench, reference

OFF = CacheParams(prefix_caching=False)
LONG = [1 + i % 7 for i in range(40)]
POOLS = ["shared", "tracked"]


def asked(new: int = 4) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True)


def computed(bench: Bench, id: int) -> int:
    """Tokens of a request that went through the model."""
    return sum(count for batch in bench.runner.batches for own, _, count in batch if own == id)


@pytest.mark.parametrize("pool", POOLS)
def test_what_another_computed_is_not_computed_again(pool: str) -> None:
    bench = Bench(pool=pool)
    first = bench.add(LONG, max_new_tokens=4, ignore_eos=True)
    bench.drain()
    second = bench.add([*LONG[:30], 9, 9], max_new_tokens=4, ignore_eos=True)
    third = bench.add(LONG, OFF, max_new_tokens=4, ignore_eos=True)
    bench.drain()
    assert computed(bench, first) == computed(bench, third) == 43
    assert computed(bench, second) == 32 - 28 + 3
    assert bench.tokens[first] == bench.tokens[third] == reference(LONG, asked())
    assert bench.tokens[second] == reference([*LONG[:30], 9, 9], asked())
    assert (bench.prefixes.num_queries, bench.prefixes.num_hits) == (72, 28)


@pytest.mark.parametrize("pool", POOLS)
def test_the_last_token_is_always_computed(pool: str) -> None:
    bench = Bench(pool=pool)
    prompt = LONG[: 5 * PAGE]
    ids = []
    for _ in range(2):
        ids.append(bench.add(prompt, max_new_tokens=3, ignore_eos=True))
        bench.drain()
    assert computed(bench, ids[1]) == PAGE + 2
    assert bench.tokens[ids[0]] == bench.tokens[ids[1]] == reference(prompt, asked(3))


@pytest.mark.parametrize("pool", POOLS)
def test_answers_are_prefixes_of_the_next_turn(pool: str) -> None:
    bench = Bench(pool=pool)
    first = bench.add(LONG[:10], max_new_tokens=19, ignore_eos=True)
    bench.drain()
    turn = [*LONG[:10], *bench.tokens[first], 5, 5]
    second = bench.add(turn, max_new_tokens=4, ignore_eos=True)
    bench.drain()
    assert computed(bench, second) == len(turn) - 28 + 3
    assert bench.tokens[second] == reference(turn, asked())


@pytest.mark.parametrize("pool", POOLS)
def test_those_that_come_together_compute_their_beginning_once(pool: str) -> None:
    """As n choices of one prompt do."""
    bench = Bench(pool=pool, chunk=8)
    ids = [bench.add(LONG, max_new_tokens=4, ignore_eos=True) for _ in range(3)]
    bench.drain()
    assert [computed(bench, id) for id in ids] == [43, 7, 7]
    assert all(bench.tokens[id] == reference(LONG, asked()) for id in ids)


def test_one_who_waits_for_another_goes_on_when_that_is_cancelled() -> None:
    bench = Bench(pool="shared", chunk=8)
    first, second = (bench.add(LONG, max_new_tokens=4, ignore_eos=True) for _ in range(2))
    bench.step()
    bench.engine.cancel(first)
    bench.drain()
    assert computed(bench, second) == 43 - 8
    assert bench.tokens[second] == reference(LONG, asked())


def test_readers_count_pages_once() -> None:
    bench = Bench(pool="shared", chunk=64)
    bench.add(LONG, max_new_tokens=30, ignore_eos=True)
    bench.step()
    alone = bench.pool.used_bytes
    bench.add([*LONG[:36], 3], max_new_tokens=30, ignore_eos=True)
    bench.step()
    pages = 2 * bench.pool.layout.page_bytes  # a page of each group for its end, and the other's
    assert bench.pool.used_bytes - alone == pages


def test_a_salt_keeps_strangers_apart() -> None:
    bench = Bench(pool="shared")
    ids = []
    for salt in (None, "a", "a"):
        ids.append(bench.add(LONG, CacheParams(cache_salt=salt), max_new_tokens=1))
        bench.drain()
    assert [computed(bench, id) for id in ids] == [40, 40, 4]


def test_a_preempted_request_takes_its_own_pages_back() -> None:
    bench = Bench(40, pool="shared", num_slots=2, chunk=64)
    ids = [bench.add([i + 1] * 20, max_new_tokens=50, ignore_eos=True) for i in range(2)]
    bench.drain()
    assert bench.scheduler.num_preemptions == 1
    for i, id in enumerate(ids):
        assert bench.tokens[id] == reference([i + 1] * 20, asked(50))
    again = sum(computed(bench, id) for id in ids) - 2 * 69
    assert 0 < again < 36  # of 40: the other one needed some of its pages


def test_evicted_requests_have_the_tokens_they_have_without() -> None:
    """Each is compressed once, after its prompt; others read that prompt uncompressed."""

    def run(caching: bool) -> dict[int, list[int]]:
        bench = Bench(pool="tracked", schedule=Schedule(before_preempt=False))
        cache = CacheParams(max_cache_tokens=8, prefix_caching=caching)
        for end in range(6):
            bench.add([*LONG[: 20 + 3 * end], end], cache, max_new_tokens=12, ignore_eos=True)
            for _ in range(3):
                bench.step()
        bench.drain()
        assert bench.scheduler.compressions.num_done == 6
        assert (bench.prefixes.num_hits > 80) == caching
        return bench.tokens

    assert run(True) == run(False)


def test_names_depend_on_all_tokens_before() -> None:
    tokens = list(range(40))
    names = BlockHasher(4).hashes(tokens, 0, 10)
    assert len(set(names)) == 10 and names == BlockHasher(4).hashes(tokens, 0, 10)
    assert BlockHasher(4).hashes([9, *tokens[1:]], 0, 10)[5] not in names
    assert BlockHasher(4, "salt").hashes(tokens, 0, 1) != names[:1]
    one = BlockHasher(4)
    assert one.hashes(tokens, 0, 3) + one.hashes(tokens, 3, 10) == names


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    "events", [1_000, pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.slow])]
)
def test_many_random_events(events: int, pool: str) -> None:
    """Pages are short most of the time; every end is checked against the reference."""
    rng = random.Random(1)
    schedule = Schedule(max_compressed_entries=60)
    bench = Bench(40, pool=pool, num_slots=5, max_tokens=70, schedule=schedule)
    requests, crowd = shared_prompts(200), Events(bench)
    budgets = [None, None, 6, 12] if pool == "tracked" else [None]
    for i in range(events):
        chance = rng.random()
        if chance < 0.1 and len(bench.engine._requests) < 12:
            caching = rng.random() < 0.9
            cache = CacheParams(max_cache_tokens=rng.choice(budgets), prefix_caching=caching)
            crowd.add(*rng.choice(requests), cache)
        elif chance < 0.13:
            crowd.cancel(rng.randrange(20))
        elif chance < 0.133:
            bench.runner.culprits |= {rng.choice(list(bench.engine._requests) or [0])}
        elif chance < 0.134:
            bench.runner.fail = RuntimeError("once")
        else:
            crowd.step()
        if i % 8 == 0:
            bench.check()
    crowd.finish()
    assert not bench.prefixes._in_progress
    assert bench.scheduler.num_preemptions > events / 1000
    assert bench.prefixes.num_hits > 0.1 * bench.prefixes.num_queries
    ends = Counter(x.finish_reason for x in bench.ended.values())
    assert {"eos", "length", "cancelled", "error"} <= ends.keys()
    bench.pool.drop_all()
    assert not sum(x.used_pages for x in bench.pool.stats().classes)


def test_after_an_interrupt_nothing_is_known() -> None:
    bench = Bench(pool="shared")
    id = bench.add(LONG, max_new_tokens=4, ignore_eos=True)
    for _ in range(3):
        bench.step()
    bench.runner.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        bench.step()
    assert bench.pool.evictable_bytes == 0
    bench.check()
    bench.drain()
    assert bench.tokens[id] == reference(LONG, asked()) and EOS not in LONG
