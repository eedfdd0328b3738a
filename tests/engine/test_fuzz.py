"""Random configurations: what is served together is what each request gets alone.

A seed is a configuration: a model, a recipe, bits, a policy, a pool, and requests. A few run with
the other tests, all of them by `make soak`.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fuzz_cases import model_of, same_up_to_rounding
from kvfold import LLM, CacheParams, SamplingParams, recipes
from kvfold.cache.eviction.policies import POLICIES
from kvfold.config import CacheConfig
from kvfold.layout.formats import FORMATS
from models import CONFIGS

ALL, FEW = 200, 8
LONGEST = 96


@dataclass(frozen=True)
class Configuration:
    """model: arguments of `model_of`; settings: of LLM; requests: prompts, sampling and budgets;
    roomy: as many bytes as nobody lacks; tight: little more than the longest request takes."""

    model: tuple[str, str | None]
    settings: dict[str, Any]
    requests: list[tuple[list[int], SamplingParams, CacheParams | None]]
    crowd: dict[str, Any]

    def alone(self) -> LLM:
        return LLM(model_of(*self.model), max_tokens=LONGEST, **self.settings)

    def together(self) -> LLM:
        return LLM(model_of(*self.model), max_tokens=LONGEST, **{**self.settings, **self.crowd})


def drawn(rng: random.Random) -> Configuration:
    """A configuration, which may be one that is refused."""
    evict = rng.choice([None, None, *sorted(set(POLICIES) - {"random"})])
    storage = {
        "bits": rng.choice([None, 16, 8, 6, 4, 3, 2]),
        "page": rng.choice([None, 1, 4, 8, 16]),
        "zeros": rng.random() < 0.2,
        "sub_group": rng.choice([None, None, 8, 16]),
        "rotate": rng.random() < 0.8,
        "format": rng.choice(["integers"] * 3 + [*FORMATS][1:]),
        "residual": rng.choice([None, None, 4, 16]),
        "evict": evict,
        "keep_tokens": evict and 0.5,
    }
    CacheConfig(**storage)
    own = [CacheParams(max_cache_tokens=16), CacheParams(keep_tokens=0.8), None]
    requests = [
        (
            [rng.randrange(97) for _ in range(rng.choice([1, 2, 7, 19, 33, 60]))],
            SamplingParams(
                max_new_tokens=rng.choice([1, 3, 12, 30]),
                temperature=rng.choice([0.0, 0.0, 0.8]),
                top_k=rng.choice([None, 20]),
                top_p=rng.choice([1.0, 0.9]),
                seed=rng.randrange(1000),
                ignore_eos=rng.random() < 0.8,
                logprobs=5,
            ),
            rng.choice(own) if evict else None,
        )
        for _ in range(6)
    ]
    return Configuration(
        model=(rng.choice(sorted(CONFIGS)), rng.choice([None, *recipes.RECIPES])),
        settings={**storage, "kv_bytes": 2**22, "max_sequences": 6},
        requests=requests,
        crowd={"chunk": rng.choice([1, 5, 16, 64]), "max_sequences": rng.choice([1, 2, 6])},
    )


def legal(rng: random.Random) -> tuple[Configuration, LLM]:
    """The first drawn one that is not refused, alone."""
    while True:
        try:
            found = drawn(rng)
            return found, found.alone()
        except ValueError:
            continue


def tight(configuration: Configuration, llm: LLM, rng: random.Random) -> Configuration:
    """With pages for little more than the longest request, so that some are pre-empted. Where
    something is evicted or packed that would change what they say."""
    pool = llm.runner.pool
    if configuration.settings["evict"] or pool.layout.residual or rng.random() < 0.5:
        return configuration
    pages = -(-LONGEST // pool.layout.page) + 1
    crowd = {**configuration.crowd, "kv_bytes": 2 * pages * pool.layout.page_bytes}
    return replace(configuration, crowd=crowd)


@pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=[pytest.mark.soak] if i >= FEW else []) for i in range(ALL)]
)
def test_served_together_is_served_alone(seed: int) -> None:
    rng = random.Random(seed)
    configuration, llm = legal(rng)
    configuration = tight(configuration, llm, rng)
    alone = [llm.generate([ids], one, cache=own)[0] for ids, one, own in configuration.requests]
    crowd = configuration.together()
    prompts, sampling, cache = zip(*configuration.requests, strict=True)
    found = crowd.generate(prompts, sampling, cache=cache)
    agreed = [same_up_to_rounding(*pair) for pair in zip(alone, found, strict=True)]
    assert sum(agreed) > 0.8 * sum(len(x.token_ids) for x in alone)
    pool = crowd.runner.pool
    pool.check_integrity()
    assert pool.used_bytes == 0 and not crowd.engine.has_work
