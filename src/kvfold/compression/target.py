"""How small a cache is to be."""

from dataclasses import asdict, dataclass
from typing import Any

from kvfold.config import DEFAULT_KEEP, Setting, check, setting
from kvfold.errors import SettingError
from kvfold.search import parse_budget

SHARE: dict[str, Any] = {"above": 0, "most": 1, "hint": "it is the share of the cache to keep"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """One way to say how small; without any, DEFAULT_KEEP. Raises ValueError for another value.

    keep: share of the numbers, in (0, 1]. factor: so many times smaller, in dimensions and bits
    planned together. bytes_per_token: the same as bytes. budget: "ppl<=RATIO", the smallest keep
    whose perplexity on held-out text is within that ratio of the original's.
    """

    keep: float | None = setting(None, "Share.", **SHARE)
    factor: float | None = setting(None, "Times.", least=1, below=1000)
    bytes_per_token: float | None = setting(None, "Bytes.", above=0)
    budget: str | None = None

    def __post_init__(self) -> None:
        check(self)
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if len(given) > 1:
            named = " and ".join(f"`{name}={value!r}`" for name, value in given.items())
            raise SettingError(f"{named} exclude each other: each decides the size alone")
        if not given:
            object.__setattr__(self, "keep", DEFAULT_KEEP)
        if self.budget is not None:
            parse_budget(self.budget)

    @property
    def limit(self) -> float | None:
        """The perplexity ratio that `budget` allows."""
        return None if self.budget is None else parse_budget(self.budget)


def check_keep(keep: float) -> None:
    """Raises SettingError for a share that is none."""
    Setting(**SHARE).check("keep", keep, float)


def check_align(align: int | None) -> None:
    """Raises SettingError for what no rank can be a multiple of."""
    Setting(least=1, below=10**6).check("align", align, int | None)
