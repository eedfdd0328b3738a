"""Recovery: a folded model's maps learn from the model they were folded from, on plain text.

What the closed form of a basis leaves out, many layers' errors together and far from second order,
a few hundred steps of distillation see. Rows are quantised as pages will hold them; the gradient
passes the quantiser as if it were not there (straight-through, Bengio et al. 2013). Only maps move:
weights that a checkpoint of the original has stay as they are. Shapes: B windows, T tokens, R
numbers of a row, D width, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvfold.compression.positions import shifting
from kvfold.compression.progress import Report
from kvfold.config import Setting
from kvfold.formats.integers import SCALES_IN, dequantize, quantize, scale_of
from kvfold.models.adapter import Family, HFAttention
from kvfold.models.families import family_of
from kvfold.ops.common.rotation import rotation
from kvfold.spec import CacheSpec, LayerSpec, Tiers

BATCH = 16  # windows a step
RATE = 0.012  # of a map's own size a step, times the root of the first step's loss
WARMUP = 0.1  # of all steps; then half a cosine to zero
_CHUNK = 2048  # positions whose logits exist at a time
_STACKS = {"key_up": "key_latents", "key_down": "key_latents", "value_up": "value_latents"}

Map = tuple[torch.nn.Parameter, Tensor | None]  # and where a padded stack is used


def recover(
    model: Any,
    teacher: Any,
    family: type[Family],
    spec: CacheSpec,
    windows: Tensor,
    steps: int,
    *,
    seed: int = 0,
    progress: Report | None = None,
) -> tuple[float, float]:
    """Train the maps of `model`, folded to `spec`, in place, for `steps` batches of `windows`.

    windows [n, T] token ids, drawn without repetition until all were seen; the loss is the KL
    divergence of the model's next-token distribution from the teacher's. Maps are trained in fp32
    (bf16 matrix products on a GPU and in a 16-bit model) and returned in their own dtype. Returns
    the loss in nats a token of the first and over the last tenth of the steps. Raises ValueError
    where it diverges.
    """
    folded = [x for x in family.attentions(model) if isinstance(x, HFAttention)]
    attentions = [x for x in folded if x.spec.keys != "plain"]  # a skipped layer has no maps
    turned = any(layer.keys == "post_rope" for layer in spec.layers)
    losses: list[float] = []
    with (
        _learning(model, teacher, attentions) as maps,
        shifting(family, model, teacher) as shift,
    ):
        optimiser = torch.optim.Adam([{"params": [p]} for p, _ in maps], betas=(0.9, 0.98))
        sizes = [max(float(p.detach().square().mean().sqrt()), 1e-3) for p, _ in maps]
        for step, ids in enumerate(_batches(windows, steps, seed)):
            if turned:  # other keys are rotated after the maps, and by tables that are kept
                shift.draw(ids.shape[1])
            losses.append(_backward(model, teacher, spec, ids.to(model.device)))
            if not math.isfinite(losses[-1]):
                raise ValueError(
                    f"recovery diverged at step {step + 1} of {steps}, and the maps with it: load"
                    " the model again, and compress it without recovery or keep more of the cache"
                )
            rate = RATE * math.sqrt(max(losses[0], 0.0)) * _schedule(step, steps)
            for group, size in zip(optimiser.param_groups, sizes, strict=True):
                group["lr"] = rate * size
            for parameter, used in maps:
                if used is not None and parameter.grad is not None:
                    parameter.grad *= used
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            if progress is not None:
                progress(step + 1, steps)
    last = losses[-max(1, steps // 10) :]
    return losses[0], sum(last) / len(last)


def check_steps(steps: int) -> None:
    """Raises SettingError for a number of steps that cannot be done."""
    legal = Setting(least=0, unit="steps", hint="0 leaves the maps alone")
    legal.check("recover", steps, int)


@contextmanager
def _learning(model: Any, teacher: Any, attentions: Sequence[HFAttention]) -> Iterator[list[Map]]:
    """Maps in fp32, which alone take gradients, of models in eval mode; put back at the end."""
    dtype, training = model.dtype, (model.training, teacher.training)
    for attention in attentions:
        attention.float()
    maps = [pair for attention in attentions for pair in _maps(attention)]
    others = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        model.eval().requires_grad_(False)
        teacher.eval()
        for parameter, _ in maps:
            parameter.requires_grad_(True)
        yield maps
    finally:
        model.train(training[0]).requires_grad_(False)
        teacher.train(training[1])
        for parameter in others:
            parameter.requires_grad_(True)
        for attention in attentions:
            attention.to(dtype)


class StoredRows(DynamicCache):
    """A cache that keeps rows as pages would hold them, for all that transformers does with one."""

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        super().__init__()
        self.specs = layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *rest: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Rows [B, 1, T, R] travel as keys."""
        rows = through_bits(key_states, self.specs[layer_idx])
        return super().update(rows, value_states, layer_idx, *rest, **named)


