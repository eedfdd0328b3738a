"""Time between tokens and time to first token of whole models on random weights.

Shapes: B sequences of T tokens each.
"""

import gc
import time
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from kvfold.bench.contenders import SPARE, Contender, Run
from kvfold.engine.runner.build import free_bytes

WARM = 4  # steps that are not timed: they compile, and capture graphs
RUNS, LONG = 5, 1.0  # prompts that are timed; two of them where one takes so many seconds


@dataclass(frozen=True, kw_only=True)
class Row:
    """Milliseconds a step of `batch` sequences, of as many steps again (repeat_ms); bytes that the
    cache holds, that the device allocated at most, and that weights and cache were to take."""

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
class FirstToken:
    """Milliseconds from a prompt to its first output (TTFT), of `runs` prompts one by one after one
    that is not timed: median, fastest and slowest. chunk: tokens of a forward pass, None: all."""

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
    of: Contender,
    shape: str,
    name: str,
    batch: int,
    tokens: int,
    steps: int,
    device: torch.device,
) -> Row | str:
    """Median over `steps` steps; or why it is not measured. Raises what goes wrong on the way."""
    if reason := unfit(of.cache_bytes(batch, tokens + WARM + 2 * steps + 1), device):
        return reason
    decoding = of.decoding(batch, tokens, WARM + 2 * steps)
    _times(decoding.step, WARM)
    first, again = (_times(decoding.step, steps) for _ in range(2))
    low, middle, high = np.percentile(first, (10, 50, 90)).tolist()
    weights = sum(x.nbytes for x in of.model.parameters())
    return Row(
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
        predicted_bytes=weights + of.cache_bytes(batch, tokens),
        graph=decoding.graph,
    )


def measure_first(
    of: Contender, shape: str, name: str, tokens: int, device: torch.device
) -> FirstToken | str:
    """Time of reading one prompt; or why it is not measured. Raises as `measure_step`."""
    if reason := unfit(of.cache_bytes(1, tokens + 1), device):
        return reason
    run = of.first_token(tokens)
    (once,) = _times(run, 1)
    times = _times(run, RUNS if once < 1e3 * LONG else 2)
    ms = median(times)
    return FirstToken(
        shape=shape,
        variant=name,
        tokens=tokens,
        chunk=of.chunk,
        ms=ms,
        ms_low=min(times),
        ms_high=max(times),
        runs=len(times),
        tokens_per_s=1e3 * tokens / ms,
        peak_bytes=_peak(device),
    )


def release(device: torch.device) -> None:
    """Give back what the last measurement held, and count the peak from here."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def unfit(size: int, device: torch.device) -> str | None:
    """Why a cache of `size` bytes cannot be measured, if so."""
    free = free_bytes(device)
    if size + SPARE <= free:
        return None
    return (
        f"its cache takes {size / 1e9:.1f} GB and work space {SPARE / 1e9:.1f} GB, of which"
        f" {free / 1e9:.1f} GB are free"
    )


def _times(run: Run, count: int) -> list[float]:
    """Milliseconds of every call. Each ends by reading tokens, so the device is done."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
