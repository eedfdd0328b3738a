"""Prefill attention: a chunk of a prompt over all rows before and in it, ours and others'.

All causal, in DTYPE, random; B sequences of S tokens, the last T of which are the chunk.
"""

from dataclasses import dataclass

import torch

from kvfold.bench import common
from kvfold.bench.common import Candidate, Candidates, Unavailable, check_names, measure, reason
from kvfold.bench.timing import record
from kvfold.bench.variants import SHAPES
from lab.chunk import BASELINES, CUT, KEPT, Work, build_work, variant_step

SIZES = ("batch", "tokens", "chunk")  # of a case


@dataclass(frozen=True, kw_only=True)
class Job(common.KernelJob):
    """(B, S, T) of every case.

    A variant is a name of KEPT, alone or with `@zack` (ZACK §5.3: tiles of queries inversely to
    kept dims, here in powers of two) or with a cut of the kernel, such as `half@128x64w8s3r128`:
    pairs, rows, warps, stages, registers. Raises ValueError for what does not exist.
    """

    def __post_init__(self) -> None:
        check_names("variants", [name.partition("@")[0] for name in self.variants], KEPT)
        self.check(SIZES, BASELINES)
        for name in self.variants:
            how = name.partition("@")[2]
            if how not in ("", "zack") and not CUT.fullmatch(how):
                raise ValueError(f"variants: {how!r} is no cut; write zack or such as 128x64w8s3")
        for _, tokens, chunk in self.cases:
            if chunk > tokens:
                raise ValueError(f"chunk must be at most tokens, {tokens}; got {chunk}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant or baseline (`kind`) in one case; times in microseconds a layer.

    tflops: of both products, counted on what is not masked; fastest_baseline: of the same case.
    """

    variant: str
    kind: str
    shape: str
    batch: int
    tokens: int
    chunk: int
    us: float
    us_p10: float
    us_p90: float
    repeat_us: float
    tflops: float
    fastest_baseline: str | None
    fastest_baseline_us: float | None
    speedup_vs_fastest: float | None


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """What was asked for and not timed."""

    name: str
    batch: int
    tokens: int
    chunk: int
    reason: str


def measure_case(
    job: Job, case: tuple[int, ...], device: torch.device
) -> tuple[list[Row], list[Skipped]]:
    """Rows of one case, all taking turns. What is wrong, or cannot run, is skipped."""
    place = dict(zip(SIZES, case, strict=True))
    timed, skipped = measure(job, place, _candidates(job, case, device), device)
    rows = [Row(**row, tflops=x.flops / row["us"] / 1e6) for x, row in timed]
    return rows, [Skipped(name=name, **place, reason=why) for name, why in skipped]


def _candidates(job: Job, case: tuple[int, ...], device: torch.device) -> Candidates:
    """All, checked; variants of like ranks share data."""
    works: dict[str, Work] = {}
    wanted = [(name, "baseline", "full") for name in job.baselines]
    wanted += [(name, "variant", name.partition("@")[0]) for name in job.variants]
    for name, kind, kept in wanted:
        try:
            if kept not in works:
                works[kept] = build_work(SHAPES[job.shape], KEPT[kept], case, job.layers, device)
            work = works[kept]
            step = BASELINES[name](work) if kind == "baseline" else variant_step(name, work)
            work.check(name, step(0))
            record(step, 1, device)  # not all that runs can be captured
            yield name, Candidate(kind=kind, step=step, flops=work.flops)
        except (Unavailable, RuntimeError, ImportError) as error:
            yield name, reason(error)
