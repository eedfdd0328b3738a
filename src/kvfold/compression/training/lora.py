"""LoRA on a folded model: adapters learn on plain text, and are merged (Palu App. E).

They are added to the linear layers of a block that are not compressed: W_Q, W_O, those of the MLP,
and W_K where it computes full keys. So the cache, its maps and its size stay as they are.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.compression.training.training import batches_of, gradients, mean_loss, schedule
from kvfold.config import LoRA
from kvfold.layout import CacheSpec
from kvfold.models.adapter import Family, HFAttention
from kvfold.utils.errors import SettingError
from kvfold.utils.progress import Report

HELD = 8  # most windows that are held out of training
LOWER = ": take a lower `learning_rate`"


def check_installed() -> None:
    """Raises ValueError where the optional package PEFT is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        hint = 'pip install "kvfold[recover]"'
        raise ValueError(f"recover: {error.name} is not installed; run: {hint}") from None


def finetune(
    model: Any,
    family: type[Family],
    spec: CacheSpec,
    windows: Tensor,
    settings: LoRA,
    *,
    teacher: Any | None = None,
    dtype: torch.dtype | None = None,
    progress: Report | None = None,
) -> tuple[float, float]:
    """Train adapters on `model`, folded to `spec`, and merge them into it, in place.

    windows [n, T]: token ids, n at least 4; a quarter of them, HELD at most, is held out. teacher:
    the original model, whose distribution is learnt instead of the text. dtype: of the checkpoint
    to be saved, to which merged weights are rounded. What Palu leaves open (AdamW's settings,
    dropout, a step every four windows) is as in SliceGPT's release. Returns the loss (nats/token)
    on the held-out windows before and after. Raises SettingError where training diverges; the model
    is then unchanged.
    """
    held_out = torch.arange(len(windows)) % max(4, -(-len(windows) // HELD)) == 0
    steps, learnt = settings.steps, windows[~held_out]
    before = mean_loss(model, teacher, spec, windows[held_out])
    with _adapters(model, family, settings) as adapters:
        parameters = [x for x in model.parameters() if x.requires_grad]
        optimiser = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.01)
        for step, _ in enumerate(
            gradients(
                model,
                teacher,
                family,
                spec,
                batches_of(learnt, settings.batch, steps, settings.seed),
                steps,
                at_once=1,
                way_out=LOWER,
                progress=progress,
            )
        ):
            optimiser.param_groups[0]["lr"] = settings.learning_rate * schedule(step, steps)
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if not math.isfinite(mean_loss(model.eval(), teacher, spec, windows[held_out])):
            raise SettingError(f"recovery diverged at its last step{LOWER}")
        adapters.merge_adapter()
        _round(model, dtype)
        after = mean_loss(model, teacher, spec, windows[held_out])
    return before, after


@torch.no_grad()
def _round(model: Any, dtype: torch.dtype | None) -> None:
    """Round weights to the precision of `dtype`, in place, without changing their dtype."""
    for x in model.parameters() if dtype is not None else ():
        x.copy_(x.to(dtype))


def adapted(model: Any, family: type[Family], maps: bool) -> list[str]:
    """Names of the linear layers that get adapters. maps: include those that compute cache
    entries."""
    makes_entries = {
        id(x.down_proj)
        for x in family.attentions(model)
        if isinstance(x, HFAttention) and x.linear_width and x.spec.keys != "plain"
    }
    left_out = set() if maps else makes_entries
    in_blocks = {id(x) for layer in family.layers(model) for x in layer.modules()} - left_out
    return [
        name
        for name, x in model.named_modules()
        if isinstance(x, nn.Linear) and id(x) in in_blocks and x.weight.numel()
    ]


@contextmanager
def _adapters(model: Any, family: type[Family], settings: LoRA) -> Iterator[Any]:
    """Within it, the model is in training mode and PEFT's adapters alone take gradients. At the end
    the adapters are removed; what was merged stays."""
    from peft import LoraConfig, get_peft_model

    training = model.training
    flags = [(x, x.requires_grad) for x in model.parameters()]
    names = adapted(model, family, settings.maps)
    layers = [(name, model.get_submodule(name)) for name in names]
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.rank, lora_dropout=0.1, target_modules=names
    )
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", FutureWarning
                )  # transformers warns about PEFT's use
                adapters = get_peft_model(model, config)
            model.train()
            yield adapters
        finally:  # not PEFT's `unload`, which fails after an incomplete start
            for name, layer in layers:
                model.set_submodule(name, layer)
            vars(model).pop("peft_config", None)
            model.train(training)
            for parameter, flag in flags:
                parameter.requires_grad_(flag)
