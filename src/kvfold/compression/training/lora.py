"""LoRA on a folded model: low-rank additions learn on plain text, and are merged (Palu App. E).

They stand beside the linear layers of a block that are not compressed, W_Q, W_O and the MLP's, and
W_K where whole keys are computed. So rows, their maps and what a token costs stay as they are.
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

HELD = 8  # most windows that nothing learns from
LOWER = ": take a lower `learning_rate`"


def check_installed() -> None:
    """Raises ValueError where PEFT, an extra, is missing."""
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

    windows [n, T] token ids, n at least 4, of which a fourth, HELD at most, is not learnt. teacher:
    the original, whose distribution is learnt instead of the text. dtype: that the model will be
    saved in, to which what is merged is rounded. Returns the loss on the windows that are not
    learnt before, and after that, in nats a token. What Palu leaves to SliceGPT (AdamW's settings,
    dropout, a step every four windows) is as in that one's release. Raises SettingError
    where it diverges, and the model is as it was.
    """
    held = torch.arange(len(windows)) % max(4, -(-len(windows) // HELD)) == 0
    steps, learnt = settings.steps, windows[~held]
    before = mean_loss(model, teacher, spec, windows[held])
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
        if not math.isfinite(mean_loss(model.eval(), teacher, spec, windows[held])):
            raise SettingError(f"recovery diverged at its last step{LOWER}")
        adapters.merge_adapter()
        _round(model, dtype)
        after = mean_loss(model, teacher, spec, windows[held])
    return before, after


@torch.no_grad()
def _round(model: Any, dtype: torch.dtype | None) -> None:
    """Weights to what a dtype has of them, in their own."""
    for x in model.parameters() if dtype is not None else ():
        x.copy_(x.to(dtype))


def adapted(model: Any, family: type[Family], maps: bool) -> list[str]:
    """Names of the linear layers that get adapters; maps: those that make rows, too."""
    makes_rows = {
        id(x.down_proj)
        for x in family.attentions(model)
        if isinstance(x, HFAttention) and x.linear_width and x.spec.keys != "plain"
    }
    left_out = set() if maps else makes_rows
    in_blocks = {id(x) for layer in family.layers(model) for x in layer.modules()} - left_out
    return [
        name
        for name, x in model.named_modules()
        if isinstance(x, nn.Linear) and id(x) in in_blocks and x.weight.numel()
    ]


@contextmanager
def _adapters(model: Any, family: type[Family], settings: LoRA) -> Iterator[Any]:
    """PEFT's adapters in a model that trains, where nothing else takes gradients; taken out at the
    end, when only what was merged is left."""
    from peft import LoraConfig, get_peft_model

    training = model.training
    flags = [(x, x.requires_grad) for x in model.parameters()]
    names = adapted(model, family, settings.maps)
    own = [(name, model.get_submodule(name)) for name in names]
    config = LoraConfig(
        r=settings.rank, lora_alpha=settings.rank, lora_dropout=0.1, target_modules=names
    )
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # transformers' of what PEFT asks it
                adapters = get_peft_model(model, config)
            model.train()
            yield adapters
        finally:  # PEFT's `unload` needs what failed halfway
            for name, layer in own:
                model.set_submodule(name, layer)
            vars(model).pop("peft_config", None)
            model.train(training)
            for parameter, flag in flags:
                parameter.requires_grad_(flag)
