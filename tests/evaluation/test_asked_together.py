"""benchmarks/together.py measures what one sequence at a time does."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import together
from kvfold.config import CacheConfig
from kvfold.evaluation import ruler
from kvfold.evaluation.dense import inference
from kvfold.evaluation.measure import Measurement, measure, runner_for
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.reader import Reader
from kvfold.evaluation.tasks.run import run_tasks
from kvfold.hub.loading import load, load_tokenizer
from matrix import slow
from tolerance import model_terms, rounding

LENGTH = 160  # of contexts, and of windows before their rest is scored


CASES: dict[str, dict[str, Any]] = {
    "all rows": {},
    "kivi": {"format": "kivi", "bits": 4},  # whose rows cannot be taken back
    "gear": {"format": "gear", "bits": 4},
} | {
    policy: {"page": 16, "evict": policy, "keep_tokens": 0.25}
    for policy in ("kv-compress", "h2o", "keyformer", "compactor", "kvzip-keys")
}


@pytest.mark.parametrize(
    "case", [x if x in ("all rows", "kivi", "kv-compress") else slow(x) for x in CASES]
)
def test_all_at_once_measures_the_same(case, monkeypatch):
    monkeypatch.setattr(together, "CHUNK", 96)
    monkeypatch.setattr(together, "TOKENS", 2 * (LENGTH + 80))  # two at a time
    model, tokenizer = load("reference:gqa", dtype="float32"), load_tokenizer("reference:gqa")
    generator = torch.Generator().manual_seed(0)
    what = Measurement(
        windows={"noise": torch.randint(8, 4096, (3, LENGTH + 80), generator=generator)},
        tasks={"keys": ruler.examples("keys", tokenizer, length=LENGTH, contexts=3, facts=2)},
        cache=CacheConfig(**CASES[case]),
        chunk=96,
        scored_from=LENGTH,
    )
    alone = measure(model, tokenizer, what)
    runner = runner_for(model, what.cache, LENGTH + 80, tokenizer=tokenizer)
    with inference(model):
        reader = Reader(partial(PagedSession, runner, what.chunk), agnostic=False)
        asked = run_tasks(model, tokenizer, what.tasks["keys"], reader=reader)
    aware = together.measure(model, tokenizer, replace(what, windows={}, agnostic=False))
    assert aware.tasks["keys"] == asked
    found = together.measure(model, tokenizer, what)
    assert found.tasks == alone.tasks
    assert found.footprint == alone.footprint
    losses = found.texts["noise"].window_nll
    near = rounding(torch.float32, model_terms(model.config, LENGTH + 80))
    assert losses == pytest.approx(alone.texts["noise"].window_nll, rel=near)
    assert found.texts["noise"].tokens == alone.texts["noise"].tokens
