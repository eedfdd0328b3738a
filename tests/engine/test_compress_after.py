"""`CacheParams.compress_after`: the rest of a prompt is read after its first part was evicted."""

from functools import partial

import pytest

from kvfold import LLM, CacheParams, SamplingParams
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation.dense import inference
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.reader import Reader
from kvfold.utils.errors import SettingError
from models import tiny, tokens

SETTINGS = {"page": 8, "keep_tokens": 0.4, "kv_bytes": 2**22}
NEW = 6


def parts(seed: int) -> tuple[list[int], list[int]]:
    """A context, which fills its pages, and a question."""
    ids = tokens(1, 74, seed=seed)[0].tolist()
    return ids[:64], ids[64:]


def in_a_session(evict: str, seed: int) -> list[int]:
    model = tiny("llama-gqa")
    runner = build_runner(model, CacheConfig(evict=evict, **SETTINGS), num_slots=1, max_tokens=128)
    context, question = parts(seed)
    with inference(model):
        reader = Reader(partial(PagedSession, runner))
        reader.prefill(context)
        return reader.answer(question, NEW)


def llm_of(evict: str, **settings) -> LLM:
    return LLM(tiny("llama-gqa"), max_tokens=128, evict=evict, **{**SETTINGS, **settings})


def answers(llm: LLM, seeds: list[int], split: bool = True) -> list[list[int]]:
    prompts = [context + question for context, question in map(parts, seeds)]
    caches = [CacheParams(compress_after=64 if split else None)] * len(seeds)
    sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    return [list(x.token_ids) for x in llm.generate(prompts, sampling, cache=caches)]


@pytest.mark.parametrize("evict", ["snapkv", "h2o", "kvzip", "keydiff-all"])
def test_the_engine_answers_as_a_session(evict: str) -> None:
    seeds = [0, 1, 2]
    found = answers(llm_of(evict), seeds)
    assert found == [in_a_session(evict, seed) for seed in seeds]
    assert found != answers(llm_of(evict), seeds, split=False)


def test_a_cached_context_answers_the_same() -> None:
    wanted = answers(llm_of("kvzip"), [0, 1, 2])
    llm = llm_of("kvzip")
    assert [*answers(llm, [0, 1, 2]), *answers(llm, [0, 1, 2])] == wanted * 2
    assert llm.engine.scheduler.prefix_cache.num_hits > 0


def test_a_request_that_starts_again_stops_at_the_same_token() -> None:
    request = llm_of("snapkv").engine.request(parts(0)[0], cache=CacheParams(compress_after=10))
    request.start(0)
    request.restart()
    assert request.num_prefill == 10


def test_values_that_are_refused() -> None:
    llm, prompt = llm_of("snapkv"), parts(0)[0]
    for after in (65, 0):
        with pytest.raises(SettingError, match=r"compress_after must be in 1\.\.64"):
            llm.generate([prompt], cache=CacheParams(compress_after=after))
    with pytest.raises(SettingError, match="compress_after and prompt_logprobs cannot be"):
        sampling = SamplingParams(prompt_logprobs=1)
        llm.generate([prompt], sampling, cache=CacheParams(compress_after=10))
