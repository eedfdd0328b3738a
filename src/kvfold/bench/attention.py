"""Times decode attention over one step of a batch: kvfold's kernels on compressed caches, and
baselines on the uncompressed cache.

A *case* is a batch of B sequences of T tokens each. Everything in a case is timed in turns.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch

from kvfold.bench.baselines import (
    BASELINES,
    BuildBaseline,
    build_full_cache,
    expected_outputs,
    full_bytes,
)
from kvfold.bench.common import (
    Candidate,
    Candidates,
    KernelJob,
    Unavailable,
    check_names,
    check_outputs,
    measure,
    reason,
)
from kvfold.bench.timing import cold_bytes, record
from kvfold.bench.variants import ROPE_BASES, SHAPES, VARIANTS, Variant
from kvfold.bench.workload import Decode, Workload, build_workload, layer_bytes

MEMORY_SHARE = 0.7  # of the free memory; the rest is for checks and work space
HOST_BYTES = 1 << 30  # budget on a CPU


@dataclass(frozen=True, kw_only=True)
class Registry:
    """What can be timed, by name, and how a cache of a variant is built."""

    variants: Mapping[str, Variant] = field(default_factory=lambda: VARIANTS)
    baselines: Mapping[str, BuildBaseline] = field(default_factory=lambda: BASELINES)
    build: Callable[..., Workload] = build_workload

    def check(self, job: KernelJob) -> None:
        """Raises ValueError for unknown names, and for numbers below 1. A case is (B, T)."""
        check_names("variants", job.variants, self.variants)
        job.check(("batch", "tokens"), self.baselines)


REGISTRY = Registry()


@dataclass(frozen=True, kw_only=True)
class AttentionResult:
    """One variant or baseline (`kind`) in one case; times in microseconds a layer.

    bytes: that a layer must read: stored numbers and scales. distinct_layers: layers with data of
    their own. fastest_baseline: of the same case, None where none could run. For keys that are
    reconstructed: rank, numbers that a key is computed from; tflops, arithmetic of reconstruction
    (2 d rank per token and KV head) over the time.
    """

    variant: str
    kind: str
    shape: str
    batch: int
    tokens: int
    distinct_layers: int
    us: float
    us_p10: float
    us_p90: float
    repeat_us: float
    bytes: float
    tb_per_s: float
    fastest_baseline: str | None
    fastest_baseline_us: float | None
    speedup_vs_fastest: float | None
    rank: int | None = None
    tflops: float | None = None


@dataclass(frozen=True, kw_only=True)
class SkippedCase:
    """What was requested and not timed."""

    name: str
    shape: str
    batch: int
    tokens: int
    reason: str


def measure_case(
    job: KernelJob,
    batch: int,
    tokens: int,
    decode: Decode,
    device: torch.device,
    registry: Registry = REGISTRY,
) -> tuple[list[AttentionResult], list[SkippedCase]]:
    """Time one case. decode: called as `ops.decode.decode`. What does not run, does not fit into
    memory or computes a wrong output is not timed, but reported."""
    budget = _budget(device) // (len(job.variants) + 1)
    case = _Case(job, batch, tokens, budget, device, registry)
    sizes = {"batch": batch, "tokens": tokens}
    timed, skipped = measure(job, sizes, chain(case.baselines(), case.variants(decode)), device)
    results = [
        AttentionResult(
            **times,
            distinct_layers=x.distinct_layers,
            bytes=x.bytes,
            tb_per_s=x.bytes / times["us"] / 1e6,
            rank=x.rank,
            tflops=x.flops / times["us"] / 1e6 if x.flops else None,
        )
        for x, times in timed
    ]
    return results, [
        SkippedCase(name=name, shape=job.shape, **sizes, reason=why) for name, why in skipped
    ]


@dataclass(frozen=True)
class _Case:
    """A case to build. budget: bytes for the cache of a single variant or baseline."""

    job: KernelJob
    batch: int
    tokens: int
    budget: int
    device: torch.device
    registry: Registry

    def baselines(self) -> Candidates:
        """Every baseline that runs and is right, or the reason why it does not."""
        job, geometry = self.job, SHAPES[self.job.shape]
        size = full_bytes(geometry, self.batch, self.tokens)
        num_layers = self.distinct(size)
        if not num_layers:
            yield from ((name, self.too_large(size)) for name in job.baselines)
            return
        try:
            cache = build_full_cache(
                geometry,
                batch=self.batch,
                tokens=self.tokens,
                num_layers=num_layers,
                device=self.device,
            )
        except RuntimeError as error:  # out of memory
            yield from ((name, reason(error)) for name in job.baselines)
            return
        for name in job.baselines:
            try:
                baseline = self.registry.baselines[name](cache)
                expected = expected_outputs(cache, baseline)
                check_outputs(name, baseline.step(0)[0].reshape(expected.shape), expected)
                record(baseline.step, 1, self.device)  # not all that runs can be captured
                yield (
                    name,
                    Candidate(
                        kind="baseline",
                        step=baseline.step,
                        bytes=size,
                        distinct_layers=num_layers,
                    ),
                )
            except Exception as error:  # the other baselines still run
                yield name, reason(error)

    def variants(self, decode: Decode) -> Candidates:
        """Every variant that fits, runs and is right, or the reason why it does not."""
        geometry = SHAPES[self.job.shape]
        for name in self.job.variants:
            variant = self.registry.variants[name]
            size = layer_bytes(geometry, variant, self.batch, self.tokens)
            num_layers = self.distinct(size)
            if not num_layers:
                yield name, self.too_large(size)
                continue
            try:
                work = self.registry.build(
                    geometry,
                    variant,
                    batch=self.batch,
                    tokens=self.tokens,
                    num_layers=num_layers,
                    device=self.device,
                    rope_base=ROPE_BASES[self.job.shape],
                )
                if self.device.type == "cuda" and not work.has_kernel:
                    raise Unavailable("no kernel reads this layout")
                step = work.step(decode)
                check_outputs(name, step(0)[0], work.expected())
                record(step, 1, self.device)  # not all that runs can be captured
                yield (
                    name,
                    Candidate(
                        kind="variant",
                        step=step,
                        bytes=work.row_bytes,
                        distinct_layers=num_layers,
                        rank=work.rank,
                        flops=work.flops,
                    ),
                )
            except Exception as error:  # the other variants still run
                yield name, reason(error)

    def distinct(self, size: int) -> int:
        return distinct_layers(size, self.job.layers, self.budget, self.device)

    def too_large(self, size: int) -> str:
        return (
            f"a layer takes {size} bytes, its share of the memory is {self.budget}: name fewer"
            " variants"
        )


def distinct_layers(size: int, layers: int, budget: int, device: torch.device) -> int:
    """How many layers of `size` bytes get data of their own: all, or as many as fit. 0 where those
    are too few to push each other out of the device's cache."""
    fit = min(layers, budget // max(size, 1))
    return fit if fit == layers or fit * size >= cold_bytes(device) else 0


def _budget(device: torch.device) -> int:
    """Bytes for all caches of a case."""
    if device.type != "cuda":
        return HOST_BYTES
    gc.collect()
    torch.cuda.empty_cache()
    return int(MEMORY_SHARE * torch.cuda.mem_get_info(device)[0])
