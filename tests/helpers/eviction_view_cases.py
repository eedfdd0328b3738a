"""What tests of eviction view share with others."""

from dataclasses import dataclass, field

import pytest
from torch import Tensor

from kvfold import compress, recipes
from kvfold.cache.eviction import policies
from kvfold.cache.eviction.base import EntriesView
from kvfold.cache.eviction.policy import Policy
from kvfold.cache.eviction.scorers.attention import Attention
from kvfold.calibration.calibrate import calibrate
from kvfold.compression.compressor import Compressor
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.runner import ModelRunner
from kvfold.models.families import family_of
from models import tiny, tokens

PROMPT, WINDOW, PAGE = 45, 7, 4


@dataclass(frozen=True, kw_only=True)
class Curious(Attention):
    """Looks at everything, and scores as its base does."""

    needs = frozenset({"attention", "keys", "values", "queries"})
    views: list[EntriesView] = field(default_factory=list)
    seen: list[list[tuple[Tensor, ...]]] = field(default_factory=list)  # by round and layer

    def score(self, view: EntriesView) -> Tensor:
        layers = range(len(view.layers))
        self.views.append(view)
        self.seen.append([(view.keys(i), view.values(i), *view.queries(i)) for i in layers])
        return super().score(view)


def folded(name: str, recipe: str | None, keep: float):
    model = tiny(name)
    if recipe is None:
        return model
    found = recipes.get(recipe)
    wanted = Compressor(model, found).needs
    statistics = calibrate(model, family_of(model.config), tokens(8, 64), wanted)
    return compress(model, found, statistics=statistics, keep=keep, align=1, fold=True)


def runner_of(model, policy: Policy) -> ModelRunner:
    config = CacheConfig(evict="snapkv", page=PAGE, keep_tokens=0.5, kv_bytes=2**22)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "get", {"snapkv": policy}.__getitem__)
        return build_runner(model, config, num_slots=3, max_tokens=96)
