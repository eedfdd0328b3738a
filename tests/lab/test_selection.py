"""The benchmark of decoding with few rebuilt keys, against pages and against all keys."""

from functools import partial
from typing import Any

import pytest
import torch

import selection
from kvfold import recipes
from kvfold.calibration.calibrate import calibrate
from kvfold.compression.compressor import Compressor
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.perplexity import window_perplexity
from kvfold.hub.checkpoint import spec_of
from kvfold.models.adapter import PAGED
from kvfold.models.copies import shared_copy
from kvfold.models.families import family_of
from models import tiny, tokens

pytestmark = pytest.mark.usefixtures("still")


@pytest.fixture(scope="module")
def folded() -> Any:
    model = tiny("llama-gqa")
    compressor = Compressor(model, recipes.get("small"))
    bases = compressor.prepare(calibrate(model, compressor.family, tokens(8, 64), compressor.needs))
    bases.fold(bases.plan_factor(6.0), {})
    return model


def losses(model: Any, rule: Any) -> tuple[float, ...]:
    model = shared_copy(model)
    model.config._attn_implementation = PAGED
    sessions = partial(selection.SelectedSession, model, rule, {}, [])
    with torch.no_grad():
        return window_perplexity(sessions, tokens(2, 60), scored_from=40)[0].window_nll


def test_all_rows_are_those_of_pages(folded: Any) -> None:
    config = CacheConfig(kv_bytes=2**21, page=8)
    runner = build_runner(folded, config, num_slots=1, max_tokens=64)
    paged, _ = window_perplexity(partial(PagedSession, runner), tokens(2, 60), scored_from=40)
    assert losses(folded, None) == pytest.approx(paged.window_nll, abs=1e-3)
    assert spec_of(folded).planned


@pytest.mark.parametrize("estimate", ["exact", "slow", "latent"])
@pytest.mark.parametrize("unit", ["head", "layer", "sum"])
def test_rules_that_choose_everything_lose_nothing(folded: Any, estimate: str, unit: str) -> None:
    every = selection.Rule(estimate=estimate, share=0.5, best=1000, unit=unit)
    assert losses(folded, every) == pytest.approx(losses(folded, None))
    few = selection.Rule(estimate=estimate, share=0.5, best=2, last=2, unit=unit)
    assert losses(folded, few) != pytest.approx(losses(folded, None))


def test_estimates_of_everything_are_the_scores(folded: Any) -> None:
    """All pairs are the whole score; where others are estimated by it, none is lost."""
    rule = selection.Rule(estimate="slow", share=1.0, best=2, last=2, rest="estimated")
    assert losses(folded, rule) == pytest.approx(losses(folded, None))


def test_estimates_by_latents_are_scores_without_distance(folded: Any) -> None:
    layer = next(family_of(folded.config).attentions(folded)).description
    rows, position = torch.randn(1, 9, layer.spec.row_width), torch.full((9,), 5)
    turned = layer.rope.tables(rows, position, 9)
    keys = layer.score_keys(rows, turned)[0]
    q = torch.randn(len(keys), 2, 9, keys.shape[-1])
    found = selection.Rule(estimate="latent").scores(layer, q, keys, rows, turned)
    torch.testing.assert_close(found, q @ keys[:, None].mT * layer.scale)


def test_the_best_rows_are_chosen_after_the_first_and_last() -> None:
    scores = torch.zeros(1, 1, 1, 20)
    scores[..., [7, 9, 18]] = 5.0
    seen = torch.ones(1, 20, dtype=torch.bool)
    seen[:, 18:] = False
    chosen = selection.Rule(best=2, last=3).choose(scores, seen, prompt=16)
    assert chosen[0, 0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 7, 9, 15, 16, 17]
