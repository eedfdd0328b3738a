"""Prefill chunks that attend together, padded, have the outputs of chunks one by one."""

import numpy as np
import pytest
import torch

from eviction_view_cases import Curious
from fuzz_cases import model_of
from kvfold import LLM, SamplingParams
from kvfold.cache.eviction import policies
from kvfold.cache.eviction.policy import Policy
from kvfold.engine.runner import metadata
from kvfold.engine.runner.metadata import build_attention_metadata
from models import tokens

LENGTHS = (40, 33, 21, 40, 9, 5, 70, 1)
PROMPTS = [tokens(1, n, seed=i)[0].tolist() for i, n in enumerate(LENGTHS)]
ASKED = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=3)
CASES = {
    "plain": {},
    "in chunks": {"chunk": 16},
    "all queries observed": {"evict": "h2o", "max_cache_tokens": 16},
    "last queries observed": {"evict": "kv-compress", "max_cache_tokens": 16},
    "in chunks, last queries observed": {"evict": "snapkv", "max_cache_tokens": 16, "chunk": 16},
    "keys rebuilt": {"recipe": "small"},
    "keys rebuilt, last queries observed": {
        "recipe": "small",
        "evict": "kv-compress",
        "max_cache_tokens": 16,
    },
    "heads apart": {"recipe": "fast", "bits": 8},
    "sliding window": {"name": "mistral-sliding"},
    "attention within chunks": {"evict": "compactor", "max_cache_tokens": 16},
}


def served(name: str = "llama-gqa", recipe: str | None = None, **settings):
    fixed = {"page": 8, "kv_bytes": 2**22, "max_sequences": 8, "max_tokens": 160, "chunk": 64}
    llm = LLM(model_of(name, recipe), **fixed | settings)
    llm.engine.scheduler.max_batch_tokens = 10_000
    found = llm.generate(PROMPTS, ASKED)
    llm.runner.pool.check_integrity()
    return found


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_chunks_one_by_one(case: str, monkeypatch) -> None:
    alone = served(**CASES[case])
    sizes = []

    def spy(*given):
        parts = build_attention_metadata(*given)
        sizes.extend(len(part.slots) for part in parts if not part.decode)
        return parts

    monkeypatch.setattr("kvfold.engine.runner.runner.build_attention_metadata", spy)
    monkeypatch.setattr(metadata, "BATCHED_DEVICES", {"cpu"})
    found = served(**CASES[case])
    for own, other in zip(found, alone, strict=True):
        assert own.token_ids == other.token_ids
        for mine, theirs in zip(own.logprobs, other.logprobs, strict=True):
            assert mine.chosen == pytest.approx(theirs.chosen, abs=2e-4)
    assert (max(sizes) > 1) == (case != "attention within chunks")


@pytest.mark.parametrize("lengths", [(5, 40), (9, 70, 20), (20, 9, 70, 1)])
@pytest.mark.parametrize("evict", [None, "h2o"])
def test_those_of_other_lengths_keep_their_order(lengths, evict, monkeypatch) -> None:
    """None of them goes with another; the longest is attended first."""
    keep = {"evict": evict, "max_cache_tokens": 16} if evict else {}
    prompts = [tokens(1, n, seed=i)[0].tolist() for i, n in enumerate(lengths)]
    keep |= {"page": 8, "kv_bytes": 2**22, "max_tokens": 160, "prefix_caching": False}
    llm = LLM(model_of("llama-gqa", None), **keep)
    alone = llm.generate(prompts, ASKED)
    monkeypatch.setattr(metadata, "BATCHED_DEVICES", {"cpu"})
    assert llm.generate(prompts, ASKED) == alone


def test_last_queries_are_kept_of_all(monkeypatch) -> None:
    """Those of short pieces too, whose first queries are there more than once."""
    seen = []
    for types in (frozenset(), {"cpu"}):
        scorer = Curious(continual=True)
        policy = Policy(scorer=scorer, window=8)
        monkeypatch.setattr(metadata, "BATCHED_DEVICES", types)
        monkeypatch.setattr(policies, "get", {"snapkv": policy}.__getitem__)
        served(evict="snapkv", max_cache_tokens=16)
        seen.append([torch.cat([x.flatten() for x in layer[2:]]) for layer in scorer.seen[0]])
    for alone, together in zip(*seen, strict=True):
        torch.testing.assert_close(alone, together)


def test_short_ones_begin_with_their_first_token_again() -> None:
    piece = metadata._ChunkPart
    some = [piece(None, 3, 4, 4, False), piece(None, 9, 2, 2, False)]
    assert np.array_equal(metadata._padded_tokens(some), [[3, 4, 5, 6], [9, 9, 9, 10]])


def test_who_goes_together() -> None:
    def joins(observed: bool, *counts: int, stop: int = 0) -> bool:
        *some, last = [metadata._ChunkPart(None, 0, n, stop or n, observed) for n in counts]
        return metadata._fits_call(some, last)

    assert joins(False, 40, 40, 20) and not joins(False, 40, 40, 19)
    assert joins(True, 8, 8) and not joins(True, 8, 7)
    assert joins(False, 9, 9, stop=metadata.MAX_ENTRIES // 2)
    assert not joins(False, 9, 9, 9, stop=metadata.MAX_ENTRIES // 2)
