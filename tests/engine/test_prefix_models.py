"""Real models over shared prefixes: whatever the cache stores and evicts, tokens are the same."""

from functools import lru_cache

import pytest

from fuzz_cases import model_of, same_up_to_rounding
from kvfold import LLM, CacheParams, SamplingParams
from kvfold.cache.eviction import policies
from kvfold.cache.eviction.policies import POLICIES, get
from kvfold.engine.core.prefix_cache import PrefixCache, unsupported_reason
from kvfold.utils.errors import SettingError
from models import SERVED, tiny, tokens

STEM = tokens(1, 70, seed=3)[0].tolist()
PROMPTS = [[*STEM[:n], *tokens(1, more, seed=n)[0].tolist()] for n, more in ((70, 9), (64, 30))]
PROMPTS += [STEM, STEM, [*STEM, 7]]
ASKED = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=5)
OFF = CacheParams(prefix_caching=False)
MODELS = {
    "plain": (("llama-gqa", None), {}),
    "4-bit": (("llama-gqa", None), {"bits": 4, "zeros": True}),
    "joint-latent": (("llama-gqa", "small"), {"bits": 8}),
    "tiers": (("llama-gqa", "fast"), {"bits": 3}),
    "one-row-pages": (("llama-gqa", None), {"page": 1}),
}


def llm_of(model: tuple[str, str | None], **settings) -> LLM:
    fixed = {"kv_bytes": 2**23, "page": 8, "max_sequences": 4, "max_tokens": 128, "chunk": 32}
    return LLM(model_of(*model), **{**fixed, **settings})


def both(llm: LLM, prompts: list[list[int]] = PROMPTS, together: bool = False) -> None:
    """Prompts with and without what others computed."""
    alone = [llm.generate([ids], ASKED, cache=OFF)[0] for ids in prompts]
    prefixes = llm.engine.scheduler.prefix_cache
    assert isinstance(prefixes, PrefixCache) and not prefixes.num_queries
    each = [prompts] if together else [[ids] for ids in prompts]
    found = [x for some in each for x in llm.generate(some, ASKED)]
    agreed = [same_up_to_rounding(*pair) for pair in zip(alone, found, strict=True)]
    assert sum(agreed) > 0.8 * 8 * len(prompts)
    assert prefixes.num_hits > 0.15 * prefixes.num_queries
    llm.runner.pool.check_integrity()
    assert llm.runner.pool.used_bytes == 0


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_the_same(name: str, together: bool) -> None:
    model, settings = MODELS[name]
    both(llm_of(model, **settings), together=together)


@lru_cache
def shareable() -> list[str]:
    pool = llm_of(("llama-gqa", None)).runner.pool
    drawn = {"random", "learned"}  # other rows for every request; not of these models
    return [
        x
        for x in POLICIES
        if x not in drawn and not unsupported_reason(pool, get(x), windows=False)
    ]


@pytest.mark.parametrize("policy", SERVED)
def test_evicted_tokens_are_the_same(policy: str) -> None:
    """Without rounding: scores that differ by it may evict others."""
    if policy not in shareable():
        pytest.skip("its prefixes are not shared, or it draws rows")
    both(llm_of(("llama-gqa", None), evict=policy, keep_tokens=0.6, page=8), PROMPTS[2:4])


def test_what_was_read_again_is_not_read_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full pieces, by readings that see nothing that follows: scores are the prefix's own."""
    policy = get("kvzip-past").changed(chunk=16)
    monkeypatch.setattr(policies, "get", {"kvzip-past": policy}.__getitem__)
    llm, read = llm_of(("llama-gqa", None), evict="kvzip-past", keep_tokens=0.4), []
    run = llm.runner.rescorer._rescore
    monkeypatch.setattr(
        llm.runner.rescorer, "_rescore", lambda x, y: read.append(y.start) or run(x, y)
    )
    alone = [llm.generate([ids], ASKED, cache=OFF)[0] for ids in PROMPTS]
    assert read.count(0) == len(PROMPTS)
    del read[:]
    pool, kept = llm.runner.pool, []
    score = pool.copy_scores
    monkeypatch.setattr(pool, "copy_scores", lambda slot, x: kept.append(len(x)) or score(slot, x))
    found = [llm.generate([ids], ASKED)[0] for ids in PROMPTS]
    together = llm.generate(PROMPTS, ASKED)
    for own in (found, together):
        assert [x.token_ids for x in own] == [x.token_ids for x in alone]
    assert max(kept) == 16 // pool.layout.page > 1, "blocks of a piece together"
    # 70 tokens in common: four pieces, the first three of which the second prompt of 64 takes.
    assert [read.count(x) for x in (0, 16, 32)] == [1, 1, 1] and read.count(48) <= 3
    llm.runner.pool.check_integrity()
    assert llm.runner.pool.used_bytes == 0


