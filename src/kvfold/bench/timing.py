"""Times of callables on a device, taken in rounds in which each runs once.

A *step* is a function of a layer's number; a *call* is one pass over `layers` layers, on CUDA one
replay of a graph, so that the host's own time is not in it. Times are microseconds a layer.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Step = Callable[[int], Any]
Call = Callable[[], object]

COLD = 5  # caches' worth of bytes that lie between two reads of the same ones
WARM_UP = 3  # rounds that are not counted: clocks rise


@dataclass(frozen=True, kw_only=True)
class Timing:
    """us: median over rounds; p10 and p90 of the same; repeat_us: median of as many rounds more."""

    us: float
    us_p10: float
    us_p90: float
    repeat_us: float


def time_steps(
    steps: Mapping[str, Step], *, layers: int, rounds: int, device: torch.device
) -> dict[str, Timing]:
    """Time every step over `layers` layers, `rounds` times and once more as many.

    The steps take turns, so that what else the machine does hits all alike, and each turn begins
    with a cache that holds none of their data.
    """
    calls = {name: record(step, layers, device) for name, step in steps.items()}
    flush = _flush(device)
    _samples(calls, WARM_UP, flush, device)
    first, second = (_samples(calls, rounds, flush, device) / layers for _ in range(2))
    low, middle, high = np.percentile(first, (10, 50, 90), axis=0)
    again = np.median(second, axis=0)
    columns = zip(calls, middle.tolist(), low.tolist(), high.tolist(), again.tolist(), strict=True)
    return {
        name: Timing(us=us, us_p10=p10, us_p90=p90, repeat_us=repeat)
        for name, us, p10, p90, repeat in columns
    }


def record(step: Step, layers: int, device: torch.device) -> Call:
    """A call of `step` for every layer, which has run once: compiled, planned and, on CUDA,
    captured as a graph."""

    def call() -> None:
        for layer in range(layers):
            step(layer)

    if device.type != "cuda":
        call()
        return call
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def cold_bytes(device: torch.device) -> int:
    """Bytes to read for the device's cache to hold nothing else; 0 where it is not known."""
    if device.type != "cuda":
        return 0
    return COLD * int(torch.cuda.get_device_properties(device).L2_cache_size)


def _flush(device: torch.device) -> Call:
    """A call that fills the cache by reading: what was written would have to be written back."""
    other: Tensor = torch.zeros(cold_bytes(device) // 8, dtype=torch.int64, device=device)
    return other.sum


def _samples(
    calls: Mapping[str, Call], rounds: int, flush: Call, device: torch.device
) -> np.ndarray:
    """Microseconds of every call [rounds, calls]. The order turns by one every round."""
    names = list(calls)
    found = np.empty((rounds, len(names)))
    for i in range(rounds):
        waits = {}
        for name in names[i % len(names) :] + names[: i % len(names)]:
            flush()
            waits[name] = _start(calls[name], device)
        found[i] = [waits[name]() for name in names]
    return found


def _start(call: Call, device: torch.device) -> Callable[[], float]:
    """Begin `call`; what is returned waits for its end and gives its microseconds."""
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        passed = 1e6 * (time.perf_counter() - begin)
        return lambda: passed
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()

    def wait() -> float:
        after.synchronize()
        return 1e3 * float(before.elapsed_time(after))

    return wait
