"""Recipes and run settings as frozen dataclasses, each field with its help and what it may hold.

The command line makes its flags of them. Importing this imports no torch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from math import inf
from numbers import Real
from typing import Any, Literal, get_type_hints

from kvfold.cache.eviction.policies import POLICIES
from kvfold.cache.eviction.policy import Policy
from kvfold.layout.formats import FORMATS, format_of
from kvfold.utils.errors import SettingError
from kvfold.utils.kinds import fits, spelt

BITS = (16, 8, 6, 4, 3, 2, 1)  # of all formats; a test compares
Share = Literal["head", "group", "joint", "kv"]

PAGE = 32  # rows, where neither the configuration nor a policy says
SEEDS: dict[str, Any] = {"least": 0, "below": 2**63}  # what every generator takes
DEFAULT_KEEP = 0.5  # share of the cache that stays where no size is asked for
Prefer = Literal["speed", "balanced", "size"]  # what plans of dimensions and bits are for
LEVELS = (8, 4, 2)  # bits of planned numbers where none are named: those that kernels read
ALL_LEVELS = BITS[1:]
AUTO = "auto"  # the policy that evaluation.auto finds
EXPERIMENTAL = [name for name, preset in POLICIES.items() if preset.experimental]


@dataclass(frozen=True)
class Setting:
    """What a field is for and may hold: `page: int = setting(32, "Rows.", least=1)`.

    least, most: bounds, of `unit`; above, below: those that are not legal themselves. choices:
    legal values. objects: a type whose instances are legal beside `choices`, in Python only. hint:
    the way out of an error. off: the flag that turns a default of True off, and
    its help. None is legal where the field's type says so, and NaN and infinity nowhere.
    """

    help: str = ""
    least: float = -inf
    above: float = -inf
    most: float = inf
    below: float = inf
    unit: str = ""
    choices: Iterable[Any] = ()
    objects: type | None = None
    hint: str = ""
    off: tuple[str, str] | None = None

    @property
    def legal(self) -> str:
        """The legal values in words; nothing if all are."""
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        if self.above > -inf:
            return f"above {self.above}" if self.most == inf else f"in ({self.above}, {self.most}]"
        if self.least == -inf:
            return ""
        if self.most < inf:
            return f"in [{self.least}, {self.most}]"
        lowest = f"at least {self.least}{self.unit and ' '}{self.unit}"
        return lowest if self.below == inf else f"{lowest} and below {self.below:g}"

    @property
    def text(self) -> str:
        """Help with the legal values."""
        legal = self.legal
        return f"{self.help} {legal[0].upper()}{legal[1:]}." if legal else self.help

    def allows(self, value: Any) -> bool:
        if self.objects is not None and isinstance(value, self.objects):
            return True
        if self.choices:
            return value in self.choices
        if not isinstance(value, Real):
            return True
        try:
            number = float(value)
        except OverflowError:
            return False
        return self.above < number < self.below and self.least <= number <= self.most

    def check(self, name: str, value: Any, kind: Any) -> None:
        """Raises SettingError for a value of the setting `name` that is not legal, or no `kind`."""
        typed = fits(value, kind)
        if typed and (value is None or self.allows(value)):
            return
        bare = self.choices or (typed and self.legal)
        legal = self.legal if bare else ", ".join(filter(None, (spelt(kind), self.legal)))
        got = f"{',' if typed and not self.choices else ';'} got {value!r}"
        raise SettingError(f"`{name}` must be {legal}{got}{self.hint and f'; {self.hint}'}")


def setting(default: Any, help: str, **rules: Any) -> Any:
    """A field of a config class, with its `Setting`, and the help that the command line shows."""
    found = Setting(help, **rules)
    return field(default=default, metadata={"setting": found, "help": found.text})


@lru_cache
def settings_of(config: type) -> dict[str, tuple[Any, Setting]]:
    """Type and setting of every field of a config class that has one."""
    own = {x.name for x in fields(config) if "setting" in x.metadata}
    return {name: found for name, found in _fields_of(config).items() if name in own}


@lru_cache
def _fields_of(config: type) -> dict[str, tuple[Any, Setting]]:
    """Type and setting of every field, an empty one where it has none."""
    types = get_type_hints(config)
    return {x.name: (types[x.name], x.metadata.get("setting", Setting())) for x in fields(config)}


def check(config: Any) -> None:
    """Raises SettingError for a field of another type than its own, or that holds what its setting
    does not allow."""
    defaults, unset = config.__class__, object()
    for name, (kind, setting) in _fields_of(defaults).items():
        value = getattr(config, name)
        if value is not getattr(defaults, name, unset):  # defaults are legal, and most are left
            setting.check(name, value, kind)


def check_types(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raises SettingError for an argument that is not of its annotation's type."""
    for name, kind in get_type_hints(function).items():
        if name in given and not fits(given[name], kind):
            Setting().check(name, given[name], kind)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a cache is compressed along its dimensions.

    basis: which directions (see compression.bases). keys, values: how many heads share a latent:
    one (`head`), `group_size` (`group`), all (`joint`), or all heads' keys and values together
    (`kv`, set on both). ranks: how the budget is spent (see compression.ranks). equal_ranks: all
    latents of W_K in a layer, and all of W_V, get one rank (ranks 'fisher', Palu §4.1). gradients:
    weigh errors by the loss's gradient. reduce: prune and cluster rows before the SVD (ZDC §5.1).
    codebooks: levels for few bits are calibrated (format kvquant).
    centroids: of its k-means, for each of q, k and v (None: see statistics.reduce). skip_layers:
    layers that stay whole, counted from 0. skip_threshold: so do those whose cumulative condition
    number has a log10 above it (ranks 'condition', LoRC §6.2).
    """

    name: str
    basis: str
    keys: Share = "head"
    values: Share = "head"
    ranks: str = "greedy"
    equal_ranks: bool = False
    group_size: int = setting(4, "Heads of a group.", least=1)
    gradients: bool = False
    reduce: bool = False
    codebooks: bool = False
    centroids: int | None = None
    skip_layers: tuple[int, ...] = ()
    skip_threshold: float | None = None

    def __post_init__(self) -> None:
        check(self)
        if (self.keys == "kv") != (self.values == "kv"):
            raise SettingError("`keys='kv'` and `values='kv'` go together: one latent serves both")
        if self.codebooks and self.keys == "kv":
            raise SettingError("`codebooks` are of keys or of values, and `keys='kv'` is of both")
        if self.centroids is not None and (not self.reduce or self.centroids < 1):
            raise SettingError(
                f"`centroids` must be at least 1 and needs `reduce=True`, got {self.centroids} and "
                f"`reduce={self.reduce}`"
            )


REMOVED: dict[str, Any] = {"least": 0, "below": 1}


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """ZDC's hybrid ratios (§5.2): what tokens lose by their importance, and how many are important.

    keys, values: shares of a head's numbers that are removed of all tokens (p_QK and p_VW of
    important ones, p^i). narrow_keys, narrow_values: the same of unimportant ones (p^u).
    important, important_last: shares of tokens that are important in the first and in the last
    layer, between them evenly more (g). by: what ranks tokens, their own softmax denominators, or
    the attention that they get. Raises SettingError.
    """

    keys: float = setting(0.0, "Removed.", **REMOVED)
    values: float = setting(0.0, "Removed.", **REMOVED)
    narrow_keys: float = setting(0.5, "Removed.", **REMOVED)
    narrow_values: float = setting(0.5, "Removed.", **REMOVED)
    important: float = setting(0.25, "Share.", least=0, most=1)
    important_last: float = setting(0.5, "Share.", least=0, most=1)
    by: Literal["denominators", "attention"] = "denominators"

    def __post_init__(self) -> None:
        check(self)
        for name in ("keys", "values"):
            less, more = getattr(self, name), getattr(self, f"narrow_{name}")
            if more < less:
                raise SettingError(
                    f"`narrow_{name}` must be at least `{name}`: unimportant tokens lose more than "
                    f"important ones; got {more} and {less}"
                )

    @classmethod
    def parse(cls, text: str) -> "Ratios":
        """From "narrow_keys=0.5,important=0.2". Raises SettingError."""
        given: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, _, value = (x.strip() for x in part.partition("="))
            known = [x.name for x in fields(cls)]
            if name not in known:
                legal = ", ".join(known)
                raise SettingError(f"`hybrid` has no {name!r}: give some of {legal}, as name=value")
            try:
                given[name] = value if name == "by" else float(value)
            except ValueError:
                raise SettingError(f"`hybrid`: {name} must be a number; got {value!r}") from None
        if not given:
            legal = ", ".join(x.name for x in fields(cls))
            raise SettingError(f"`hybrid` is empty: give some of {legal}, as name=value")
        try:
            return cls(**given)
        except SettingError as error:
            raise SettingError(f"`hybrid`: {str(error).replace('`', '')}") from error


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """How low-rank additions to a compressed model's weights learn; defaults as in Palu App. E."""

    steps: int = setting(100, "Steps of the optimiser.", least=1)
    batch: int = setting(4, "Windows of text a step, one at a time.", least=1)
    rank: int = setting(32, "Of what is added to a weight; alpha is the same.", least=1)
    learning_rate: float = setting(
        2e-4, "Reached after a tenth of the steps; then it falls to zero by a cosine.", above=0
    )
    maps: bool = setting(False, "Add to the maps that make rows, too.")
    seed: int = setting(0, "Of what is added, and of the order of the text.", **SEEDS)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How a running engine stores tokens: bits, pages, and what it evicts.

    Raises ValueError for what a field may not hold, and for fields that exclude each other.
    """

    kv_bytes: int | None = setting(
        None, "Bytes of the page pool; by default a share of what is free.", least=1
    )
    page: int | None = setting(
        None,
        f"Rows a page; by default {PAGE}, or what the policy or format was published with.",
        least=1,
        unit="row",
    )
    bits: int | None = setting(
        None, "Of every number; by default what a checkpoint plans, or 16.", choices=BITS
    )
    zeros: bool = setting(False, "Store a zero beside every scale.")
    sub_group: int | None = setting(
        None,
        "Most numbers that share a scale; by default a whole latent, 32 with kivi, 64 with gear.",
        least=8,
        unit="numbers",
    )
    rotate: bool = setting(
        True,
        "Turn numbers that share a scale first, so that they are alike.",
        off=("no_rotation", "Quantise numbers as they are."),
    )
    format: str = setting(
        "integers",
        "How numbers are packed; kivi: keys per channel of a page, values per token, with "
        "zeros, not turned; kvquant: at calibrated levels, with outliers, of a model compressed "
        "by recipe kvquant or kvquant-z; gear: kivi, outliers and a low-rank part of the rest.",
        choices=FORMATS,
    )
    residual: int | None = setting(
        None,
        "The last 1 to so many tokens wait in 16 bits, until all are packed at once; whole"
        " pages, 128 with kivi, 64 with gear.",
    )
    evict: str | Policy | None = setting(
        None,
        f"A policy; {AUTO}: the one that keeps most of a few, measured on the model first;"
        f" experimental: {', '.join(EXPERIMENTAL)}.",
        choices=(*POLICIES, AUTO),
        objects=Policy,
    )
    keep_tokens: float | None = setting(
        None,
        "Share of the prompt's tokens to keep; never fewer than the policy protects.",
        above=0,
        most=1,
    )
    max_cache_tokens: int | None = setting(
        None,
        "Tokens to keep of a request, averaged over heads; never fewer than the policy protects.",
        least=1,
    )
    repair: bool = setting(
        False,
        "Fit keys and values that stay after an eviction, so that they attend as all rows did.",
    )

    def __post_init__(self) -> None:
        check(self)
        self._check_eviction()
        self._check_packing()

    def _check_eviction(self) -> None:
        both = self.keep_tokens is not None and self.max_cache_tokens is not None
        if both:
            raise SettingError(
                f"`max_cache_tokens={self.max_cache_tokens}` and `keep_tokens={self.keep_tokens}` "
                "both limit the cache: give one"
            )
        limited = self.keep_tokens is not None or self.max_cache_tokens is not None
        if limited and self.evict is None:
            raise SettingError(
                "`keep_tokens` and `max_cache_tokens` need a policy that says what goes: set "
                "`evict`, such as `evict='kv-compress'`"
            )
        if self.repair and self.evict is None:
            raise SettingError(
                "`repair=True` is of rows that stay after an eviction: set `evict` too, such as "
                "`evict='kvzip-keys'`, or leave it out"
            )
        if self.evict is not None and self.packs_pages:
            per_channel = format_of(self.format).per_channel
            what = f"`format={self.format!r}`" if per_channel else f"`residual={self.residual}`"
            raise SettingError(
                f"{what} and `evict={str(self.evict)!r}` exclude each other: tokens are packed "
                "together in their order, so they cannot move to other pages. Leave one of them out"
            )

    def _check_packing(self) -> None:
        chosen = format_of(self.format)
        if not chosen.plans and self.bits in (None, 16):
            got = "none are given" if self.bits is None else f"got {self.bits}"
            raise SettingError(
                f"`format={self.format!r}` quantises all numbers, so `bits` must be less than 16; "
                f"{got}: set `bits` to one of {', '.join(map(str, chosen.widths))}, or leave "
                "`format` out"
            )
        page = self.page or chosen.rows or PAGE
        residual = chosen.residual if self.residual is None else self.residual
        if residual is not None and (residual < page or residual % page):
            raise SettingError(
                f"`residual` must be whole pages of {page} rows, which are packed together, got "
                f"{residual}: take {max(residual // page, 1) * page}, or another `page`"
            )

    @property
    def packs_pages(self) -> bool:
        """Whether tokens are packed together, whole pages at once, and stay in their order."""
        return self.residual is not None or format_of(self.format).per_channel
