"""Estimates the time, memory and disk that compressing a model will take."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvfold.calibration.statistics import QUANTITIES
from kvfold.calibration.statistics.quantities import Attended
from kvfold.calibration.statistics.record import RECOMPUTE_ABOVE
from kvfold.calibration.text import window_length
from kvfold.compression.compressor import Compressor
from kvfold.models.devices import input_device, is_offloaded
from kvfold.utils.errors import SettingError

# Time of a calibration pass over that of its matrix products: it adds attention, statistics in fp64
# and sampled labels. Measured on SmolLM2-135M (`swift`) on one CPU core.
OVERHEAD = 1.8
BASES = 0.2  # windows whose calibration takes the time of building the bases
# Seconds per layer of a step of one token, apart from reading weights; measured as OVERHEAD was, as
# the mean of the original in transformers, and of maps there and in the engine.
LAYER_SECONDS = 4e-3
SMALL_FILES = 5e6  # bytes of a tokenizer, a plan and a card
LIBRARIES = 700e6  # bytes of Python, torch and transformers in a process
CHUNK = 512  # positions whose logits exist at once
PROBE_SECONDS = 0.5
READ_NUMBERS = 2**24  # of a matrix that no cache holds, by which reading weights is timed


@dataclass(frozen=True, kw_only=True)
class CheckWork:
    """What the check of the result computes: `windows` of `ctx` tokens, and `steps` of one token
    each."""

    windows: int = 0
    ctx: int = 0
    steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Work:
    """An estimate of the work. tokens: of calibration text. products: multiply-adds, without
    loading the model and without the steps of `check`. In bytes, at most: memory of the model's
    device, disk of the output, and saved, of the calibration pass that is stored beside the output
    until that is written."""

    model: Any
    tokens: int
    check: CheckWork
    products: float
    memory: float
    disk: float
    saved: float

    @property
    def seconds(self) -> float:
        """Estimated seconds; runs products on the model's device for PROBE_SECONDS each."""
        seconds = self.products / products_a_second(self.model)
        if self.check.steps:
            seconds += self.check.steps * step_seconds(self.model)
        return seconds

    @property
    def words(self) -> str:
        """A line for users."""
        check = " and checking the result" if self.check.steps else ""
        return (
            f"calibrating on {self.tokens} tokens{check}: about {_in_time(self.seconds)},"
            f" {_in_bytes(self.memory)} of memory, {_in_bytes(self.disk)} of disk and"
            f" {_in_bytes(self.saved)} more until it is done; tokens decide the time: `max_tokens`"
        )


def work_of(
    compressor: Compressor,
    fold: bool,
    stored: torch.dtype | None = None,
    check: CheckWork | None = None,
) -> Work:
    """Estimate the work of a compressor.

    fold: whether weights are saved, not only maps. stored: their dtype when saved (None: as they
    are). check: of the result (None: there is none).
    """
    check = check or CheckWork()
    model = compressor.model
    length = window_length(model.config)
    num_windows = compressor.max_tokens // length
    statistics = statistics_bytes(compressor)
    weights = _bytes(model)
    written = weights if stored is None else weights * stored.itemsize / model.dtype.itemsize
    maps = 4 * 2 * full_rank_numbers(compressor)
    calibration = (num_windows + BASES) * window_products(compressor, length)
    checked = check.windows * (
        forward_products(compressor, check.ctx) + check.ctx * _table_numbers(model)
    )
    return Work(
        model=model,
        tokens=compressor.max_tokens,
        check=check,
        products=OVERHEAD * (calibration + checked),
        memory=LIBRARIES + weights + 2 * statistics + activation_bytes(compressor, length),
        disk=(written if fold else 0) + maps + SMALL_FILES,
        saved=statistics,
    )


def check_disk(output: Path, work: Work) -> None:
    """Raises SettingError where the disk of `output` has less free space than the work takes."""
    folder = next(x for x in output.absolute().parents if x.exists())
    free = shutil.disk_usage(folder).free
    if free < work.disk:
        raise SettingError(
            f"`output`: {output} takes up to {_in_bytes(work.disk)}, and the disk of {folder} has"
            f" {_in_bytes(free)} free: free some, or name a folder on another disk"
        )


def window_products(compressor: Compressor, length: int) -> float:
    """Multiply-adds of calibrating on one window of `length` tokens, with the backward pass if
    gradients are read."""
    forward = forward_products(compressor, length)
    if not reads_gradients(compressor):
        return forward
    passes = 3 if recomputes(compressor.model) else 2  # gradients of activations: weights stay
    return forward * passes + 2 * length * _table_numbers(compressor.model)