def test_a_piece_read_with_other_tokens_behind_is_read_again(monkeypatch) -> None:
    """The second prompt parts from the first within a piece, the third from the second behind it,
    the last from all in the same place as the second did."""
    policy = get("kvzip-past").changed(chunk=16)
    monkeypatch.setattr(policies, "get", {"kvzip-past": policy}.__getitem__)
    llm = llm_of(("llama-gqa", None), evict="kvzip-past", keep_tokens=0.4)
    ids = [tokens(1, 90, seed=i)[0].tolist() for i in range(4)]
    second = ids[0][:56] + ids[1][56:]
    prompts = [ids[0], second, second[:64] + ids[2][64:], ids[0][:56] + ids[3][56:], second]
    alone = [llm.generate([x], ASKED, cache=OFF)[0].token_ids for x in prompts]
    assert [llm.generate([x], ASKED)[0].token_ids for x in prompts] == alone
    llm.runner.pool.check_integrity()


@pytest.mark.parametrize("policy", ["keydiff", "snapkv-w8"])
def test_a_prefix_that_leaves_no_room_to_copy_it_is_computed_again(policy: str) -> None:
    """Two cached blocks are half of the pool, and a request takes more than the other half."""
    tight = {"max_tokens": 180, "page": 32, "bits": 2, "max_sequences": 2}
    llm = LLM(tiny("llama-gqa"), **tight, evict=policy, keep_tokens=1.0, kv_bytes=13632)
    prompt = [*STEM, *STEM[:50]]
    assert llm.runner.pool.capacity() < 64 + len(prompt)
    alone = llm.generate([prompt], ASKED, cache=OFF)[0]
    llm.generate([STEM], SamplingParams(max_new_tokens=1))
    for _ in range(2):  # the second one takes what the first one computed
        llm.add(prompt, ASKED)
        found = [token for _ in range(20) for x in llm.engine.step() for token in x.token_ids]
        assert found == list(alone.token_ids) and not llm.engine.has_work
    llm.runner.pool.check_integrity()


def test_most_policies_can_share() -> None:
    assert {"kv-compress", "kvzip", "snapkv", "keydiff", "streaming"} <= set(shareable())
    assert not {"h2o", "kvc-full"} & set(shareable())


def test_answers_begin_the_next_turn() -> None:
    llm = llm_of(("llama-gqa", None))
    first = llm.generate([STEM], ASKED)[0]
    turn = [*STEM, *first.token_ids, 5, 6]
    request, _ = llm.request(turn, ASKED, None)
    llm.engine.submit(request, deliver=lambda output: None)
    while llm.engine.has_work:
        llm.engine.step()
    assert request.num_cached == 72  # of 77 tokens computed before, pages of 8
    same_up_to_rounding(*(llm.generate([turn], ASKED, cache=x)[0] for x in (OFF, None)))


@pytest.mark.parametrize(
    ("model", "settings", "why"),
    [
        ("mistral-sliding", {}, "sliding window"),
        ("llama-gqa", {"bits": 4, "page": 16, "residual": 16}, "wait unquantised"),
        ("llama-gqa", {"bits": 4, "page": 32, "format": "kivi"}, "wait unquantised"),
        ("llama-gqa", {"evict": "h2o", "keep_tokens": 0.5}, "scores by all queries"),
    ],
)
def test_what_cannot_be_shared_is_refused_or_left_out(model: str, settings: dict, why: str) -> None:
    llm = LLM(tiny(model), kv_bytes=2**23, max_tokens=96, **settings)
    assert why in llm.shares_no_prefix
    ids = STEM[:40]
    found = [llm.generate([ids], ASKED)[0].token_ids for _ in range(2)]
    assert found[0] == found[1]
    with pytest.raises(SettingError, match=f"prefix_caching=True.*{why}"):
        LLM(tiny(model), kv_bytes=2**23, max_tokens=96, prefix_caching=True, **settings)
