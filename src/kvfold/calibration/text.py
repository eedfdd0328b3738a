"""Cuts calibration text into windows of tokens. Shapes: n windows, T tokens of a window."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.calibration.documents import calibration_documents, shares
from kvfold.calibration.self_text import write
from kvfold.models.devices import input_device
from kvfold.models.rotary import position_limit
from kvfold.utils.errors import SettingError
from kvfold.utils.progress import Report
from kvfold.utils.tokens import CHARACTERS_PER_TOKEN, check_ids, leading_tokens, longer, windows

GPU_TOKENS, CPU_TOKENS = 32768, 12288  # default calibration text: see `default_tokens`
CALIBRATION_WINDOW = 1024
MIN_WINDOWS = 4


def calibration_text(calib: list[str | Path] | None, tokenizer: Any) -> str:
    """The documents of text files, or the packaged ones, as one text."""
    return "\n\n".join(document.text for document in calibration_documents(calib, tokenizer))


def calibration_windows(
    tokenizer: Any, config: Any, calib: list[str | Path] | None, max_tokens: int
) -> Tensor:
    """Token windows [n, T] of text files, or of the packaged text.

    Documents are concatenated. Each of them, and each window, begins with the tokenizer's
    `leading_tokens`. If they have more than `max_tokens`, the beginnings of documents are used (see
    `documents.shares`).
    """
    if tokenizer is None:
        raise ValueError("a tokenizer is needed to read calibration text; pass tokenizer=")
    check_tokens(config, max_tokens)
    documents = calibration_documents(calib, tokenizer)
    encoded = [document.encode(tokenizer) for document in documents]
    counts = shares(documents, [len(ids) for ids in encoded], max_tokens)
    used = [ids[:count] for ids, count in zip(encoded, counts, strict=True)]
    return _windows(tokenizer, config, used)


def self_windows(
    model: Any, tokenizer: Any, max_tokens: int, seed: int = 0, progress: Report | None = None
) -> Tensor:
    """Token windows [n, T] of text that the model writes (see `self_text.write`)."""
    if tokenizer is None:
        raise ValueError("a tokenizer is needed to write calibration text; pass tokenizer=")
    check_tokens(model.config, max_tokens)
    length = window_length(model.config)
    texts = write(model, tokenizer, max_tokens, length, seed=seed, progress=progress)
    return _windows(tokenizer, model.config, texts)[: max_tokens // length]


def _windows(tokenizer: Any, config: Any, texts: list[list[int]]) -> Tensor:
    """Concatenate texts of token ids, and cut them into windows [n, T] that begin with the
    tokenizer's `leading_tokens`."""
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
    """At most `count` windows [n, T], spread evenly over the text of files, or of the packaged
    text.

    Raises SettingError for text of fewer than MIN_WINDOWS windows.
    """
    text = calibration_text(files, tokenizer)
    length, part = window_length(config), len(text) // count
    if not longer(tokenizer, text, MIN_WINDOWS * length):
        raise SettingError(
            f"the text has fewer than {MIN_WINDOWS} windows of {length} tokens: give more `text`, "
            "or leave it out for the packaged one"
        )
    if part < 2 * CHARACTERS_PER_TOKEN * length:
        all_windows = list(windows(tokenizer, text, length))
        picked = min(count, len(all_windows))
        chosen = [all_windows[i * len(all_windows) // picked] for i in range(picked)]
    else:
        parts = (text[i * part : (i + 1) * part] for i in range(count))
        chosen = [windows(tokenizer, x, length, length)[0] for x in parts]
    rows = torch.stack(chosen)
    check_ids(rows.flatten().tolist(), config.get_text_config(decoder=True).vocab_size)
    return rows


def check_tokens(config: Any, max_tokens: int) -> None:
    """Raises SettingError for fewer tokens than MIN_WINDOWS windows of a model of this config."""
    least = MIN_WINDOWS * window_length(config)
    if max_tokens < least:
        raise SettingError(
            f"`max_tokens` must be at least {least} to calibrate this model, {MIN_WINDOWS} windows,"
            f" got {max_tokens}"
        )


def default_tokens(model: Any) -> int:
    """The default number of calibration tokens of a loaded model.

    Tokens decide the time: CPU_TOKENS take under three minutes for SmolLM2-135M on two cores.
    """
    return CPU_TOKENS if input_device(model).type == "cpu" else GPU_TOKENS


def window_length(config: Any) -> int:
    """The number of tokens in a window for a model of this config."""
    return min(CALIBRATION_WINDOW, position_limit(config) or CALIBRATION_WINDOW)
