"""Chooses the eviction policy for `evict="auto"` by measuring candidates on the model."""

import math
from dataclasses import dataclass, replace
from typing import Any

from kvfold.config import AUTO, CacheConfig
from kvfold.engine.runner.build import has_scores
from kvfold.evaluation import ruler
from kvfold.evaluation.measure import Measured, Measurement, measure, text_windows
from kvfold.evaluation.perplexity import max_positions, paired_difference
from kvfold.utils.errors import SettingError
from kvfold.utils.progress import Progress
from kvfold.utils.text import packaged

CANDIDATES = ("kvzip", "kvzip-keys", "compactor", "keydiff-all", "kv-compress")
LENGTH, MORE = 512, 128  # tokens before the eviction, and tokens that are scored after it
CONTEXTS, FACTS, WINDOWS = 4, 4, 4
NEAR = 0.1  # smaller differences in right answers are within two standard errors


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A policy's result. right: share of right answers to questions that come after the context was
    compressed. lost: increase in cross-entropy (nats/token) on the text after a context."""

    policy: str
    right: float
    lost: float


def best_policy(model: Any, tokenizer: Any, **settings: Any) -> str:
    """Measure the candidates and return the policy for `LLM(model, evict=...)`, as `choose` does.

    settings: fields of `CacheConfig`, with keep_tokens or max_cache_tokens as the budget. Raises
    ValueError for settings that contradict each other or the model.
    """
    cache = CacheConfig(evict=AUTO, **settings)
    if not (cache.keep_tokens or cache.max_cache_tokens):
        raise SettingError("`evict='auto'` is measured at a budget: give keep_tokens, such as 0.25")
    return choose(trials(model, tokenizer, cache))


def choose(results: list[Trial]) -> str:
    """Return the policy of least loss among those whose answers are about as good as the best."""
    most = max(x.right for x in results)
    return min((x for x in results if x.right >= most - NEAR), key=lambda x: x.lost).policy


def trials(
    model: Any, tokenizer: Any, cache: CacheConfig, progress: Progress | None = None
) -> list[Trial]:
    """Measure each of `candidates` at the budget of `cache`, on RULER's keys in packaged prose and
    on packaged calibration text. Each takes about 6,000 tokens through the model, as does the
    uncompressed cache.
    """
    num_kept = cache.max_cache_tokens or 0
    most = (max_positions(model) or math.inf) - MORE
    length = int(min(max(LENGTH, 4 * num_kept), most))
    texts = {"calibration": packaged("calibration.txt")}
    ctx = length + MORE
    what = Measurement(
        windows=text_windows(model, tokenizer, texts, ctx=ctx, max_tokens=WINDOWS * ctx),
        tasks={
            "keys": ruler.examples("keys", tokenizer, length=length, contexts=CONTEXTS, facts=FACTS)
        },
        scored_from=length,
        cache=cache,
    )

    bare = replace(cache, evict=None, keep_tokens=None, max_cache_tokens=None, repair=False)

    def measured(evict: str | None) -> Measured:
        config = replace(cache, evict=evict) if evict else bare
        return measure(
            model, tokenizer, replace(what, cache=config), progress, evict or "all tokens"
        )

    uncompressed = measured(None).texts["calibration"]
    return [_trial(name, measured(name), uncompressed) for name in candidates(model)]


def candidates(model: Any) -> tuple[str, ...]:
    """CANDIDATES, and `learned` if the model has learned scores."""
    return (*CANDIDATES, "learned") if has_scores(model) else CANDIDATES


def _trial(name: str, measured: Measured, uncompressed: Any) -> Trial:
    lost, _ = paired_difference(measured.texts["calibration"], uncompressed)
    right = measured.tasks["keys"].scores["contains"].mean
    return Trial(policy=name, right=right, lost=lost)
