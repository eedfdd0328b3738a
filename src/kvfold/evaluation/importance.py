"""Ranks tokens of texts by importance in every layer of a model with low-rank entries."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation.paged import PagedSession
from kvfold.experimental.hybrid import with_leaders
from kvfold.hub.checkpoint import mark, provenance_of, spec_of
from kvfold.layout import CacheSpec
from kvfold.layout.pages import Ints

TEXTS, LENGTH = 4, 1024  # texts, and tokens of each


def orders(model: Any, windows: Tensor) -> list[Ints]:
    """For each window of [n, T]: int64 [L, T], each layer's tokens, the most important first."""
    runner = build_runner(model, CacheConfig(), num_slots=1, max_tokens=windows.shape[1])
    layout, rankings = runner.pool.layout, []
    for window in windows.tolist():
        with PagedSession(runner) as session:
            session.read(window, prompt=len(window))
            metrics, positions, _ = runner.eviction.tracked(session.sequence.open_slot)
        assert bool((positions[0].diff(dim=-1) == 1).all()), "no entry has moved yet"
        importance = torch.stack([metrics[0, where].sum(0) for where in layout.layer_groups])
        rankings.append(importance.argsort(1, descending=True).cpu().numpy().astype(np.int64))
    return rankings


def find_leaders(model: Any, windows: Tensor) -> CacheSpec:
    """Let adjacent layers that agree share one ranking of tokens (ZDC §5.2), and return the model's
    new spec. windows: token ids [n, T], of which up to TEXTS are read."""
    spec = spec_of(model)
    assert spec is not None and spec.hybrid is not None, "a folded model with low-rank entries"
    spec = with_leaders(spec, orders(model, windows[:TEXTS, :LENGTH]))
    mark(model, spec, provenance_of(model))
    return spec
