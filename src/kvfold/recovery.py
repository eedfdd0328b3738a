"""`kvfold.recover`: trains LoRA adapters on a compressed checkpoint, and merges them."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kvfold.api import check_files, fill, stored_dtype
from kvfold.calibration.text import training_windows
from kvfold.compression.training.lora import HELD, check_installed, finetune
from kvfold.config import LoRA, check_types, settings_of
from kvfold.hub.checkpoint import mark, provenance_of, saved_spec
from kvfold.hub.loading import load, load_config, load_tokenizer
from kvfold.models.families import family_of
from kvfold.utils.errors import SettingError
from kvfold.utils.files import new_directory, writing
from kvfold.utils.progress import Progress, stage


def recover(
    name: str | Path,
    *,
    output: Path | str,
    text: list[str | Path] | None = None,
    original: str | None = None,
    device: str | None = None,
    dtype: str | torch.dtype = "auto",
    progress: Progress | None = None,
    **settings: Any,
) -> Any:
    """Train the weights of a compressed checkpoint that compression left as they were, by LoRA.

    name: a compressed checkpoint. output: a new directory, written completely or not at all. text:
    files to learn instead of the packaged calibration text. original: the model that the checkpoint
    was compressed from; its next-token distribution is learnt instead of the text (Palu App. E
    learns the text). settings: those of `LoRA`. Needs PEFT (`kvfold[recover]`). Returns the model.

    Raises ValueError for a model that is not compressed, an original of another shape, an output
    that is in use, text of fewer than 4 windows, and a loss that diverges.
    """
    check_types(recover, {"name": name, "output": output, "text": text, "original": original})
    lora = _settings(settings)
    check_installed()
    check_files(text, None, output)
    with new_directory(Path(output)) as folder:
        config = load_config(str(name))
        spec = saved_spec(config)
        if spec is None:
            raise ValueError(
                f"{name} is not compressed, so there is nothing to recover: `kvfold"
                " compress --fold` first"
            )
        if original is not None:
            _check_original(original, config)
        tokenizer = load_tokenizer(str(name))
        count = lora.steps * lora.batch + HELD
        windows = training_windows(tokenizer, config, text, count)
        model = load(name, dtype=dtype, device=device)
        teacher = load(original, dtype=dtype, device=device) if original is not None else None
        stored = stored_dtype(config, dtype)
        before, after = finetune(
            model,
            family_of(config),
            spec,
            windows,
            lora,
            teacher=teacher,
            dtype=stored,
            progress=stage(progress, "recover"),
        )
        result = {"tokens": windows.numel(), "original": original, "before": before, "after": after}
        mark(model, spec, {**provenance_of(model), "lora": {**asdict(lora), **result}})
        with writing(Path(output)):
            fill(folder, model, tokenizer, stored)
    return model


def _settings(settings: dict[str, Any]) -> LoRA:
    if unknown := settings.keys() - settings_of(LoRA).keys():
        legal = ", ".join(settings_of(LoRA))
        raise ValueError(f"unknown settings: {', '.join(sorted(unknown))}; legal: {legal}")
    return LoRA(**settings)


def _check_original(original: str, config: Any) -> None:
    """Raises SettingError where `original` cannot be what a model of this config was compressed
    from."""
    original_config = load_config(original)
    if saved_spec(original_config) is not None:
        raise SettingError(f"{original} is compressed, too: `original` is what it was made from")
    family = family_of(config)
    same_type = original_config.model_type == config.model_type
    same = same_type and original_config.vocab_size == config.vocab_size
    if not same or family.geometry(original_config) != family.geometry(config):
        raise SettingError(f"{original} has another shape: `original` is what it was made from")
