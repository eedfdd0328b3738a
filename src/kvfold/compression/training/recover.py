"""Recovery: trains a folded model's maps to match the original model's next-token distribution.

A basis minimises a second-order loss layer by layer. Distillation also sees the errors of all
layers together, and large ones. Cache entries are quantised as pages will store them. Only maps are
trained: weights that a checkpoint of the original has stay as they are.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvfold.compression.training.training import batches_of, gradients, schedule
from kvfold.config import Setting
from kvfold.layout import CacheSpec
from kvfold.models.adapter import Family, HFAttention
from kvfold.utils.progress import Report

BATCH = 16  # windows per step
AT_ONCE = 8192  # tokens whose activations exist at a time
PASSES = 4  # over the text; more of them give a warning
RATE = 0.012  # learning rate, relative to a map's rms, times the root of the first step's loss
_STACKS = {"key_up": "key_latents", "key_down": "key_latents", "value_up": "value_latents"}

Map = tuple[torch.nn.Parameter, Tensor | None]  # a map, and the mask of its columns in use


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

    windows [n, T]: token ids, drawn without repetition until all were seen. The loss is the KL
    divergence of the model's next-token distribution from the teacher's. Maps are trained in fp32
    (bf16 matrix products on a GPU and in a 16-bit model) and converted back to their dtype. Returns
    the loss (nats/token) of the first step, and the mean over the last tenth of the steps. Raises
    ValueError where the loss diverges.
    """
    folded = [x for x in family.attentions(model) if isinstance(x, HFAttention)]
    attentions = [x for x in folded if x.spec.keys != "plain"]  # a skipped layer has no maps
    losses: list[float] = []
    with _learning(model, teacher, attentions) as maps:
        optimiser = torch.optim.Adam([{"params": [p]} for p, _ in maps], betas=(0.9, 0.98))
        sizes = [max(float(p.detach().square().mean().sqrt()), 1e-3) for p, _ in maps]
        for loss in gradients(
            model,
            teacher,
            family,
            spec,
            batches_of(windows, BATCH, steps, seed),
            steps,
            at_once=max(1, AT_ONCE // windows.shape[1]),
            way_out=", and the maps with it: load the model again, and compress it without recovery"
            " or keep more of the cache",
            progress=progress,
        ):
            losses.append(loss)
            rate = RATE * math.sqrt(max(losses[0], 0.0)) * schedule(len(losses) - 1, steps)
            for group, size in zip(optimiser.param_groups, sizes, strict=True):
                group["lr"] = rate * size
            for parameter, used in maps:
                if used is not None and parameter.grad is not None:
                    parameter.grad *= used
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
    last = losses[-max(1, steps // 10) :]
    return losses[0], sum(last) / len(last)


def check_steps(steps: int) -> None:
    """Raises SettingError for a number of steps that is not legal."""
    legal = Setting(least=0, unit="steps", hint="0 leaves the maps alone")
    legal.check("recover", steps, int)


def warn_of_passes(steps: int, windows: int) -> None:
    """Warn where the steps read the windows too often: maps then overfit that text.

    Qwen2.5-Coder-1.5B after 14 passes lost .0170 nats/token on Wikipedia, without recovery .0135.
    """
    passes = steps * BATCH / windows
    if passes > PASSES:
        warnings.warn(
            f"recovery reads its text {passes:.0f} times, and may fit that text alone: give more"
            f" with `calib`, or at most {max(1, int(PASSES * windows / BATCH))} steps",
            stacklevel=2,
        )


@contextmanager
def _learning(model: Any, teacher: Any, attentions: Sequence[HFAttention]) -> Iterator[list[Map]]:
    """Within it, maps are in fp32 and only they take gradients, and models are in eval mode. All of
    that is restored at the end."""
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


def _maps(attention: HFAttention) -> Iterator[Map]:
    """The parameters that hold maps; for padded stacks, with the mask of their columns in use."""
    names = ["down_proj.weight", "down_proj.bias", "key_shift", "key_mean", "o_proj.bias"]
    names += ["o_proj.weight"] if attention.spec.values == "fused" else []
    names += ["q_proj.weight", "q_proj.bias"] if attention.query_folded else []
    parameters = dict(attention.named_parameters())
    for name in names:
        if name in parameters and parameters[name].numel():
            yield parameters[name], None
    for name, latents in _STACKS.items():
        if name in parameters and parameters[name].numel():
            stack = parameters[name]
            ranks = torch.tensor([x.rank for x in getattr(attention.spec, latents)])
            used = torch.arange(stack.shape[-1]) < ranks[:, None]
            yield stack, used[:, None].to(stack.device)
