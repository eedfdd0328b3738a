"""Gradients of a folded model on plain text, for whatever of it learns.

Rows are quantised as pages will hold them (`rows`). The loss is that of the text's next tokens, or
the divergence from a teacher's distribution of them. Shapes: n windows, B windows of a batch, T
tokens, N positions, D width, V vocabulary.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvfold.calibration.positions import shifting
from kvfold.compression.training.rows import QuantisedRows
from kvfold.layout import CacheSpec
from kvfold.models.adapter import Family
from kvfold.models.families import family_of
from kvfold.utils.errors import SettingError
from kvfold.utils.progress import Report
from kvfold.utils.versions import given

WARMUP = 0.1  # of all steps; then half a cosine to zero
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
    """The loss of each of `steps` batches of windows [B, T], in nats a token, while its gradient is
    in what requires one; whoever reads it changes that and clears the gradient.

    teacher: None for the loss of the text itself. at_once: windows of a batch that run together.
    Raises SettingError, with the way out, where the loss is no number.
    """
    turned = any(layer.keys == "post_rope" for layer in spec.layers)
    models = [x for x in (model, teacher) if x is not None]
    with shifting(family, *models) as shift:
        for step, ids in enumerate(batches):
            loss = 0.0
            for part in ids.to(model.device).split(at_once):
                if turned:  # other keys are rotated after the maps, and by tables that are kept
                    shift.draw(ids.shape[1])
                loss += _backward(model, teacher, spec, part, len(part) / len(ids))
            if not math.isfinite(loss):
                raise SettingError(f"recovery diverged at step {step + 1} of {steps}{way_out}")
            yield loss
            if progress is not None:
                progress(step + 1, steps)


def batches_of(windows: Tensor, size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """`steps` batches [B, T] of windows [n, T], without repetition until all were seen."""
    generator, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.int64)
    size = min(size, len(windows))
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(len(windows), generator=generator)
        yield windows[order[:size]]
        order = order[size:]


def schedule(step: int, steps: int) -> float:
    """Share of the rate: rises over the first WARMUP of the steps, then falls to zero."""
    rise = min(1.0, (step + 1) / max(1.0, WARMUP * steps))
    return rise * 0.5 * (1 + math.cos(math.pi * step / steps))


@torch.no_grad()
def mean_loss(model: Any, teacher: Any | None, spec: CacheSpec, windows: Tensor) -> float:
    """Nats a token of windows [n, T], in the sense of `gradients`."""
    total = 0.0
    for ids in windows.to(model.device).split(1):
        with _mixed(model):
            total += _loss(*_compared(model, teacher, spec, ids), _head(model))
    return total / len(windows)


def _backward(model: Any, teacher: Any | None, spec: CacheSpec, ids: Tensor, share: float) -> float:
    """Back-propagate a share of the loss on ids [B, T], and return that."""
    with _mixed(model):
        hidden, goal = _compared(model, teacher, spec, ids)
        gradient = torch.empty_like(hidden)
        loss = _loss(hidden.detach(), goal, _head(model), gradient)
    hidden.backward(gradient * share)
    return loss * share


def _mixed(model: Any) -> torch.autocast:
    """bf16 matrix products on a GPU and in a 16-bit model."""
    mixed = model.device.type == "cuda" or model.dtype != torch.float32
    return torch.autocast(model.device.type, torch.bfloat16, enabled=mixed)


def _head(model: Any) -> Any:
    return partial(family_of(model.config).logits, model)


def _compared(
    model: Any, teacher: Any | None, spec: CacheSpec, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Last hidden states [N, D] of ids [B, T], and what logits of them are compared with: the
    teacher's [N, D], or without one the next tokens [N]."""
    cache = QuantisedRows(spec.layers)
    hidden = model.base_model(input_ids=ids, **given(cache), use_cache=True)[0]
    if teacher is None:
        return hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    with torch.no_grad():
        wanted = teacher.base_model(input_ids=ids, use_cache=False)[0]
    return hidden.flatten(0, 1), wanted.flatten(0, 1)


def _loss(hidden: Tensor, goal: Tensor, head: Any, gradient: Tensor | None = None) -> float:
    """Mean nats of positions as `_compared` has them; the gradient at hidden [N, D] is written to
    `gradient`. Logits exist for a few positions at a time: V is large."""
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
    """Summed over positions: cross entropy of tokens, or KL from a teacher's hidden states."""
    found = head(hidden).float()
    if not goal.is_floating_point():
        return cross_entropy(found, goal, reduction="sum")
    wanted, found = head(goal).detach().float().log_softmax(-1), found.log_softmax(-1)
    return (wanted.exp() * (wanted - found)).sum()
