"""Prefill attention: a chunk of a prompt over all rows before and in it, ours and others'.

All causal, in DTYPE, random; B sequences of S tokens, the last T of which are the chunk.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from kvfold.bench.baselines import Unavailable
from kvfold.bench.chunk import BASELINES, CUT, KEPT, Work, build_work, variant_step
from kvfold.bench.common import check_names, fastest, reason
from kvfold.bench.timing import Step, Timing, record, time_steps
from kvfold.bench.variants import SHAPES


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is timed: (B, S, T) of every case, `layers` a call, rounds.

    A variant is a name of KEPT, alone or with `@zack` (ZACK §5.3: tiles of queries inversely to
    kept dims, here in powers of two) or with a cut of the kernel, such as `half@128x64w8s3r128`:
    pairs, rows, warps, stages, registers. Raises ValueError for what does not exist.
    """

    shape: str
    cases: tuple[tuple[int, int, int], ...]
    variants: tuple[str, ...]
    baselines: tuple[str, ...]
    layers: int
    rounds: int

    def __post_init__(self) -> None:
        check_names("shape", [self.shape], SHAPES)
        check_names("variants", [name.partition("@")[0] for name in self.variants], KEPT)
        check_names("baselines", self.baselines, BASELINES)
        for name in self.variants:
            how = name.partition("@")[2]
            if how not in ("", "zack") and not CUT.fullmatch(how):
                raise ValueError(f"variants: {how!r} is no cut; write zack or such as 128x64w8s3")
        numbers = {"layers": self.layers, "rounds": self.rounds}
        for case in self.cases:
            numbers |= dict(zip(("batch", "tokens", "chunk"), case, strict=True))
            if low := [f"{x} must be at least 1, got {n}" for x, n in numbers.items() if n < 1]:
                raise ValueError(low[0])
            if case[2] > case[1]:
                raise ValueError(f"chunk must be at most tokens, {case[1]}; got {case[2]}")


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
    job: Job, case: tuple[int, int, int], device: torch.device
) -> tuple[list[Row], list[Skipped]]:
    """Rows of one case, all taking turns. What is wrong, or cannot run, is skipped."""
    steps: dict[str, tuple[str, Step, float]] = {}
    skipped = []
    for name, kind, made in _candidates(job, case, device):
        if isinstance(made, str):
            batch, tokens, chunk = case
            skipped.append(Skipped(name=name, batch=batch, tokens=tokens, chunk=chunk, reason=made))
        else:
            steps[name] = (kind, *made)
    calls = {name: step for name, (_, step, _) in steps.items()}
    times = time_steps(calls, layers=job.layers, rounds=job.rounds, device=device) if calls else {}
    return _rows(job, case, steps, times), skipped


def _candidates(
    job: Job, case: tuple[int, int, int], device: torch.device
) -> Iterator[tuple[str, str, tuple[Step, float] | str]]:
    """(name, kind, (step, flops) or why not) of all, checked; variants of like ranks share data."""
    works: dict[str, Work] = {}
    wanted = [(name, "baseline", "full") for name in job.baselines]
    wanted += [(name, "variant", name.partition("@")[0]) for name in job.variants]
    for name, kind, kept in wanted:
        try:
            if kept not in works:
                works[kept] = build_work(SHAPES[job.shape], KEPT[kept], case, job.layers, device)
            work = works[kept]
            step = BASELINES[name](work) if kind == "baseline" else variant_step(name, work)
            out = step(0)
            assert isinstance(out, Tensor)
            work.check(name, out)
            record(step, 1, device)  # not all that runs can be captured
            yield name, kind, (step, work.flops)
        except (Unavailable, RuntimeError, ImportError) as error:
            yield name, kind, reason(error)


def _rows(
    job: Job,
    case: tuple[int, int, int],
    steps: dict[str, tuple[str, Step, float]],
    times: dict[str, Timing],
) -> list[Row]:
    """What was timed, with the fastest baseline beside each."""
    best, bar = fastest({name: kind for name, (kind, _, _) in steps.items()}, times)
    return [
        Row(
            variant=name,
            kind=kind,
            shape=job.shape,
            batch=case[0],
            tokens=case[1],
            chunk=case[2],
            **asdict(times[name]),
            tflops=flops / times[name].us / 1e6,
            fastest_baseline=best,
            fastest_baseline_us=bar or None,
            speedup_vs_fastest=bar / times[name].us if bar else None,
        )
        for name, (kind, _, flops) in steps.items()
    ]
