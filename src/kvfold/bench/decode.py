"""Measures time between tokens and time to first token of whole models with random weights.

Shapes: B sequences of T tokens each.
"""

import gc
import time
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from kvfold.bench.decoders import SPARE, Decoder, Run
from kvfold.engine.runner.build import free_bytes

WARM_UP = 4  # steps that are not timed: they compile, and capture graphs
RUNS, LONG = 5, 1.0  # prompts that are timed; only two if one takes this many seconds


@dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """Times of decode steps.

    ms: median milliseconds of a step of `batch` sequences; repeat_ms: of a second set of as many
    steps. cache_bytes: held by the cache. peak_bytes: the most that the device allocated.
    predicted_bytes: of weights and cache, as computed before the run.
    """

    shape: str
    variant: str
    batch: int
    tokens: int
    ms: float
    ms_p10: float
    ms_p90: float
    repeat_ms: float
    tokens_per_s: float
    cache_bytes: int
    peak_bytes: int
    predicted_bytes: int
    graph: bool


@dataclass(frozen=True, kw_only=True)
class FirstTokenResult:
    """Milliseconds from a prompt to its first output token (TTFT): median, fastest and slowest of
    `runs` prompts, one at a time, after one that is not counted. chunk: tokens of a forward pass,
    None: all."""

    shape: str
    variant: str
    tokens: int
    chunk: int | None
    ms: float
    ms_low: float
    ms_high: float
    runs: int
    tokens_per_s: float
    peak_bytes: int


def measure_step(
    decoder: Decoder,
    shape: str,
    name: str,
    batch: int,
    tokens: int,
    steps: int,
    device: torch.device,
) -> DecodeResult | str:
    """Time decode steps; or say why they are not measured. Raises the errors of the model."""
    longest = tokens + WARM_UP + 2 * steps + 1
    if reason := memory_shortage(decoder.cache_bytes(batch, longest), device):
        return reason
    decoding = decoder.decoding(batch, tokens, WARM_UP + 2 * steps)
    _times(decoding.step, WARM_UP)
    first, again = (_times(decoding.step, steps) for _ in range(2))
    low, middle, high = np.percentile(first, (10, 50, 90)).tolist()
    weights = sum(x.nbytes for x in decoder.model.parameters())
    return DecodeResult(
        shape=shape,
        variant=name,
        batch=batch,
        tokens=tokens,
        ms=middle,
        ms_p10=low,
        ms_p90=high,
        repeat_ms=median(again),
        tokens_per_s=1e3 * batch / middle,
        cache_bytes=decoding.cache_bytes,
        peak_bytes=_peak(device),
        predicted_bytes=weights + decoder.cache_bytes(batch, tokens),
        graph=decoding.graph,
    )


def measure_first(
    decoder: Decoder, shape: str, name: str, tokens: int, device: torch.device
) -> FirstTokenResult | str:
    """Time the first token of a prompt; or say why it is not measured. Raises the errors of the
    model."""
    if reason := memory_shortage(decoder.cache_bytes(1, tokens + 1), device):
        return reason
    run = decoder.first_token(tokens)
    (once,) = _times(run, 1)
    times = _times(run, RUNS if once < 1e3 * LONG else 2)
    ms = median(times)
    return FirstTokenResult(
        shape=shape,
        variant=name,
        tokens=tokens,
        chunk=decoder.chunk,
        ms=ms,
        ms_low=min(times),
        ms_high=max(times),
        runs=len(times),
        tokens_per_s=1e3 * tokens / ms,
        peak_bytes=_peak(device),
    )


def release(device: torch.device) -> None:
    """Free the memory of the last measurement, and start counting the peak again."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def memory_shortage(size: int, device: torch.device) -> str | None:
    """Why a cache of `size` bytes does not fit into memory; None where it does."""
    free = free_bytes(device)
    if size + SPARE <= free:
        return None
    return (
        f"its cache takes {size / 1e9:.1f} GB and work space {SPARE / 1e9:.1f} GB, of which"
        f" {free / 1e9:.1f} GB are free"
    )


def _times(run: Run, count: int) -> list[float]:
    """Milliseconds of `count` calls. Each ends by reading tokens, so the device is done."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
