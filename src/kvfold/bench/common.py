"""Shared parts of kernel benchmarks: their settings, fair timing of several kernels, and errors."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.bench.timing import Step, time_steps
from kvfold.bench.variants import SHAPES
from kvfold.utils.errors import SettingError

MAX_REASON = 300  # characters of an error that is reported
TOLERANCE = 0.02  # of the outputs' norm, for 16-bit products and sums


class Unavailable(Exception):
    """Why something cannot be timed on this machine."""


@dataclass(frozen=True, kw_only=True)
class KernelJob:
    """What to time: the name of a model's shape, cases (tuples of sizes), names of variants and of
    baselines, layers per call, and rounds."""

    shape: str
    cases: tuple[tuple[int, ...], ...]
    variants: tuple[str, ...]
    baselines: tuple[str, ...]
    layers: int
    rounds: int

    def check(self, sizes: tuple[str, ...], baselines: Iterable[str]) -> None:
        """Check all but the variants.

        sizes: names of the numbers in a case. baselines: legal names. Raises ValueError for unknown
        names and for numbers below 1.
        """
        check_names("shape", [self.shape], SHAPES)
        check_names("baselines", self.baselines, baselines)
        numbers = [("layers", self.layers), ("rounds", self.rounds)]
        for case in self.cases:
            numbers += zip(sizes, case, strict=True)
        for field, number in numbers:
            if number < 1:
                raise SettingError(f"`{field}` must be at least 1, got {number}")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A kernel whose output is right, ready to be timed.

    kind: `variant` or `baseline`. bytes: that one layer must read. distinct_layers: layers with
    data of their own, which a call cycles through. rank, flops: as in a result.
    """

    kind: str
    step: Step
    bytes: float = 0.0
    distinct_layers: int = 0
    rank: int | None = None
    flops: float = 0.0


Candidates = Iterable[tuple[str, Candidate | str]]  # by name; a string says why it is not timed
Skips = list[tuple[str, str]]  # names, with the reason why they were not timed


def measure(
    job: KernelJob, sizes: Mapping[str, int], candidates: Candidates, device: torch.device
) -> tuple[list[tuple[Candidate, dict[str, Any]]], Skips]:
    """Time the candidates of one case in turns.

    sizes: the case's sizes by name. Returns each candidate with its result (times in microseconds a
    layer, and the case's fastest baseline), and what was not timed.
    """
    runnable: dict[str, Candidate] = {}
    skipped: Skips = []
    for name, candidate in candidates:
        if isinstance(candidate, str):
            skipped.append((name, candidate))
        else:
            runnable[name] = candidate
    steps = {name: x.step for name, x in runnable.items()}
    if not steps:
        return [], skipped
    try:
        times = time_steps(steps, layers=job.layers, rounds=job.rounds, device=device)
    except Exception as error:  # the case fails as a whole, and the next one still runs
        return [], [*skipped, *((name, f"with all others: {reason(error)}") for name in steps)]
    baselines = [name for name, x in runnable.items() if x.kind == "baseline"]
    best = min(baselines, key=lambda name: times[name].us, default=None)
    best_us = times[best].us if best else None
    results = []
    for name, x in runnable.items():
        result: dict[str, Any] = {"variant": name, "kind": x.kind, "shape": job.shape}
        result |= {**sizes, **asdict(times[name])}
        result |= {"fastest_baseline": best, "fastest_baseline_us": best_us}
        results.append((x, result | {"speedup_vs_fastest": best_us and best_us / times[name].us}))
    return results, skipped


def check_outputs(name: str, out: Tensor, expected: Tensor) -> None:
    """Raises RuntimeError where `out` [Hq, >= d] is not `expected` [Hq, d], padded with zeros."""
    padded = torch.zeros_like(out, dtype=torch.float32)
    padded[:, : expected.shape[1]] = expected
    error = torch.linalg.vector_norm(out.float() - padded)
    norm = torch.linalg.vector_norm(padded)
    if not bool(error <= TOLERANCE * norm):
        raise RuntimeError(
            f"{name}: outputs are off by {float(error / norm):.3g} of their norm, more than"
            f" {TOLERANCE}; nothing is timed that is not right"
        )


def check_names(field: str, names: Iterable[str], legal: Iterable[str]) -> None:
    """Raises ValueError for an unknown name."""
    for name in names:
        if name not in legal:
            raise ValueError(f"{field}: unknown name {name!r}; legal: {', '.join(legal)}")


def reason(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())[:MAX_REASON]
    known = isinstance(error, RuntimeError | Unavailable) and text
    return text if known else f"{type(error).__name__}: {text}".removesuffix(": ")
