"""What benchmarks of one kernel have in common: what they are asked for, and what went wrong."""

from collections.abc import Iterable, Mapping

from kvfold.bench.baselines import Unavailable
from kvfold.bench.timing import Timing

LONGEST = 300  # characters of a reason


def check_names(field: str, names: Iterable[str], legal: Iterable[str]) -> None:
    """Raises ValueError for a name that does not exist."""
    for name in names:
        if name not in legal:
            raise ValueError(f"{field}: unknown name {name!r}; legal: {', '.join(legal)}")


def reason(error: Exception) -> str:
    """What an error says, in a line."""
    text = " ".join(str(error).split())[:LONGEST]
    known = isinstance(error, RuntimeError | Unavailable) and text
    return text if known else f"{type(error).__name__}: {text}".removesuffix(": ")


def fastest(kinds: Mapping[str, str], times: Mapping[str, Timing]) -> tuple[str | None, float]:
    """The fastest of those whose kind is `baseline`, and its microseconds; (None, 0) if none."""
    baselines = [name for name, kind in kinds.items() if kind == "baseline"]
    name = min(baselines, key=lambda name: times[name].us, default=None)
    return name, times[name].us if name else 0.0