def forward_products(compressor: Compressor, length: int) -> float:
    """Multiply-adds of the layers for one window of `length` tokens."""
    g = compressor.geometry
    scores = 2 * length * g.num_layers * g.num_query_heads * g.head_dim
    return float(length * (_layer_numbers(compressor.model) + scores))


def _table_numbers(model: Any) -> int:
    return int(model.get_input_embeddings().weight.numel())


def _layer_numbers(model: Any) -> int:
    """Numbers of the weights of all layers, without embeddings and the output layer."""
    config = model.config.get_text_config(decoder=True)
    tables = _table_numbers(model) * (1 if getattr(config, "tie_word_embeddings", False) else 2)
    return sum(x.numel() for x in model.parameters()) - tables


def step_seconds(model: Any) -> float:
    """Estimated seconds of a step of one token, which reads all weights; times the reading of a
    matrix on the model's device."""
    config = model.config.get_text_config(decoder=True)
    width = model.get_input_embeddings().embedding_dim
    numbers = _layer_numbers(model) + _table_numbers(model)
    num_layers = getattr(config, "num_hidden_layers", 1)
    read = numbers / _products_a_second(model, 1, READ_NUMBERS // width)
    return read + num_layers * LAYER_SECONDS


def products_a_second(model: Any) -> float:
    """Multiply-adds per second of a matrix product of the model's size, timed for a moment."""
    return _products_a_second(model, 256, 4 * model.get_input_embeddings().embedding_dim)


def _products_a_second(model: Any, rows: int, columns: int) -> float:
    """Multiply-adds per second of `rows` rows times a matrix of the model's width and `columns`
    columns, on the model's device."""
    device = input_device(model)
    width = model.get_input_embeddings().embedding_dim
    dtype = model.dtype if model.dtype.itemsize > 1 else torch.bfloat16
    x = torch.ones(rows, width, dtype=dtype, device=device)
    weight = torch.ones(width, columns, dtype=dtype, device=device)
    _timed(x, weight)  # the first one loads libraries
    count, seconds = 0, 0.0
    while seconds < PROBE_SECONDS:
        seconds += _timed(x, weight)
        count += 1
    return count * rows * width * columns / seconds


def _timed(x: torch.Tensor, weight: torch.Tensor) -> float:
    begin = time.perf_counter()
    (x @ weight)[0, 0].item()  # waits for a GPU
    return time.perf_counter() - begin


def statistics_bytes(compressor: Compressor) -> float:
    """Bytes of all moments in fp64, at most."""
    g = compressor.geometry
    numbers = max(g.num_layers * g.kv_width**2, full_rank_numbers(compressor))
    return 8.0 * len(compressor.needs) * numbers


def activation_bytes(compressor: Compressor, length: int) -> float:
    """Bytes of one window's activations that a backward pass reads, with the logits of a chunk and
    the scores of one layer."""
    model = compressor.model
    config = model.config.get_text_config(decoder=True)
    width = model.get_input_embeddings().embedding_dim
    logits = 4 * 4 * min(CHUNK, length) * model.get_input_embeddings().num_embeddings
    inner = getattr(config, "intermediate_size", None) or 4 * width
    inner = max(inner) if isinstance(inner, list | tuple) else inner  # one a layer
    num_layers = getattr(config, "num_hidden_layers", compressor.geometry.num_layers)
    scores = 3 * 4 * length**2 * compressor.geometry.num_query_heads
    layer = model.dtype.itemsize * length * (12 * width + 4 * inner)
    if not reads_gradients(compressor):
        return float(layer + scores)
    return float(scores + logits + layer * (1 if recomputes(model) else num_layers))


def reads_gradients(compressor: Compressor) -> bool:
    """Whether calibration runs a backward pass."""
    return any(QUANTITIES[name].view is not Attended for name in compressor.needs)


def recomputes(model: Any) -> bool:
    """Whether `record.Recorder` recomputes layers in the backward pass."""
    return sum(p.numel() for p in model.parameters()) > RECOMPUTE_ABOVE or is_offloaded(model)


def full_rank_numbers(compressor: Compressor) -> int:
    """Numbers of one square map for every latent of all layers."""
    g = compressor.geometry
    sets = compressor.basis.head_sets(g)
    return g.num_layers * sum((len(heads) * g.head_width(side)) ** 2 for side, heads in sets)


def _bytes(model: Any) -> float:
    return float(sum(x.numel() * x.element_size() for x in model.parameters()))


def _in_time(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _in_bytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{max(1, size / 1e6):.0f} MB"
