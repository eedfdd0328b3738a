"""`auto`: the eviction policy that keeps most on the model at hand, measured before it is used."""

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
LENGTH, MORE = 512, 128  # tokens that are read and evicted, and that come after them
CONTEXTS, FACTS, WINDOWS = 4, 4, 4
NEAR = 0.1  # shares of right answers that tell no policies apart: two standard errors and less


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a policy keeps: the share of right answers about a context that was compressed before
    anyone asked, and nats a token lost on the text that follows one."""

    policy: str
    right: float
    lost: float


def best_policy(model: Any, tokenizer: Any, **settings: Any) -> str:
    """The name of the policy for `LLM(model, evict=...)`, as `choose` finds it.

    settings: fields of `CacheConfig`; keep_tokens or max_cache_tokens say how much is kept. Raises
    ValueError for settings that contradict each other or the model.
    """
    cache = CacheConfig(evict=AUTO, **settings)
    if not (cache.keep_tokens or cache.max_cache_tokens):
        raise SettingError("`evict='auto'` is measured at a budget: give keep_tokens, such as 0.25")
    return choose(trials(model, tokenizer, cache))


def choose(found: list[Trial]) -> str:
    """Of the policies that answer about as well as the best, the one that costs least loss."""
    most = max(x.right for x in found)
    return min((x for x in found if x.right >= most - NEAR), key=lambda x: x.lost).policy


def trials(
    model: Any, tokenizer: Any, cache: CacheConfig, progress: Progress | None = None
) -> list[Trial]:
    """Every one of `candidates`, to the budget of `cache`, on RULER's keys in packaged prose and on
    packaged calibration text: some 6,000 tokens through the model for each, and for none.
    """
    kept = cache.max_cache_tokens or 0
    most = (max_positions(model) or math.inf) - MORE
    length = int(min(max(LENGTH, 4 * kept), most))
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
        return measure(model, tokenizer, replace(what, cache=config), progress, evict or "all rows")

    whole = measured(None).texts["calibration"]
    return [_trial(name, measured(name), whole) for name in candidates(model)]


def candidates(model: Any) -> tuple[str, ...]:
    """CANDIDATES, and `learned` where the model has such scores."""
    return (*CANDIDATES, "learned") if has_scores(model) else CANDIDATES


def _trial(name: str, found: Measured, whole: Any) -> Trial:
    lost, _ = paired_difference(found.texts["calibration"], whole)
    right = found.tasks["keys"].scores["contains"].mean
    return Trial(policy=name, right=right, lost=lost)