class QuantisedRows(StoredRows):
    """One that keeps nothing and gives back what it would have stored."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return through_bits(key_states, self.specs[layer_idx]), value_states


def through_bits(rows: Tensor, spec: LayerSpec) -> Tensor:
    """rows [.., R] as planned tiers give them back; latents without a plan as they are."""
    planned = [(latent.rank, latent.tiers) for latent in spec.latents]
    if not any(tiers for _, tiers in planned):
        return rows
    parts = rows.split([rank for rank, _ in planned], -1)
    coded = [_coded(x, tiers or ()) for x, (_, tiers) in zip(parts, planned, strict=True)]
    return torch.cat(coded, -1)


def _coded(x: Tensor, tiers: Tiers) -> Tensor:
    """One latent's numbers [.., r]; each tier is turned, as the engine does at load."""
    if not tiers:
        return x
    parts = x.float().split([width for width, _ in tiers], -1)
    found = [_tier(part, bits) for part, (_, bits) in zip(parts, tiers, strict=True)]
    return torch.cat(found, -1).to(x.dtype)


def _tier(x: Tensor, bits: int) -> Tensor:
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        turn = _rotation(x.shape[-1], x.device)
        codes, scale, zero = quantize(x @ turn, bits, False, SCALES_IN[1])
        error = dequantize(codes, scale_of(scale, bits), zero, bits) @ turn.mT - x
    return x + error


@lru_cache
def _rotation(n: int, device: torch.device) -> Tensor:
    return rotation(n).float().to(device)


def _maps(attention: HFAttention) -> Iterator[Map]:
    """Parameters that hold maps, and where stacks are padded, which of their columns are used."""
    names = ["down_proj.weight", "down_proj.bias", "key_shift", "key_mean", "o_proj.bias"]
    names += ["o_proj.weight"] if attention.spec.values == "fused" else []
    names += ["q_proj.weight", "q_proj.bias"] if attention.query_folded else []
    own = dict(attention.named_parameters())
    for name in names:
        if name in own and own[name].numel():
            yield own[name], None
    for name, latents in _STACKS.items():
        if name in own and own[name].numel():
            ranks = torch.tensor([x.rank for x in getattr(attention.spec, latents)])
            used = torch.arange(own[name].shape[-1]) < ranks[:, None]
            yield own[name], used[:, None].to(own[name].device)


def _batches(windows: Tensor, steps: int, seed: int) -> Iterator[Tensor]:
    """`steps` batches [B, T] of windows [n, T], in random order."""
    generator, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.int64)
    size = min(BATCH, len(windows))
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(len(windows), generator=generator)
        yield windows[order[:size]]
        order = order[size:]


def _schedule(step: int, steps: int) -> float:
    """Share of the rate: rises over the first WARMUP of the steps, then falls to zero."""
    rise = min(1.0, (step + 1) / max(1.0, WARMUP * steps))
    return rise * 0.5 * (1 + math.cos(math.pi * step / steps))


def _backward(model: Any, teacher: Any, spec: CacheSpec, ids: Tensor) -> float:
    """Back-propagate the divergence on ids [B, T]; nats a token."""
    mixed = ids.device.type == "cuda" or model.dtype != torch.float32
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=mixed):
        with torch.no_grad():
            wanted = teacher.base_model(input_ids=ids, use_cache=False).last_hidden_state
        cache = QuantisedRows(spec.layers)
        out = model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
        hidden = out.last_hidden_state
        head = partial(family_of(model.config).logits, model)
        loss, gradient = _divergence(hidden.detach(), wanted, head)
    hidden.backward(gradient)
    return loss


def _divergence(hidden: Tensor, wanted: Tensor, head: Any) -> tuple[float, Tensor]:
    """KL(teacher, model) in nats a token of hidden states [B, T, D], and its gradient at the
    model's. Logits exist for a few positions at a time: V is large."""
    gradient, total, count = torch.empty_like(hidden), 0.0, hidden.shape[0] * hidden.shape[1]
    flat, target, out = (x.flatten(0, 1) for x in (hidden, wanted, gradient))
    for begin in range(0, count, _CHUNK):
        place = slice(begin, begin + _CHUNK)
        leaf = flat[place].clone().requires_grad_()
        goal = head(target[place]).detach().float().log_softmax(-1)
        found = head(leaf).float().log_softmax(-1)
        loss = (goal.exp() * (goal - found)).sum() / count
        out[place] = torch.autograd.grad(loss, leaf)[0]
        total = total + loss.detach()
    return float(total), gradient
