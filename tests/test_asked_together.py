"""benchmarks/together.py measures what one sequence at a time does."""

import sys
from pathlib import Path

import pytest
import torch

from kvfold.config import CacheConfig
from kvfold.evaluation import ruler
from kvfold.evaluation.measure import Measurement, measure
from kvfold.loading import load, load_tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import together

LENGTH = 160  # of contexts, and of windows before their rest is scored


@pytest.mark.parametrize("policy", [None, "kv-compress", "h2o", "compactor", "kvzip-keys"])
def test_all_at_once_measures_the_same(policy):
    model, tokenizer = load("reference:gqa", dtype="float32"), load_tokenizer("reference:gqa")
    generator = torch.Generator().manual_seed(0)
    what = Measurement(
        windows={"noise": torch.randint(8, 4096, (3, LENGTH + 80), generator=generator)},
        tasks={"keys": ruler.rows("keys", tokenizer, length=LENGTH, contexts=3, facts=2)},
        cache=CacheConfig(page=16, evict=policy, keep_tokens=0.25 if policy else None),
        scored_from=LENGTH,
    )
    alone = measure(model, tokenizer, what)
    found = together.measure(model, tokenizer, what)
    assert found.tasks == alone.tasks
    assert found.footprint == alone.footprint
    losses = found.texts["noise"].window_nll
    assert losses == pytest.approx(alone.texts["noise"].window_nll, abs=1e-5)
    assert found.texts["noise"].tokens == alone.texts["noise"].tokens
