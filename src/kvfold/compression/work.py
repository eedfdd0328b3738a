"""What calibrating a model and saving the result will take: seconds, memory and disk."""

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
from kvfold.models.placed import input_device, is_offloaded
from kvfold.utils.errors import SettingError

# Of a pass's time over that of its matrix products alone: attention, its statistics in fp64 and the
# sampled labels. Measured on SmolLM2-135M (`swift`) on one CPU core.
OVERHEAD = 1.8
AFTER = 2  # windows whose time building bases and the check of the result take, about
SMALL_FILES = 5e6  # bytes of a tokenizer, a plan and a card
LIBRARIES = 700e6  # bytes of Python, torch and transformers in a process
CHUNK = 512  # positions whose logits exist at once
PROBE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Work:
    """Estimates. tokens: of calibration text; products: multiply-adds of all but loading the model.
    Bytes at most: memory of the device that the model is on, disk of the output, and saved, of the
    pass that is beside it until it is written."""

    model: Any
    tokens: int
    products: float
    memory: float
    disk: float
    saved: float

    @property
    def seconds(self) -> float:
        """Times the model's device for PROBE_SECONDS."""
        return self.products / products_a_second(self.model)

    @property
    def words(self) -> str:
        """One line; tokens decide the time."""
        return (
            f"calibrating on {self.tokens} tokens: about {_in_time(self.seconds)},"
            f" {_in_bytes(self.memory)} of memory, {_in_bytes(self.disk)} of disk and"
            f" {_in_bytes(self.saved)} more until it is done; tokens decide the time: `max_tokens`"
        )


def work_of(compressor: Compressor, fold: bool, stored: torch.dtype | None = None) -> Work:
    """The work of a compressor whose model is folded, or gets maps beside its weights. stored: of
    the weights that are saved (None: the dtype that they have)."""
    model = compressor.model
    length = window_length(model.config)
    num_windows = compressor.max_tokens // length
    statistics = statistics_bytes(compressor)
    weights = _bytes(model)
    written = weights if stored is None else weights * stored.itemsize / model.dtype.itemsize
    maps = 4 * 2 * full_rank_numbers(compressor)
    return Work(
        model=model,
        tokens=compressor.max_tokens,
        products=(num_windows + AFTER) * OVERHEAD * window_products(compressor, length),
        memory=LIBRARIES + weights + 2 * statistics + activation_bytes(compressor, length),
        disk=(written if fold else 0) + maps + SMALL_FILES,
        saved=statistics,
    )


def check_disk(output: Path, work: Work) -> None:
    """Raises SettingError where the disk of `output` has less room than the work takes."""
    folder = next(x for x in output.absolute().parents if x.exists())
    free = shutil.disk_usage(folder).free
    if free < work.disk:
        raise SettingError(
            f"`output`: {output} takes up to {_in_bytes(work.disk)}, and the disk of {folder} has"
            f" {_in_bytes(free)} free: free some, or name a folder on another disk"
        )


def window_products(compressor: Compressor, length: int) -> float:
    """Multiply-adds of one window of `length` tokens, backward where gradients are read."""
    model = compressor.model
    g, config = compressor.geometry, model.config.get_text_config(decoder=True)
    table = model.get_input_embeddings().weight.numel()
    tables = table * (1 if getattr(config, "tie_word_embeddings", False) else 2)
    layers = sum(x.numel() for x in model.parameters()) - tables
    scores = 2 * length * g.num_layers * g.num_query_heads * g.head_dim
    forward = length * (layers + scores)
    if not reads_gradients(compressor):
        return forward
    passes = 3 if recomputes(model) else 2  # gradients of activations alone: weights stay
    return forward * passes + 2 * length * table


def products_a_second(model: Any) -> float:
    """Multiply-adds a second of a matrix product as the model's are, timed for a moment."""
    device = input_device(model)
    width = model.get_input_embeddings().embedding_dim
    dtype = model.dtype if model.dtype.itemsize > 1 else torch.bfloat16
    x = torch.ones(256, width, dtype=dtype, device=device)
    weight = torch.ones(width, 4 * width, dtype=dtype, device=device)
    _timed(x, weight)  # the first one loads libraries
    count, seconds = 0, 0.0
    while seconds < PROBE_SECONDS:
        seconds += _timed(x, weight)
        count += 1
    return count * 256 * width * 4 * width / seconds


def _timed(x: torch.Tensor, weight: torch.Tensor) -> float:
    begin = time.perf_counter()
    (x @ weight)[0, 0].item()  # waits for a GPU
    return time.perf_counter() - begin


def statistics_bytes(compressor: Compressor) -> float:
    """Of all moments in fp64, at most."""
    g = compressor.geometry
    numbers = max(g.num_layers * g.kv_width**2, full_rank_numbers(compressor))
    return 8.0 * len(compressor.needs) * numbers


def activation_bytes(compressor: Compressor, length: int) -> float:
    """Of one window's activations that a backward pass reads, with the logits of a chunk and one
    layer's scores."""
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
    """Whether a pass runs backward."""
    return any(QUANTITIES[name].view is not Attended for name in compressor.needs)


def recomputes(model: Any) -> bool:
    """As `record.Recorder` does."""
    return sum(p.numel() for p in model.parameters()) > RECOMPUTE_ABOVE or is_offloaded(model)


def full_rank_numbers(compressor: Compressor) -> int:
    """Of one square map of every latent of all layers."""
    g = compressor.geometry
    sets = compressor.basis.head_sets(g)
    return g.num_layers * sum((len(heads) * g.head_width(side)) ** 2 for side, heads in sets)


def _bytes(model: Any) -> float:
    return float(sum(x.numel() * x.element_size() for x in model.parameters()))


def _in_time(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _in_bytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{max(1, size / 1e6):.0f} MB"
