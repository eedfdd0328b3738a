"""How small a cache is to be."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from kvfold.config import DEFAULT_KEEP
from kvfold.search import parse_budget


@dataclass(frozen=True, kw_only=True)
class Target:
    """One way to say how small; without any, DEFAULT_KEEP. Raises ValueError for another value.

    keep: share of the numbers, in (0, 1]. factor: so many times smaller, in dimensions and bits
    planned together. bytes_per_token: the same as bytes. budget: "ppl<=RATIO", the smallest keep
    whose perplexity on held-out text is within that ratio of the original's.
    """

    keep: float | None = None
    factor: float | None = None
    bytes_per_token: float | None = None
    budget: str | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        check_exclusive({f"{name}={value}": value for name, value in given.items()})
        if not given:
            object.__setattr__(self, "keep", DEFAULT_KEEP)
        if self.keep is not None:
            check_keep(self.keep)
        if self.factor is not None and not 1 <= self.factor < 1000:
            raise ValueError(f"factor must be at least 1 and below 1000, got {self.factor:g}")
        if self.bytes_per_token is not None and not self.bytes_per_token > 0:
            raise ValueError(f"bytes_per_token must be above 0, got {self.bytes_per_token:g}")
        if self.budget is not None:
            parse_budget(self.budget)

    @property
    def limit(self) -> float | None:
        """The perplexity ratio that `budget` allows."""
        return None if self.budget is None else parse_budget(self.budget)


def check_exclusive(given: Mapping[str, object]) -> None:
    """Raises ValueError where more than one size is given; keys: as the user wrote them."""
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} exclude each other: each decides the size alone")


def check_keep(keep: float) -> None:
    """Raises ValueError for a share that is none."""
    if not 0 < keep <= 1:
        raise ValueError(f"keep must be in (0, 1], the share of the cache to keep; got {keep}")
