"""`Target`: how small a cache is to be, and how its bits are planned."""

from dataclasses import dataclass
from typing import Any

from kvfold.compression.planning.preference import default_levels
from kvfold.config import ALL_LEVELS, Prefer, Ratios, Setting, check, setting
from kvfold.utils.errors import SettingError, renamed
from kvfold.utils.search import Budget, parse_budget, parse_ratio

SIZES = ("keep", "factor", "bytes_per_token", "budget", "hybrid")
SHARE: dict[str, Any] = {"above": 0, "most": 1, "hint": "it is the share of the cache to keep"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """The size of a compressed cache, by at most one field. Without any, `default.choose_recipe`
    decides by the recipe. Raises SettingError for values that are not legal.

    keep: share of the numbers, in (0, 1]. factor: how many times smaller, in dimensions and bits
    planned together. bytes_per_token: the same in bytes. budget: the smallest keep within
    "ppl<=RATIO", a ratio to the original's perplexity on held-out text, or "accuracy>=SHARE", a
    share of the original's accuracy on questions. hybrid: two ranks, by
    the importance of tokens: in these ratios, or "ppl<=RATIO", the smallest ratios tried that are
    within it. levels: the bits that planned numbers may have, descending (None: those of `prefer`).
    prefer: what the plan is for (see `preference`; None: `default.choose_recipe` decides). layouts:
    most bit-width layouts of the model, where bits are planned (see `few_layouts`; None:
    `default_layouts`).
    """

    keep: float | None = setting(None, "Share.", **SHARE)
    factor: float | None = setting(None, "Times.", least=1, below=1000)
    bytes_per_token: float | None = setting(None, "Bytes.", above=0)
    budget: str | None = None
    hybrid: Ratios | str | None = None
    levels: tuple[int, ...] | None = None
    prefer: Prefer | None = None
    layouts: int | None = setting(None, "Layouts.", least=1, below=1000)

    def __post_init__(self) -> None:
        check(self)
        sizes = {x: value for x in SIZES if (value := getattr(self, x)) is not None}
        if len(sizes) > 1:
            named = " and ".join(f"`{name}={value!r}`" for name, value in sizes.items())
            raise SettingError(f"{named} exclude each other: each decides the size alone")
        if self.budget is not None:
            parse_budget(self.budget)
        if isinstance(self.hybrid, str):
            with renamed(budget="hybrid"):
                parse_ratio(self.hybrid)
        object.__setattr__(self, "levels", self._levels())

    def _levels(self) -> tuple[int, ...] | None:
        default = default_levels(self.preference)
        may_plan = self.plans_bits or not self.has_size
        if self.preference != "balanced" and not may_plan:
            raise SettingError(
                f"`prefer={self.prefer!r}` is how bits are planned, and none are: say the size as"
                " `factor` or `bytes_per_token`"
            )
        if self.layouts is not None and not may_plan:
            raise SettingError(
                f"`layouts={self.layouts}` is of planned bits, and none are: say the size as"
                " `factor` or `bytes_per_token`"
            )
        if self.levels is None:
            return default if self.plans_bits else None
        if self.preference != "balanced" and tuple(self.levels) != default:
            raise SettingError(
                f"`levels` and `prefer={self.prefer!r}` exclude each other: each decides which bits"
                " numbers may have"
            )
        if not self.levels or not {*self.levels} <= {*ALL_LEVELS}:
            legal = ", ".join(map(str, ALL_LEVELS))
            raise SettingError(f"`levels` must be some of {legal}; got {self.levels!r}")
        if not may_plan:
            raise SettingError(
                "`levels` are the bits of planned numbers, and no bits are planned: give `factor`"
                " or `bytes_per_token` too"
            )
        return tuple(sorted({*self.levels}, reverse=True))

    @property
    def has_size(self) -> bool:
        """Whether it names a size."""
        return any(getattr(self, x) is not None for x in SIZES)

    @property
    def preference(self) -> Prefer:
        """What the plan is for: `prefer`, or "balanced"."""
        return self.prefer or "balanced"

    @property
    def named_size(self) -> tuple[str, Any]:
        """Name and value of the field that decides the size."""
        return next((x, value) for x in SIZES if (value := getattr(self, x)) is not None)

    @property
    def plans_bits(self) -> bool:
        """Whether bits are planned, not only dimensions."""
        return self.factor is not None or self.bytes_per_token is not None

    def check_align(self, align: int | None) -> None:
        """Raises SettingError for an `align` that is not legal, or any where bits are planned."""
        check_align(align)
        if self.plans_bits and align is not None:
            raise SettingError(
                "`align` is of ranks whose bits are not planned; tiers are whole units of what"
                " kernels read: leave it out, or say the size as `keep`"
            )

    @property
    def limit(self) -> Budget | None:
        """What `budget` allows."""
        return None if self.budget is None else parse_budget(self.budget)


def check_keep(keep: float) -> None:
    """Raises SettingError for a `keep` that is not in (0, 1]."""
    Setting(**SHARE).check("keep", keep, float)


def check_align(align: int | None) -> None:
    """Raises SettingError for an `align` that is not legal."""
    Setting(least=1, below=10**6).check("align", align, int | None)
