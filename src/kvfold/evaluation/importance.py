"""How important tokens of texts are to every layer of a model whose rows have two widths."""

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

TEXTS, LENGTH = 4, 1024  # that are read, and tokens of one


def orders(model: Any, windows: Tensor) -> list[Ints]:
    """Of every window [T] of [n, T]: int64 [L, T], each layer's tokens, most important first."""
    runner = build_runner(model, CacheConfig(), num_slots=1, max_tokens=windows.shape[1])
    layout, found = runner.pool.layout, []
    for window in windows.tolist():
        with PagedSession(runner) as session:
            session.read(window, prompt=len(window))
            metrics, positions, _ = runner.eviction.tracked(session.sequence.open_slot)
        assert bool((positions[0].diff(dim=-1) == 1).all()), "no row has moved yet"
        each = torch.stack([metrics[0, where].sum(0) for where in layout.layer_groups])
        found.append(each.argsort(1, descending=True).cpu().numpy().astype(np.int64))
    return found


def find_leaders(model: Any, windows: Tensor) -> CacheSpec:
    """Have layers that agree rank tokens once for all of them (ZDC §5.2); windows [n, T] token ids,
    of which up to TEXTS are read. The spec that the model now has."""
    spec = spec_of(model)
    assert spec is not None and spec.hybrid is not None, "a folded model with low-rank entries"
    spec = with_leaders(spec, orders(model, windows[:TEXTS, :LENGTH]))
    mark(model, spec, provenance_of(model))
    return spec
