"""Learns maps from a token's hidden states to its eviction scores in every layer. They predict the
scores of a re-scoring pass, which `evict="learned"` then does not need.

Shapes: T tokens of a window, D width, Hk KV heads, G groups of a layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.calibration.documents import files_of
from kvfold.calibration.text import calibration_text
from kvfold.compression.compressor import Compressor
from kvfold.compression.planning.target import Target
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.runner import ModelRunner
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.perplexity import max_positions
from kvfold.hub.checkpoint import mark, provenance_of, spec_of
from kvfold.models.families import family_of
from kvfold.models.folded import attention_windows
from kvfold.utils.errors import SettingError
from kvfold.utils.progress import Progress, stage
from kvfold.utils.tokens import windows

TEACHER = "kvzip+"
TOKENS, LENGTH = 16384, 1024  # most tokens in all, and of a window
WORDS = 64  # tokens that ask the model to repeat a text
RIDGE = 1e-3  # of the mean squared hidden state
LEAST = 1e-6  # smaller scores count as this


@dataclass
class RegressionSums:
    """Sums for a ridge regression of log scores y [T, Hk] on x [T, D + 1], hidden states with a one
    appended; fp64."""

    xx: Tensor
    xy: Tensor

    def add(self, x: Tensor, y: Tensor) -> None:
        x, y = x.double(), y.double()
        self.xx += x.mT @ x
        self.xy += x.mT @ y

    def solved(self) -> Tensor:
        """Solve the ridge regression: [Hk, D + 1]. The last column, the bias, has no penalty."""
        size = len(self.xx) - 1
        ridge = torch.full_like(self.xx[0], RIDGE * float(self.xx.diagonal()[:size].mean()))
        ridge[size] = 0
        return torch.linalg.solve(self.xx + ridge.diag(), self.xy).mT


def check_learnable(config: Any, target: Target) -> None:
    """Raise SettingError for a model from whose cache nothing can be evicted."""
    if target.hybrid is not None:
        raise SettingError(
            "`learn_scores`: nothing is evicted from a cache with low-rank entries (`hybrid`):"
            " leave one out"
        )
    if any(attention_windows(config)):
        raise SettingError(
            "`learn_scores`: this model's sliding window already drops old tokens, and nothing else"
            " is evicted: leave it out"
        )


def readings(compressor: Compressor) -> Tensor:
    """Return windows [n, T] to learn from, spread over the calibration text. Each is like a prompt:
    the tokenizer's `leading_tokens`, such as BOS, then text."""
    # Calibration's windows have leading tokens between documents too, which prompts have not.
    text = calibration_text(files_of(compressor.calib), compressor.tokenizer)
    cut = windows(compressor.tokenizer, text, _length(compressor.model))
    most = min(TOKENS, compressor.max_tokens)
    return cut[:: max(1, -(-cut.numel() // most))]


def learn_scores(
    model: Any, tokenizer: Any, texts: Tensor, progress: Progress | None = None
) -> None:
    """Add the maps that `evict="learned"` uses to a folded model, by a ridge regression per layer.
    texts: token ids [n, T] of `readings`, which the model reads twice."""
    ids = texts[:, : _length(model)]
    size = ids.shape[1]
    config = CacheConfig(evict=TEACHER, keep_tokens=1.0)
    runner = build_runner(model, config, num_slots=1, max_tokens=size, tokenizer=tokenizer)
    geometry = runner.pool.layout.spec.geometry
    width, heads = geometry.hidden_size + 1, geometry.num_kv_heads
    sums = [
        RegressionSums(
            *(
                torch.zeros(width, n, dtype=torch.float64, device=model.device)
                for n in (width, heads)
            )
        )
        for _ in range(geometry.num_layers)
    ]
    report = stage(progress, "scores")
    for done, window in enumerate(ids):
        for layer_sums, x, y in zip(sums, *_read(runner, window.tolist()), strict=True):
            layer_sums.add(x, y)
        if report is not None:
            report(done + 1, len(ids))
    layers: list[Any] = list(family_of(model.config).attentions(model))
    for attention, layer_sums in zip(layers, sums, strict=True):
        with torch.device(model.device):
            attention.add_score_map()
        attention.score_map.data = layer_sums.solved().to(attention.o_proj.weight.dtype)
        attention.score_map.requires_grad_(False)
    spec = spec_of(model)
    assert spec is not None, "a folded model"
    mark(model, spec, {**provenance_of(model), "scores": {"tokens": ids.numel()}})


def _length(model: Any) -> int:
    """The longest window that the model has positions to read twice."""
    limit = max_positions(model)
    return LENGTH if limit is None else min(LENGTH, (limit - WORDS) // 2)


def _read(runner: ModelRunner, ids: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """For each layer: hidden states with a one appended [T, D + 1], and log scores [T, Hk]."""
    with PagedSession(runner) as session, _recorded_inputs(runner) as inputs:
        session.read(ids, prompt=len(ids))
        assert runner.rescorer is not None
        hidden = [torch.cat(x) for x in inputs]
        runner.rescorer.score(session.sequence)
        metrics, _, _ = runner.eviction.tracked(session.sequence.open_slot)
    scores = metrics[0].clamp(min=LEAST).log()
    layout, layer_scores = runner.pool.layout, []
    for where in layout.layer_groups:
        heads = {head: i for i in range(where.start, where.stop) for head in layout.groups[i].heads}
        layer_scores.append(scores[[heads[head] for head in sorted(heads)]].mT)
    ones = [torch.cat((x, torch.ones_like(x[:, :1])), 1) for x in hidden]
    return ones, layer_scores


@contextmanager
def _recorded_inputs(runner: ModelRunner) -> Iterator[list[list[Tensor]]]:
    """Record the inputs [n, D] of every layer's attention, a tensor per step."""
    layers = list(runner.family.attentions(runner.model))
    inputs: list[list[Tensor]] = [[] for _ in layers]

    def recorder(steps: list[Tensor]) -> Any:
        def hook(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            steps.append((named["hidden_states"] if "hidden_states" in named else args[0])[0])

        return hook

    pairs = zip(layers, inputs, strict=True)
    hooks = [x.register_forward_pre_hook(recorder(y), with_kwargs=True) for x, y in pairs]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()
