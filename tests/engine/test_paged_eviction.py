"""After eviction the engine computes what a dense model with those pairs masked does."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvfold.cache.eviction import policies
from kvfold.config import CacheConfig
from kvfold.engine.requests.request import CacheParams
from kvfold.engine.runner import eviction
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation.paged import PagedSession
from kvfold.models.folded import attention_windows
from matrix import matrix, slow
from models import CONFIGS, SERVED, tiny, tokens
from paged_eviction_cases import LONG, MORE, PAGE, PROMPT, dense, filled, survivors
from steps import logits_of
from tolerance import assert_same_logits

pytestmark = pytest.mark.gpu

FAMILIES = [name for name, of in CONFIGS.items() if not any(attention_windows(of()))]


def runner_of(model, evict: str, keep: float, **settings):
    config = CacheConfig(kv_bytes=2**22, page=PAGE, evict=evict, keep_tokens=keep, **settings)
    return build_runner(model, config, num_slots=4, max_tokens=128)


@pytest.mark.parametrize(("name", "evict"), matrix(FAMILIES, SERVED, diagonals=2))
def test_logits_equal_a_masked_dense_model(name: str, evict: str) -> None:
    ids = tokens(1, PROMPT + MORE)
    runner = runner_of(tiny(name), evict, 0.5)
    with PagedSession(runner) as session:
        logits_of(session, ids[0, :PROMPT].tolist(), prompt=PROMPT, chunk=17)
        session.compress()
        runner.pool.check_integrity()
        kept = survivors(session)
        assert any(len(positions) < PROMPT for positions in kept)
        logits = [logits_of(session, ids[0, PROMPT : PROMPT + 5].tolist())]
        logits += [logits_of(session, [token]) for token in ids[0, PROMPT + 5 :].tolist()]
    wanted = dense(name, ids, kept, runner.pool.layout.groups)
    assert_same_logits(torch.cat(logits), wanted, runner.model.config, PROMPT + MORE)


@pytest.mark.parametrize(("count", "evict"), matrix([1, 3, 16], SERVED))
def test_budgets_are_exact_for_every_sequence(evict: str, count: int) -> None:
    model = tiny("llama-gqa")
    config = CacheConfig(kv_bytes=2**23, page=PAGE, evict=evict, keep_tokens=0.5)
    runner = build_runner(model, config, num_slots=count, max_tokens=160)
    sessions, budgets = [PagedSession(runner).__enter__() for _ in range(count)], []
    for i, session in enumerate(sessions):
        length = LONG + 30 + 4 * i
        logits_of(session, tokens(1, length, seed=i)[0].tolist(), prompt=length)
        session.sequence.cache = CacheParams(max_cache_tokens=LONG + 4 * (i % 3))
        budgets.append((LONG + 4 * (i % 3)) // PAGE * len(runner.pool.layout.groups))
    runner.compress([session.sequence for session in sessions])
    runner.pool.check_integrity()
    for session, budget in zip(sessions, budgets, strict=True):
        rows = runner.pool.host_lengths[session.sequence.slot]
        assert (-(-rows // PAGE)).sum() == budget


@pytest.mark.parametrize("evict", [x if i % 3 == 0 else slow(x) for i, x in enumerate(SERVED)])
def test_how_many_go_at_once_does_not_matter(evict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, two by two, all: twice, so that most are out of order the second time."""
    lengths, found = [44, 50, 71, 62, 48], []
    for most in (1, 2 * 62 * 4, 1 << 23):
        monkeypatch.setattr(eviction, "MAX_ENTRIES", most)
        runner, sessions = filled(evict, lengths)
        for first in (1, 0):
            runner.compress([session.sequence for session in sessions[first:]])
            runner.pool.check_integrity()
            found.append([survivors(session) for session in sessions])
            for session in sessions:
                logits_of(session, [1, 2, 3])
                session.sequence.cache = replace(session.sequence.cache, max_cache_tokens=20)
    assert found[:2] == found[2:4] == found[4:]
    assert found[0] != found[1]


def test_an_edited_policy_observes_and_evicts() -> None:
    edited = policies.get("kvc-full").changed(power=1)
    config, model = CacheConfig(evict="kv-compress", keep_tokens=0.5), tiny("llama-gqa")
    runner = build_runner(model, config, num_slots=1, max_tokens=64, policy=edited)
    assert runner.policy is runner.eviction.policy is edited
    assert runner.attention.view.observing.scorer is edited.scorer


def test_nothing_to_compress() -> None:
    runner, sessions = filled("kv-compress", [44])
    runner.compress([])
    runner.eviction.cache = sessions[0].sequence.cache = CacheParams()
    runner.compress([session.sequence for session in sessions])
    assert (runner.pool.host_lengths == 44).all()


def test_sequences_share_every_operation() -> None:
    """Nothing is launched, or waited for, once a sequence."""

    class Count(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.total += 1
            return func(*args, **(kwargs or {}))

    totals = []
    for lengths in ([60, 61], [60, 61, 62, 63]):
        runner, sessions = filled("kv-compress", lengths)
        Count.total = 0
        with Count():
            runner.compress([session.sequence for session in sessions])
        totals.append(Count.total)
    assert totals[0] == totals[1]


def test_bytes_that_are_reported_are_bytes_that_are_held() -> None:
    runner = runner_of(tiny("llama-gqa"), "kv-compress", 0.5, bits=4)
    with PagedSession(runner) as session:
        logits_of(session, tokens(1, 64)[0].tolist(), prompt=64)
        assert session.footprint().kept_fraction == pytest.approx(runner.pool.layout.kept_fraction)
        session.compress()
        held = session.footprint()
        assert held.cache_bytes == runner.pool.stats().used_bytes
        assert held.kept_fraction == pytest.approx(0.5 * runner.pool.layout.kept_fraction)
        assert held.kept_fraction < held.pool_fraction
    assert runner.pool.stats().used_bytes == 0


def test_pages_are_as_published_unless_told_otherwise() -> None:
    found = {}
    for evict, page in (("kvc-w8", None), ("kvc-w8", 8), ("kv-compress", None)):
        config = CacheConfig(kv_bytes=2**22, page=page, evict=evict, keep_tokens=0.5)
        runner = build_runner(tiny("llama-gqa"), config, num_slots=1, max_tokens=64)
        found[evict, page] = runner.pool.layout.page
    assert list(found.values()) == [16, 8, 32]


def test_half_of_the_budget_is_recent_by_h2o() -> None:
    """60 tokens, of which 28 may stay (in pages of 4): the last 14 do, in every group."""
    runner = runner_of(tiny("llama-gqa"), "h2o", 28 / PROMPT)
    with PagedSession(runner) as session:
        logits_of(session, tokens(1, PROMPT)[0].tolist(), prompt=PROMPT)
        session.compress()
        for positions in survivors(session):
            assert len(positions) == 28 and positions[-14:] == list(range(PROMPT - 14, PROMPT))
