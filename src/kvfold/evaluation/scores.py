"""Scores that are learned: from a token's hidden states, layer by layer, to what a second reading
of the context makes of its rows, so that nobody has to read it again.

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
TOKENS, LENGTH = 16384, 1024  # most that are read, and of a window
WORDS = 64  # positions that ask for a repetition
RIDGE = 1e-3  # of the mean squared hidden state
LEAST = 1e-6  # a score below it is as good as none


@dataclass
class Sums:
    """Of the products of hidden states with a one, x [T, D + 1], and log scores y [T, Hk]; fp64."""

    xx: Tensor
    xy: Tensor

    def add(self, x: Tensor, y: Tensor) -> None:
        x, y = x.double(), y.double()
        self.xx += x.mT @ x
        self.xy += x.mT @ y

    def solved(self) -> Tensor:
        """Ridge regression [Hk, D + 1]; the last column, of the one, is not held small."""
        size = len(self.xx) - 1
        ridge = torch.full_like(self.xx[0], RIDGE * float(self.xx.diagonal()[:size].mean()))
        ridge[size] = 0
        return torch.linalg.solve(self.xx + ridge.diag(), self.xy).mT


def check_learnable(config: Any, target: Target) -> None:
    """Raises SettingError for a model from whose cache nothing is evicted."""
    if target.hybrid is not None:
        raise SettingError(
            "`learn_scores`: nothing is evicted from rows of two widths (`hybrid`): leave one out"
        )
    if any(attention_windows(config)):
        raise SettingError(
            "`learn_scores`: this model's sliding window already drops old tokens, and nothing else"
            " is evicted: leave it out"
        )


def readings(compressor: Compressor) -> Tensor:
    """Windows [n, T] to learn from, spread over the calibration text, each as a prompt is: the
    tokenizer's `leading_tokens`, such as BOS, then text alone. Calibration's own have them between
    documents too, and what attention makes of that is no guide to a prompt."""
    text = calibration_text(files_of(compressor.calib), compressor.tokenizer)
    cut = windows(compressor.tokenizer, text, _length(compressor.model))
    most = min(TOKENS, compressor.max_tokens)
    return cut[:: max(1, -(-cut.numel() // most))]


def learn_scores(
    model: Any, tokenizer: Any, texts: Tensor, progress: Progress | None = None
) -> None:
    """Give a folded model the maps that `evict="learned"` reads; texts [n, T]: token ids of
    `readings`, read twice. Closed form, one ridge regression a layer."""
    ids = texts[:, : _length(model)]
    size = ids.shape[1]
    config = CacheConfig(evict=TEACHER, keep_tokens=1.0)
    runner = build_runner(model, config, num_slots=1, max_tokens=size, tokenizer=tokenizer)
    geometry = runner.pool.layout.spec.geometry
    width, heads = geometry.hidden_size + 1, geometry.num_kv_heads
    sums = [
        Sums(
            *(
                torch.zeros(width, n, dtype=torch.float64, device=model.device)
                for n in (width, heads)
            )
        )
        for _ in range(geometry.num_layers)
    ]
    report = stage(progress, "scores")
    for done, window in enumerate(ids):
        for own, x, y in zip(sums, *_read(runner, window.tolist()), strict=True):
            own.add(x, y)
        if report is not None:
            report(done + 1, len(ids))
    layers: list[Any] = list(family_of(model.config).attentions(model))
    for attention, own in zip(layers, sums, strict=True):
        with torch.device(model.device):
            attention.add_score_map()
        attention.score_map.data = own.solved().to(attention.o_proj.weight.dtype)
        attention.score_map.requires_grad_(False)
    spec = spec_of(model)
    assert spec is not None, "a folded model"
    mark(model, spec, {**provenance_of(model), "scores": {"tokens": ids.numel()}})


def _length(model: Any) -> int:
    """Most tokens of a window that can be read twice."""
    limit = max_positions(model)
    return LENGTH if limit is None else min(LENGTH, (limit - WORDS) // 2)


def _read(runner: ModelRunner, ids: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Of every layer: hidden states with a one [T, D + 1], and log scores [T, Hk]."""
    with PagedSession(runner) as session, _seen(runner) as seen:
        session.read(ids, prompt=len(ids))
        assert runner.rescorer is not None
        hidden = [torch.cat(x) for x in seen]
        runner.rescorer.score(session.sequence)
        metrics, _, _ = runner.eviction.tracked(session.sequence.open_slot)
    scores = metrics[0].clamp(min=LEAST).log()
    layout, found = runner.pool.layout, []
    for where in layout.layer_groups:
        heads = {head: i for i in range(where.start, where.stop) for head in layout.groups[i].heads}
        found.append(scores[[heads[head] for head in sorted(heads)]].mT)
    ones = [torch.cat((x, torch.ones_like(x[:, :1])), 1) for x in hidden]
    return ones, found


@contextmanager
def _seen(runner: ModelRunner) -> Iterator[list[list[Tensor]]]:
    """The hidden states [n, D] that every layer's attention takes, one step after another."""
    layers = list(runner.family.attentions(runner.model))
    seen: list[list[Tensor]] = [[] for _ in layers]

    def keep(own: list[Tensor]) -> Any:
        def hook(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            own.append((named["hidden_states"] if "hidden_states" in named else args[0])[0])

        return hook

    each = zip(layers, seen, strict=True)
    hooks = [x.register_forward_pre_hook(keep(own), with_kwargs=True) for x, own in each]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
