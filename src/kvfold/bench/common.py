"""What benchmarks of one kernel have in common: what they are asked for, how all that is timed in a
case takes turns, and what went wrong."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvfold.bench.baselines import Unavailable
from kvfold.bench.timing import Step, time_steps
from kvfold.bench.variants import SHAPES
from kvfold.utils.errors import SettingError

LONGEST = 300  # characters of a reason


@dataclass(frozen=True, kw_only=True)
class Job:
    """Cases to time: names of a shape, of variants and of baselines; sizes of every case; `layers`
    a call; rounds."""

    shape: str
    cases: tuple[tuple[int, ...], ...]
    variants: tuple[str, ...]
    baselines: tuple[str, ...]
    layers: int
    rounds: int

    def check(self, sizes: tuple[str, ...], baselines: Iterable[str]) -> None:
        """All but variants. sizes: names of a case's. Raises ValueError for names that do not exist
        and numbers below 1."""
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
    """A right call, to be timed. kind: `variant` or `baseline`; the rest is of a layer: bytes,
    that must be read; distinct_layers: how many the call goes round; rank, flops: as in a row."""

    kind: str
    step: Step
    bytes: float = 0.0
    distinct_layers: int = 0
    rank: int | None = None
    flops: float = 0.0


Found = Iterable[tuple[str, Candidate | str]]  # by name; or why it is not timed


def measure(
    job: Job, place: Mapping[str, int], found: Found, device: torch.device
) -> tuple[list[tuple[Candidate, dict[str, Any]]], list[tuple[str, str]]]:
    """Time all of one case in turns. place: the case's sizes, by name.

    What was timed, with what every row reports: times in microseconds a layer, and the fastest
    baseline of the case beside them; (name, reason) of what was not.
    """
    candidates: dict[str, Candidate] = {}
    skipped: list[tuple[str, str]] = []
    for name, made in found:
        if isinstance(made, str):
            skipped.append((name, made))
        else:
            candidates[name] = made
    steps = {name: x.step for name, x in candidates.items()}
    if not steps:
        return [], skipped
    try:
        times = time_steps(steps, layers=job.layers, rounds=job.rounds, device=device)
    except Exception as error:  # of the whole case: the next one runs on
        return [], [*skipped, *((name, f"with all others: {reason(error)}") for name in steps)]
    baselines = [name for name, x in candidates.items() if x.kind == "baseline"]
    best = min(baselines, key=lambda name: times[name].us, default=None)
    bar = times[best].us if best else None
    rows = []
    for name, x in candidates.items():
        row = {"variant": name, "kind": x.kind, "shape": job.shape, **place, **asdict(times[name])}
        row |= {"fastest_baseline": best, "fastest_baseline_us": bar}
        rows.append((x, row | {"speedup_vs_fastest": bar and bar / times[name].us}))
    return rows, skipped


def check_names(field: str, names: Iterable[str], legal: Iterable[str]) -> None:
    """Raises ValueError for a name that does not exist."""
    for name in names:
        if name not in legal:
            raise ValueError(f"{field}: unknown name {name!r}; legal: {', '.join(legal)}")


def reason(error: Exception) -> str:
    """An error in a line."""
    text = " ".join(str(error).split())[:LONGEST]
    known = isinstance(error, RuntimeError | Unavailable) and text
    return text if known else f"{type(error).__name__}: {text}".removesuffix(": ")
