"""The training loop of folded models: losses and gradients on plain text.

Cache entries are quantised as pages will store them (`rounded_cache`). The loss is the
cross-entropy of the text, or the KL divergence from a teacher's next-token distribution. Shapes: n
windows, B windows of a batch, T tokens, N positions, D width, V vocabulary.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvfold.calibration.positions import shifting
from kvfold.compression.training.rounded_cache import RoundOnlyCache
from kvfold.layout import CacheSpec
from kvfold.models.adapter import Family
from kvfold.models.families import family_of
from kvfold.utils.errors import SettingError
from kvfold.utils.progress import Report
from kvfold.utils.versions import cache_argument

WARMUP = 0.1  # share of all steps
_CHUNK = 2048  # positions whose logits exist at a time


def gradients(
    model: Any,
    teacher: Any | None,
    family: type[Family],
    spec: CacheSpec,
    batches: Iterator[Tensor],
    steps: int,
    *,
    at_once: int,
    way_out: str,
    progress: Report | None = None,
) -> Iterator[float]:
    """Yield the loss (nats/token) of each of `steps` batches of windows [B, T].

    At each yield, parameters that require gradients have them; the caller updates the parameters
    and clears the gradients. teacher: None for the cross-entropy of the text. at_once: windows of a
    batch that run together. Raises SettingError, which ends with `way_out`, for a loss that is not
    finite.
    """
    after_rope = any(layer.keys == "post_rope" for layer in spec.layers)
    models = [x for x in (model, teacher) if x is not None]
    with shifting(family, *models) as shift:
        for step, ids in enumerate(batches):
            loss = 0.0
            for part in ids.to(model.device).split(at_once):
                if after_rope:  # keys before RoPE are rotated after the maps, by fixed tables
                    shift.draw(ids.shape[1])
                loss += _backward(model, teacher, spec, part, len(part) / len(ids))
            if not math.isfinite(loss):
                raise SettingError(f"recovery diverged at step {step + 1} of {steps}{way_out}")
            yield loss
            if progress is not None:
                progress(step + 1, steps)


def batches_of(windows: Tensor, size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Yield `steps` batches [B, T] of windows [n, T], without repetition until all were seen."""
    generator, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.int64)
    size = min(size, len(windows))
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(len(windows), generator=generator)
        yield windows[order[:size]]
        order = order[size:]


def schedule(step: int, steps: int) -> float:
    """The factor of the learning rate: it rises over the first WARMUP of the steps, then falls to
    zero by half a cosine."""
    rise = min(1.0, (step + 1) / max(1.0, WARMUP * steps))
    return rise * 0.5 * (1 + math.cos(math.pi * step / steps))


@torch.no_grad()
def mean_loss(model: Any, teacher: Any | None, spec: CacheSpec, windows: Tensor) -> float:
    """The loss of `gradients` (nats/token), averaged over windows [n, T]."""
    total = 0.0
    for ids in windows.to(model.device).split(1):
        with _mixed(model):
            total += _loss(*_compared(model, teacher, spec, ids), _head(model))
    return total / len(windows)


def _backward(model: Any, teacher: Any | None, spec: CacheSpec, ids: Tensor, share: float) -> float:
    """Back-propagate `share` times the loss on ids [B, T]. Returns that product."""
    with _mixed(model):
        hidden, goal = _compared(model, teacher, spec, ids)
        gradient = torch.empty_like(hidden)
        loss = _loss(hidden.detach(), goal, _head(model), gradient)
    hidden.backward(gradient * share)
    return loss * share


def _mixed(model: Any) -> torch.autocast:
    """Within it, matrix products are in bf16 on a GPU and in a 16-bit model."""
    mixed = model.device.type == "cuda" or model.dtype != torch.float32
    return torch.autocast(model.device.type, torch.bfloat16, enabled=mixed)


def _head(model: Any) -> Any:
    """The function from hidden states to logits."""
    return partial(family_of(model.config).logits, model)


def _compared(
    model: Any, teacher: Any | None, spec: CacheSpec, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Last hidden states [N, D] of ids [B, T], and the target: the teacher's hidden states [N, D],
    or without a teacher the next tokens [N]."""
    cache = RoundOnlyCache(spec.layers)
    hidden = model.base_model(input_ids=ids, **cache_argument(cache), use_cache=True)[0]
    if teacher is None:
        return hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    with torch.no_grad():
        wanted = teacher.base_model(input_ids=ids, use_cache=False)[0]
    return hidden.flatten(0, 1), wanted.flatten(0, 1)


def _loss(hidden: Tensor, goal: Tensor, head: Any, gradient: Tensor | None = None) -> float:
    """Mean loss (nats) of the positions of `_compared`. The gradient at hidden [N, D] is written to
    `gradient`. Logits exist for _CHUNK positions at a time, since V is large."""
    total, count = hidden.new_zeros((), dtype=torch.float32), len(hidden)
    for begin in range(0, count, _CHUNK):
        place = slice(begin, begin + _CHUNK)
        leaf = hidden[place].clone().requires_grad_(gradient is not None)
        loss = _nats(leaf, goal[place], head) / count
        if gradient is not None:
            gradient[place] = torch.autograd.grad(loss, leaf)[0]
        total += loss.detach()
    return float(total)


def _nats(hidden: Tensor, goal: Tensor, head: Any) -> Tensor:
    """Sum over positions of the cross-entropy of tokens, or of the KL divergence from the logits of
    a teacher's hidden states."""
    logits = head(hidden).float()
    if not goal.is_floating_point():
        return cross_entropy(logits, goal, reduction="sum")
    expected, predicted = head(goal).detach().float().log_softmax(-1), logits.log_softmax(-1)
    return (expected.exp() * (expected - predicted)).sum()
