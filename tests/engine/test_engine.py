"""The engine on real model code: the same tokens as transformers, whatever the batch and chunks."""

import pytest

from engine_cases import same_up_to_ties
from kvfold.cache.pool import Pool
from kvfold.engine.core.engine import Engine
from kvfold.engine.requests.request import SamplingParams
from kvfold.engine.runner.runner import ModelRunner
from kvfold.hub.checkpoint import spec_of
from kvfold.layout.pages import cache_layout, plain_spec
from kvfold.models.families import family_of
from kvfold.models.fold import fold_model
from kvfold.models.folded import attention_windows
from matrix import matrix
from models import CONFIGS, greedy, tiny, tokens

PROMPTS = (5, 33, 70)
NEW = 12


def engine_of(model, *, num_pages: int = 100, chunk: int, headroom: int = 32) -> Engine:
    """An engine over a folded model; plain models are folded to full keys and values."""
    spec = spec_of(model)
    if spec is None:
        family = family_of(model.config)
        spec = plain_spec(family.geometry(model.config))
        fold_model(model, family, spec, [[None] * len(x.latents) for x in spec.layers])
    sliding = [window is not None for window in attention_windows(model.config)]
    layout = cache_layout(spec, page=8, itemsize=4, tracked=sliding)
    pool = Pool(layout, num_pages * layout.page_bytes, num_slots=4, max_tokens=160)
    return Engine(ModelRunner(model, pool), pool, chunk=chunk, headroom=headroom)


def serve(engine: Engine, prompts, new: int = NEW) -> list[list[int]]:
    ids = [engine.add(prompt, SamplingParams(max_new_tokens=new)) for prompt in prompts]
    found = {i: [] for i in ids}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            found[output.id] += output.token_ids
        engine.scheduler.pool.check_integrity()
    return [found[i] for i in ids]


def prompts_of(seed: int = 3) -> list[list[int]]:
    return [tokens(1, length, seed=seed + i)[0].tolist() for i, length in enumerate(PROMPTS)]


@pytest.mark.parametrize(("name", "chunk"), matrix(list(CONFIGS), [1, 7, 64, 512]))
def test_uncompressed_engine_equals_transformers(name: str, chunk: int) -> None:
    model = tiny(name)
    wanted = [greedy(model, prompt, NEW) for prompt in prompts_of()]
    engine = engine_of(model, chunk=chunk)
    for found, expected in zip(serve(engine, prompts_of()), wanted, strict=True):
        same_up_to_ties(found, *expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_pre_emption_changes_nothing(name: str) -> None:
    model = tiny(name)
    wanted = [greedy(model, prompt, NEW) for prompt in prompts_of()]
    # Workspace for all prompts, but not for what they become: someone must give way.
    engine = engine_of(model, num_pages=16, chunk=16, headroom=0)
    for found, expected in zip(serve(engine, prompts_of()), wanted, strict=True):
        same_up_to_ties(found, *expected)
    # Unless pages come free behind a window.
    assert engine.scheduler.num_preemptions > 0 or any(attention_windows(model.config))
