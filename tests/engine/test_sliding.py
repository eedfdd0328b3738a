"""Layers with a sliding window: what transformers computes, in a cache that stops growing."""

from itertools import count

import pytest
import torch
import transformers as hf
from torch import Tensor

from engine_cases import same_up_to_ties
from kvfold.cache.pool import Pool
from kvfold.config import CacheConfig
from kvfold.engine.core.engine import Engine
from kvfold.engine.requests.request import Batch, SamplingParams
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.runner import ModelRunner
from kvfold.evaluation.paged import PagedSession
from kvfold.models.folded import attention_windows
from models import ROTARY, greedy, tiny, tokens
from steps import logits_of
from tolerance import assert_same_logits

pytestmark = pytest.mark.gpu

WINDOW, PAGE = 16, 4


def model_of(name: str) -> hf.PreTrainedModel:
    if name == "mistral":
        return tiny("mistral-sliding")
    config = hf.Qwen2Config(
        **ROTARY,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"],
    )
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


MODELS = ["mistral", "mixed"]


def runner_of(name: str, max_tokens: int = 220, **settings) -> ModelRunner:
    config = CacheConfig(kv_bytes=2**21, page=PAGE, **settings)
    return build_runner(model_of(name), config, num_slots=3, max_tokens=max_tokens)


def dense(name: str, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model_of(name)(ids).logits[0]


@pytest.mark.parametrize("chunk", [1, 7, 50])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_in_bounded_memory(name: str, chunk: int) -> None:
    ids, runner = tokens(1, 110), runner_of(name)
    windows = attention_windows(runner.model.config)
    layout, freed = runner.pool.layout, []
    move = runner.eviction.close_holes
    runner.eviction.close_holes = lambda *args: (freed.append(1), move(*args))[1]
    found = []
    with PagedSession(runner, chunk) as session:
        for start in range(0, 110, chunk):
            found.append(logits_of(session, ids[0, start : start + chunk].tolist()))
            runner.pool.check_integrity()
            rows = runner.pool.host_lengths[session.sequence.slot]
            done = session.sequence.num_computed
            for group, count in zip(layout.groups, rows.tolist(), strict=True):
                limit = done if windows[group.layer] is None else WINDOW - 1 + PAGE - 1
                assert count <= limit, f"{count} rows after {done} tokens"
                assert windows[group.layer] is not None or count == done
    assert 0 < len(freed) <= 110 // PAGE
    assert runner.pool.stats().used_bytes == 0
    assert_same_logits(torch.cat(found), dense(name, ids), runner.model.config, 110)


@pytest.mark.parametrize("name", MODELS)
def test_long_generations_together(name: str) -> None:
    """Requests that decode side by side reach page borders in different steps."""
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (3, 22, 41)]
    wanted = [greedy(model_of(name), prompt, 120) for prompt in prompts]
    runner = runner_of(name)
    engine = Engine(runner, runner.pool, chunk=8)
    ids = [engine.add(prompt, SamplingParams(max_new_tokens=120)) for prompt in prompts]
    found: dict[int, list[int]] = {i: [] for i in ids}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            found[output.id] += output.token_ids
        rows = runner.pool.host_lengths[:, runner.sliding[0][0]]
        assert rows.max() <= WINDOW - 1 + PAGE - 1
    runner.pool.check_integrity()
    for i, expected in zip(ids, wanted, strict=True):
        same_up_to_ties(found[i], *expected)


@pytest.mark.parametrize("name", MODELS)
def test_prompts_that_fit_behind_their_windows_are_served(name: str) -> None:
    """In far fewer pages than all their rows would take, beside others and after pre-emption."""
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (150, 90, 60)]
    wanted = [greedy(model_of(name), prompt, 40) for prompt in prompts]
    layout, windows = runner_of(name).pool.layout, attention_windows(model_of(name).config)
    limits = {"num_slots": 3, "max_tokens": 220}
    pools = (
        Pool(layout, n * layout.page_bytes, sliding_windows=windows, **limits) for n in count(4)
    )
    pool = next(pool for pool in pools if pool.fits(190, chunk=8))
    assert not pool.fits(190)
    config = CacheConfig(kv_bytes=pool.arena.numel(), page=PAGE)
    runner = build_runner(model_of(name), config, **limits)
    engine = Engine(runner, runner.pool, chunk=8, headroom=4)
    ids = [engine.add(prompt, SamplingParams(max_new_tokens=40)) for prompt in prompts]
    found: dict[int, list[int]] = {i: [] for i in ids}
    while engine.has_work:
        for output in engine.step():
            assert output.finish_reason in (None, "length"), output
            found[output.id] += output.token_ids
        runner.pool.check_integrity()
    for i, expected in zip(ids, wanted, strict=True):
        same_up_to_ties(found[i], *expected)


@pytest.mark.parametrize("chunk", [8, 64])
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_that_fails_once_is_run_again_on_the_same_rows(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the forward pass, when its rows are stored: none of them may have gone yet."""
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (60, 37)]
    wanted = [greedy(model_of(name), prompt, 20) for prompt in prompts]
    runner = runner_of(name)
    engine = Engine(runner, runner.pool, chunk=chunk)
    sampling = SamplingParams(max_new_tokens=20)
    found: dict[int, list[int]] = {engine.add(x, sampling): [] for x in prompts}
    run, calls = runner.run, count()

    def fail(batch: Batch, tokens: Tensor | None) -> Tensor:
        logits = run(batch, tokens)
        if len(batch.chunks) > 1 and next(calls) % 3 == 0:
            raise RuntimeError("out of memory")
        return logits

    monkeypatch.setattr(runner, "run", fail)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            found[output.id] += output.token_ids
    assert next(calls) > 9
    for ids, expected in zip(found.values(), wanted, strict=True):
        same_up_to_ties(ids, *expected)


def test_only_sliding_layers_carry_positions() -> None:
    groups = runner_of("mixed").pool.layout.groups
    assert [group.layout.tracked for group in groups] == [group.layer == 1 for group in groups]


def test_bits_go_with_windows() -> None:
    ids = tokens(1, 60)
    with PagedSession(runner_of("mixed", bits=8), 9) as session:
        found = logits_of(session, ids[0].tolist())
    error = (found - dense("mixed", ids)).norm() / dense("mixed", ids).norm()
    assert 0 < error < 0.02


def test_what_has_moved_on_cannot_be_rewound() -> None:
    assert not runner_of("mixed").can_rewind
    config = CacheConfig(kv_bytes=2**21, page=PAGE)
    plain = build_runner(tiny("llama-gqa"), config, num_slots=1, max_tokens=64)
    assert plain.can_rewind


def test_eviction_is_refused() -> None:
    with pytest.raises(ValueError, match="sliding window already drops"):
        runner_of("mixed", evict="kv-compress", keep_tokens=0.5)
