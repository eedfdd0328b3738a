"""Calibration text as windows of tokens. Shapes: n windows, T tokens of a window."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.calibration.documents import calibration_documents, shares
from kvfold.calibration.self_text import write
from kvfold.models.placed import input_device
from kvfold.models.rotary import position_limit
from kvfold.utils.errors import SettingError
from kvfold.utils.progress import Report
from kvfold.utils.text import (
    CHARACTERS_PER_TOKEN,
    check_ids,
    leading_tokens,
    longer,
    windows,
)

GPU_TOKENS, CPU_TOKENS = 32768, 12288  # calibrated on by default: see `default_tokens`
CALIBRATION_WINDOW = 1024
MIN_WINDOWS = 4


def calibration_text(calib: list[str | Path] | None, tokenizer: Any) -> str:
    """Running text of the documents of text files, or of the packaged ones."""
    return "\n\n".join(document.text for document in calibration_documents(calib, tokenizer))


def calibration_windows(
    tokenizer: Any, config: Any, calib: list[str | Path] | None, max_tokens: int
) -> Tensor:
    """Token windows [n, T].

    Documents follow each other, each behind the tokenizer's `leading_tokens`, as do windows. Where
    they hold more than `max_tokens`, every document gives its beginning, as `documents.shares`
    says.
    """
    if tokenizer is None:
        raise ValueError("a tokenizer is needed to read calibration text; pass tokenizer=")
    check_tokens(config, max_tokens)
    found = calibration_documents(calib, tokenizer)
    encoded = [document.encode(tokenizer) for document in found]
    pairs = zip(encoded, shares(found, [len(ids) for ids in encoded], max_tokens), strict=True)
    return _windows(tokenizer, config, [ids[:share] for ids, share in pairs])


def self_windows(
    model: Any, tokenizer: Any, max_tokens: int, seed: int = 0, progress: Report | None = None
) -> Tensor:
    """Token windows [n, T] of text that the model writes, as `self_text.write`."""
    if tokenizer is None:
        raise ValueError("a tokenizer is needed to write calibration text; pass tokenizer=")
    check_tokens(model.config, max_tokens)
    length = window_length(model.config)
    texts = write(model, tokenizer, max_tokens, length, seed=seed, progress=progress)
    return _windows(tokenizer, model.config, texts)[: max_tokens // length]


def _windows(tokenizer: Any, config: Any, texts: list[list[int]]) -> Tensor:
    """Texts of token ids, one after the other, as windows [n, T] that begin with its
    `leading_tokens`."""
    leading = leading_tokens(tokenizer)
    stream = [token for ids in texts for token in ids]
    length = window_length(config)
    count = len(stream) // length
    if count < MIN_WINDOWS:
        raise SettingError(
            f"the calibration text has {len(stream)} tokens, at least {MIN_WINDOWS * length} are "
            "needed: give more text with `calib`, or leave it out for the packaged text"
        )
    check_ids(stream, config.get_text_config(decoder=True).vocab_size)
    rows = torch.tensor(stream[: count * length]).view(count, length)
    rows[:, : len(leading)] = rows.new_tensor(leading)
    return rows


def training_windows(
    tokenizer: Any, config: Any, files: list[str | Path] | None, count: int
) -> Tensor:
    """Windows [n, T] of running text, `count` at most, spread evenly over all of it.

    Of the packaged calibration text where no files are given. Raises SettingError for text of fewer
    than MIN_WINDOWS.
    """
    text = calibration_text(files, tokenizer)
    length, part = window_length(config), len(text) // count
    if not longer(tokenizer, text, MIN_WINDOWS * length):
        raise SettingError(
            f"the text has fewer than {MIN_WINDOWS} windows of {length} tokens: give more `text`, "
            "or leave it out for the packaged one"
        )
    if part < 2 * CHARACTERS_PER_TOKEN * length:
        found = list(windows(tokenizer, text, length))
        picked = min(count, len(found))
        found = [found[i * len(found) // picked] for i in range(picked)]
    else:
        parts = (text[i * part : (i + 1) * part] for i in range(count))
        found = [windows(tokenizer, x, length, length)[0] for x in parts]
    rows = torch.stack(found)
    check_ids(rows.flatten().tolist(), config.get_text_config(decoder=True).vocab_size)
    return rows


def check_tokens(config: Any, max_tokens: int) -> None:
    """Raises SettingError where so many tokens fill too few windows of a model of this config."""
    least = MIN_WINDOWS * window_length(config)
    if max_tokens < least:
        raise SettingError(
            f"`max_tokens` must be at least {least} to calibrate this model, {MIN_WINDOWS} windows,"
            f" got {max_tokens}"
        )


def default_tokens(model: Any) -> int:
    """How many tokens a loaded model is calibrated on where nobody says. Tokens decide the time: on
    a CPU fewer, which take SmolLM2-135M under three minutes on two cores."""
    return CPU_TOKENS if input_device(model).type == "cpu" else GPU_TOKENS


def window_length(config: Any) -> int:
    """Tokens of a window for a model of this config."""
    return min(CALIBRATION_WINDOW, position_limit(config) or CALIBRATION_WINDOW)
