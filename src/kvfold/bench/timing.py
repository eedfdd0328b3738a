"""Times functions on a device in rounds; each function runs once a round.

A *step* is a function of a layer's number. A *call* runs a step for `layers` layers; on CUDA it
replays a graph, so that the host's time is not included. Times are microseconds a layer.
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

COLD = 5  # times the size of the L2 cache is read between two reads of the same bytes
WARM_UP = 3  # rounds that are not counted, while clock rates rise


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds a layer: median, 10th and 90th percentile over the rounds. repeat_us: median of
    more rounds."""

    us: float
    us_p10: float
    us_p90: float
    repeat_us: float


def time_steps(
    steps: Mapping[str, Step], *, layers: int, rounds: int, device: torch.device
) -> dict[str, Timing]:
    """Time every step over `layers` layers in two sets of `rounds` rounds.

    The steps take turns, so that other work of the machine affects all of them alike. Before each
    call the device's cache is flushed.
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
    """Run `step` once for every layer, and return a call that repeats it: compiled, planned and, on
    CUDA, captured as a graph."""

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
    """Bytes to read so that the device's cache holds nothing else; 0 where its size is unknown."""
    if device.type != "cuda":
        return 0
    return COLD * int(torch.cuda.get_device_properties(device).L2_cache_size)


def _flush(device: torch.device) -> Call:
    """A call that fills the device's cache by reading: written bytes would be written back later,
    while something is timed."""
    filler: Tensor = torch.zeros(cold_bytes(device) // 8, dtype=torch.int64, device=device)
    return filler.sum


def _samples(
    calls: Mapping[str, Call], rounds: int, flush: Call, device: torch.device
) -> np.ndarray:
    """Microseconds of every call [rounds, calls]. The order rotates by one every round."""
    names = list(calls)
    samples = np.empty((rounds, len(names)))
    for i in range(rounds):
        waits = {}
        for name in names[i % len(names) :] + names[: i % len(names)]:
            flush()
            waits[name] = _start(calls[name], device)
        samples[i] = [waits[name]() for name in names]
    return samples


def _start(call: Call, device: torch.device) -> Callable[[], float]:
    """Start `call`. Returns a function that waits for its end and returns its microseconds."""
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        elapsed = 1e6 * (time.perf_counter() - begin)
        return lambda: elapsed
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()

    def wait() -> float:
        after.synchronize()
        return 1e3 * float(before.elapsed_time(after))

    return wait
