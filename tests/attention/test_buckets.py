"""Sequences of unequal length in one step: what is padded, and that it shows nowhere else."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvfold import recipes
from kvfold.attention import buckets, cpu_paged, fallback
from kvfold.attention.buckets import WORTH, length_buckets
from kvfold.config import CacheConfig
from kvfold.engine.requests.request import CacheParams
from kvfold.engine.runner.build import build_runner
from models import tiny
from steps import backends, folded, sequences_of, step
from tolerance import assert_same_logits, model_terms, rounding

PROMPTS = (5, 70, 1, 33, 6, 31)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    yield from backends(monkeypatch)


@given(st.lists(st.one_of(st.integers(0, 60), st.integers(0, 9000)), min_size=1, max_size=80))
def test_buckets_read_few_rows_in_vain(lengths: list[int]) -> None:
    found = length_buckets(lengths)
    assert sorted(i for bucket in found for i in bucket) == list(range(len(lengths)))
    padded = [[lengths[i] for i in bucket] for bucket in found]
    assert sum(max(x) * len(x) for x in padded) <= 2 * sum(lengths) + WORTH
    assert all(max(x) == x[0] > 2 * y[0] for x, y in pairwise(padded))


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([30, 3800, 31, 30] * 8, 2),
        ([30, 31] * 16, 1),  # nothing is gained
        ([1000] * 31 + [600], 1),
        ([100, 1], 1),  # less than a bucket costs
        ([0, 0], 1),
    ],
)
def test_as_many_buckets_as_are_worth_it(lengths: list[int], wanted: int) -> None:
    assert len(length_buckets(lengths)) == wanted


def model_of(name: str):
    if name == "palu-g":  # keys are rebuilt
        return torch.nn.Module.float(folded(recipes.get(name)))
    return tiny(name)


def run(model, **settings) -> tuple[Tensor, list[Tensor]]:
    """Logits of decode steps of unequal sequences, and the metrics that they leave."""
    cache = CacheConfig(page=8, kv_bytes=2**21, **settings)
    runner = build_runner(model, cache, num_slots=len(PROMPTS), max_tokens=100)
    work = sequences_of(runner, *PROMPTS)
    for one in work:
        while one.num_computed < one.num_prefill:
            step(runner, (one, min(one.num_prefill - one.num_computed, 8)))
    if runner.policy is not None:
        work[1].cache = CacheParams(max_cache_tokens=40, protected=4)
        runner.compress([work[1]])
    logits = torch.cat([step(runner, *((one, 1) for one in work)) for _ in range(3)])
    observed = work if runner.policy is not None else []
    return logits, [runner.eviction.tracked(x.open_slot)[0] for x in observed]


@pytest.mark.parametrize(
    ("name", "settings", "reader"),
    [
        ("palu-g", {}, (fallback, "gather_entries")),
        ("gemma2", {"evict": "kv-compress", "keep_tokens": 0.9}, (fallback, "gather_entries")),
        ("gemma2-sliding", {}, (fallback, "gather_entries")),
        ("opt", {"bits": 2, "format": "kivi", "residual": 16}, (fallback, "gather_entries")),
        ("llama-mha", {}, (cpu_paged, "locate")),
    ],
)
def test_nothing_depends_on_buckets(
    name: str, settings: dict, reader: tuple, backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend("reference")
    read, found, rows = getattr(*reader), [], []

    def counted(*args) -> object:
        slots = next(x for x in args if isinstance(x, Tensor))
        rows[-1] += len(slots) * args[-1]
        return read(*args)

    monkeypatch.setattr(*reader, counted)
    for worth in (10**9, 0):
        monkeypatch.setattr(buckets, "WORTH", worth)
        rows.append(0)
        found.append(run(model_of(name), **settings))
    config = model_of(name).config
    assert_same_logits(found[1][0], found[0][0], config, 100)
    terms = model_terms(config, 100)
    for x, y in zip(found[1][1], found[0][1], strict=True):
        assert ((x - y).abs() <= rounding(torch.float32, terms) * y.clamp(min=1)).all()
    assert bool(found[0][1]) is ("evict" in settings)
    assert rows[1] < rows[0]
