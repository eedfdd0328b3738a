"""Costs of eviction beside a decode step, and what a decode step is made of.

Shapes: B sequences of T tokens each.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from kvfold.bench import synthetic_engine as served
from kvfold.bench.decode import WARM_UP, memory_shortage, release
from kvfold.bench.variants import SHAPES, Variant, variant_layout
from kvfold.engine.core.engine import Engine
from kvfold.engine.requests.request import CacheParams
from kvfold.ops.common import launch
from lab.tracked import fill
from lab.variants import VARIANTS

POLICY = "kv-compress"
RUNS = 3  # compressions that are timed, after one that is not
PROFILED = 3  # steps
KINDS = (  # of a decode step's kernels, by what is in their names; the first that fits
    ("plan", ("plan",)),
    ("combine", ("combine",)),
    ("append", ("append",)),
    ("metrics", ("observe", "track_rows", "add_metrics")),
    (
        "attention",
        ("decode_kernel", "score_kernel", "value_kernel", "fold_kernel", "attention", "fmha"),
    ),
    ("gather", ("gather_rows",)),
    (
        "matmul",
        (
            "gemm",
            "gemv",
            "cutlass",
            "nvjet",
            "cublas",
            "splitk",
            "few_kernel",
            "::mm",
            "::addmm",
            "::bmm",
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Milliseconds of evicting all B sequences to `keep` of their tokens, and of a decode step of
    the same engine before it; bytes of pages before and after."""

    shape: str
    variant: str
    policy: str
    keep: float
    batch: int
    tokens: int
    compress_ms: float
    compress_ms_low: float
    compress_ms_high: float
    decode_ms: float
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Of a decode step's time in kernels, launched one by one. policy: whose metrics are kept, or
    None; kernel_ms: of a step; shares: by kind of kernel, they add up to 1; top: the names that
    took most, with their shares."""

    shape: str
    variant: str
    policy: str | None
    batch: int
    tokens: int
    step_ms: float
    kernel_ms: float
    shares: dict[str, float]
    top: dict[str, float]


def measure(
    shape: str,
    name: str,
    batch: int,
    tokens: int,
    keeps: tuple[float, ...],
    steps: int,
    device: torch.device,
) -> Iterator[Row | Shares | str]:
    """The shares of a step without and with metrics, then a row for every `keep`; or why not.
    Raises what goes wrong on the way."""
    plain, tracked = VARIANTS[name], replace(VARIANTS[name], evict=2)
    room = WARM_UP + steps + PROFILED + 2
    layout = variant_layout(SHAPES[shape], tracked)
    model = served.random_model(shape, plain, device)
    if reason := memory_shortage(served.pool_bytes(layout, batch, tokens + room), device):
        yield reason
        return
    case = {"shape": shape, "variant": name, "batch": batch, "tokens": tokens}

    def engine_of(variant: Variant, policy: str | None) -> Engine:
        longest = tokens + room
        return served.build_engine(
            model, shape, variant, batch=batch, longest=longest, evict=policy
        )

    engine = engine_of(plain, None)
    fill(engine, batch, tokens, room, CacheParams())
    _, shares = _step(engine, steps, case, None, device)
    yield shares
    del engine
    release(device)
    engine = engine_of(tracked, POLICY)
    for number, keep in enumerate(keeps):
        limits = CacheParams(keep_tokens=keep)
        fill(engine, batch, tokens, room, limits)
        ms, shares = _step(engine, steps, case, POLICY, device)
        if number == 0:
            yield shares
        yield _compressions(engine, batch, tokens, limits, ms, case, device)


def _step(
    engine: Engine,
    steps: int,
    case: dict[str, object],
    policy: str | None,
    device: torch.device,
) -> tuple[float, Shares | str]:
    """Milliseconds of a step, and its shares, or why there are none."""
    for _ in range(WARM_UP):
        served.step(engine)
    ms = median(_timed(lambda: served.step(engine), device) for _ in range(steps))
    try:
        names = kernel_times(engine, device)
    except RuntimeError as error:  # a profiler needs more rights than a benchmark
        return ms, f"no shares: {error}"
    total = sum(names.values())
    shares = dict.fromkeys((*(kind for kind, _ in KINDS), "other"), 0.0)
    for name, us in names.items():
        shares[kind_of(name)] += us / total
    top = sorted(names, key=names.__getitem__, reverse=True)[:12]
    found = Shares(
        **case,  # type: ignore[arg-type]
        policy=policy,
        step_ms=ms,
        kernel_ms=total / PROFILED / 1e3,
        shares=shares,
        top={name[:80]: names[name] / total for name in top},
    )
    return ms, found


def kernel_times(engine: Engine, device: torch.device) -> dict[str, float]:
    """Microseconds of every kernel's name (elsewhere: operation's) over PROFILED steps, which are
    launched one by one, none before the one in front has ended: its time would be counted twice.
    Raises RuntimeError if none was seen."""
    cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with _eager(engine), profile(activities=[activity]) as seen:
        for _ in range(PROFILED):
            served.step(engine)
    times = {
        x.key: x.self_device_time_total if cuda else x.self_cpu_time_total
        for x in seen.key_averages()
    }
    times = {name: us for name, us in times.items() if us > 0}
    if not times:
        raise RuntimeError("the profiler saw no kernels")
    return times


def kind_of(name: str) -> str:
    """The one of KINDS that a kernel belongs to, or `other`."""
    lower = name.lower()
    found = (kind for kind, parts in KINDS if any(part in lower for part in parts))
    return next(found, "other")


@contextmanager
def _eager(engine: Engine) -> Iterator[None]:
    runner = served.runner_of(engine)
    graphs, runner.graphs = runner.graphs, None
    if graphs is None:
        yield
        return
    early, launch.PDL = launch.PDL, False
    try:
        yield
    finally:
        runner.graphs, launch.PDL = graphs, early


def _compressions(
    engine: Engine,
    batch: int,
    tokens: int,
    limits: CacheParams,
    decode_ms: float,
    case: dict[str, object],
    device: torch.device,
) -> Row:
    """Compress, fill anew, compress again: the first time is not counted."""
    runner, times = served.runner_of(engine), []
    for number in range(1 + RUNS):
        if number:
            fill(engine, batch, tokens, 2, limits)
        sequences = list(engine.scheduler.running)
        before = runner.pool.used_bytes
        times.append(_timed(lambda: runner.compress(sequences), device))  # noqa: B023
        after = runner.pool.used_bytes
        over = [x.id for x in sequences if runner.needs_compression(x)]
        assert not over, f"sequences {over} are over their budget after compression"
        for sequence in sequences:
            engine.cancel(sequence.id)
        engine.step()  # delivers their ends
    assert limits.keep_tokens is not None
    return Row(
        **case,  # type: ignore[arg-type]
        policy=POLICY,
        keep=limits.keep_tokens,
        compress_ms=median(times[1:]),
        compress_ms_low=min(times[1:]),
        compress_ms_high=max(times[1:]),
        decode_ms=decode_ms,
        bytes_before=before,
        bytes_after=after,
    )


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds until the device is done."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    begin = time.perf_counter()
    run()
    synchronize()
    return 1e3 * (time.perf_counter() - begin)
