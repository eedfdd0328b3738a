"""What tests of fuzz share with others."""

from functools import lru_cache

import torch

import kvfold
from kvfold import recipes
from kvfold.calibration.calibrate import calibrate
from kvfold.compression.compressor import Compressor
from kvfold.engine.api.llm import Completion
from models import tiny, tokens

NEAR = 0.02  # nats; what rounding of another batch may change in the likeliest tokens' logprobs


@lru_cache(8)
def model_of(name: str, recipe: str | None):
    """A tiny model, folded. Raises ValueError for a pair that is refused by design."""
    model = tiny(name)
    if recipe is None:
        return model
    compressor = Compressor(model, recipes.get(recipe))
    topics = torch.arange(8) // 4
    made = calibrate(model, compressor.family, tokens(8, 64), compressor.needs, topics=topics)
    return kvfold.compress(model, recipe, statistics=made, align=1, keep=0.6, fold=True)


def same_up_to_rounding(alone: Completion, beside: Completion) -> int:
    """Tokens that agree: all, or those before one where the likeliest have the same chances."""
    assert beside.error is None and alone.error is None, (alone.error, beside.error)
    assert alone.logprobs is not None and beside.logprobs is not None
    both = zip(alone.token_ids, beside.token_ids, strict=False)
    for i, (a, b) in enumerate(both):
        for x, y in zip(alone.logprobs[i].top, beside.logprobs[i].top, strict=True):
            assert abs(x[1] - y[1]) < NEAR, f"token {i}: {alone.logprobs[i]}, {beside.logprobs[i]}"
        if a != b:
            return i
    assert len(alone.token_ids) == len(beside.token_ids)
    assert alone.finish_reason == beside.finish_reason
    return len(alone.token_ids)
