"""Recipes and settings, as frozen dataclasses whose fields have a help text and legal values.

The command line makes its flags from them. Importing this module does not import torch.
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
from kvfold.utils.kinds import describe, fits

BITS = (16, 8, 6, 4, 3, 2, 1)  # of all formats; a test compares
Share = Literal["head", "group", "joint", "kv"]  # heads of a latent: one, some, all; or K and V too

PAGE = 32  # default tokens of a page
SEEDS: dict[str, Any] = {"least": 0, "below": 2**63}  # what every generator takes
DEFAULT_KEEP = 0.5  # default share of the cache that stays, for recipes that plan no bits
Prefer = Literal["speed", "balanced", "size"]  # of a plan's bits, see `preference`
LEVELS = (8, 4, 2)  # default bits of planned numbers: those that kernels read
ALL_LEVELS = BITS[1:]
AUTO = "auto"  # the policy that evaluation.auto chooses
EXPERIMENTAL = [name for name, preset in POLICIES.items() if preset.experimental]


@dataclass(frozen=True)
class Setting:
    """The help text and legal values of a field: `page: int = setting(32, "Rows.", least=1)`.

    least, most: inclusive bounds, in `unit`; above, below: exclusive bounds. choices: the legal
    values. objects: a type whose instances are legal beside `choices`, in Python only. hint: advice
    at the end of an error. off: the flag that turns a default of True off, and its help. None is
    legal where the field's type allows it. NaN and infinity never are.
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
        """The legal values in words; empty if all values are legal."""
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
        """The help text, with the legal values."""
        legal = self.legal
        return f"{self.help} {legal[0].upper()}{legal[1:]}." if legal else self.help

    def allows(self, value: Any) -> bool:
        """Whether a value of the right type is legal."""
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
        """Raises SettingError for a value of the setting `name` that is not of type `kind`, or not
        legal."""
        typed = fits(value, kind)
        if typed and (value is None or self.allows(value)):
            return
        bare = self.choices or (typed and self.legal)
        legal = self.legal if bare else ", ".join(filter(None, (describe(kind), self.legal)))
        got = f"{',' if typed and not self.choices else ';'} got {value!r}"
        raise SettingError(f"`{name}` must be {legal}{got}{self.hint and f'; {self.hint}'}")


def setting(default: Any, help: str, **rules: Any) -> Any:
    """A dataclass field with a `Setting`. rules: the fields of `Setting`."""
    rule = Setting(help, **rules)
    return field(default=default, metadata={"setting": rule, "help": rule.text})


@lru_cache
def settings_of(config: type) -> dict[str, tuple[Any, Setting]]:
    """Type and setting of the fields of a config class that have a setting."""
    named = {x.name for x in fields(config) if "setting" in x.metadata}
    return {name: rule for name, rule in _fields_of(config).items() if name in named}


@lru_cache
def _fields_of(config: type) -> dict[str, tuple[Any, Setting]]:
    """Type and setting of all fields; the default Setting, which allows all, for those without."""
    types = get_type_hints(config)
    return {x.name: (types[x.name], x.metadata.get("setting", Setting())) for x in fields(config)}


def check(config: Any) -> None:
    """Raises SettingError for a field whose value has the wrong type, or is not legal."""
    defaults, unset = config.__class__, object()
    for name, (kind, setting) in _fields_of(defaults).items():
        value = getattr(config, name)
        if value is not getattr(defaults, name, unset):  # defaults are legal
            setting.check(name, value, kind)


def check_types(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raises SettingError for an argument whose type is not that of its annotation."""
    for name, kind in get_type_hints(function).items():
        if name in arguments and not fits(arguments[name], kind):
            Setting().check(name, arguments[name], kind)


def parse_share(name: str, value: float | str | None) -> float:
    """A share in [0, 1] from a number, or from text such as "0.1%" or ".001"; None and "" are 0.
    Raises SettingError that names the setting."""
    text = str(value or 0).strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if isinstance(value, bool) or not 0 <= share <= 1:
        raise SettingError(
            f"`{name}` must be a share such as 0.1% or .001, at most 1; got {value!r}"
        )
    return share


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a cache is compressed: its directions, and how many of them each latent keeps.

    basis: the directions (a name of compression.bases). keys, values: how many heads share a
    latent: one (`head`), `group_size` (`group`), all (`joint`), or all heads' keys and values
    together (`kv`, set on both). ranks: how the budget is spent (a name of compression.ranks).
    equal_ranks: all latents of W_K in a layer, and all of W_V, get one rank (ranks 'fisher', Palu
    §4.1). gradients: weight errors by the loss's gradient. reduce: prune and cluster calibration
    vectors before the SVD (ZDC §5.1). codebooks: calibrate uneven quantisation levels (format
    kvquant). centroids: of the k-means of `reduce`, for each of q, k and v (None: see
    statistics.reduce). skip_layers: layers that stay uncompressed, counted from 0. whole_share:
    the first of all layers that stay uncompressed too (ranks 'condition', LoRC §6.2).
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
    whole_share: float = setting(0.0, "Share of the layers.", least=0, below=1)

    def __post_init__(self) -> None:
        check(self)
        if (self.keys == "kv") != (self.values == "kv"):
            raise SettingError("`keys='kv'` and `values='kv'` go together: one latent serves both")
        if self.codebooks and self.keys == "kv":
            raise SettingError(
                "`codebooks` serve keys or values, and with `keys='kv'` a latent holds both"
            )
        if self.centroids is not None and (not self.reduce or self.centroids < 1):
            raise SettingError(
                f"`centroids` must be at least 1 and needs `reduce=True`, got {self.centroids} and "
                f"`reduce={self.reduce}`"
            )


REMOVED: dict[str, Any] = {"least": 0, "below": 1}
FORMER_RATIOS = {"narrow_keys": "low_rank_keys", "narrow_values": "low_rank_values"}


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """Ratios of ZDC's two ranks (§5.2): what important and unimportant tokens lose, and how many
    tokens are important.

    keys, values: shares of a head's numbers removed from important tokens (p_QK, p_VW; p^i).
    low_rank_keys, low_rank_values: the same for unimportant tokens (p^u). important,
    important_last: shares of tokens that are important in the first and in the last layer,
    interpolated linearly between (g). by: what ranks tokens: their own softmax denominators, or the
    attention that they receive. Raises SettingError for ratios that are not legal.
    """

    keys: float = setting(0.0, "Removed.", **REMOVED)
    values: float = setting(0.0, "Removed.", **REMOVED)
    low_rank_keys: float = setting(0.5, "Removed.", **REMOVED)
    low_rank_values: float = setting(0.5, "Removed.", **REMOVED)
    important: float = setting(0.25, "Share.", least=0, most=1)
    important_last: float = setting(0.5, "Share.", least=0, most=1)
    by: Literal["denominators", "attention"] = "denominators"

    def __post_init__(self) -> None:
        check(self)
        for name in ("keys", "values"):
            less, more = getattr(self, name), getattr(self, f"low_rank_{name}")
            if more < less:
                raise SettingError(
                    f"`low_rank_{name}` must be at least `{name}`: unimportant tokens lose more "
                    f"than important ones; got {more} and {less}"
                )

    @classmethod
    def parse(cls, text: str) -> "Ratios":
        """Parse text such as "low_rank_keys=0.5,important=0.2". Names with `narrow` in place of
        `low_rank` are accepted too, as they were called so. Raises SettingError."""
        values: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, _, value = (x.strip() for x in part.partition("="))
            name = FORMER_RATIOS.get(name, name)
            known = [x.name for x in fields(cls)]
            if name not in known:
                legal = ", ".join(known)
                raise SettingError(f"`hybrid` has no {name!r}: give some of {legal}, as name=value")
            try:
                values[name] = value if name == "by" else float(value)
            except ValueError:
                raise SettingError(f"`hybrid`: {name} must be a number; got {value!r}") from None
        if not values:
            legal = ", ".join(x.name for x in fields(cls))
            raise SettingError(f"`hybrid` is empty: give some of {legal}, as name=value")
        try:
            return cls(**values)
        except SettingError as error:
            raise SettingError(f"`hybrid`: {str(error).replace('`', '')}") from error


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Settings of LoRA on a compressed model; the defaults are those of Palu App. E."""

    steps: int = setting(100, "Steps of the optimiser.", least=1)
    batch: int = setting(4, "Windows of text a step, one at a time.", least=1)
    rank: int = setting(32, "Rank of an adapter; alpha is the same.", least=1)
    learning_rate: float = setting(
        2e-4, "Reached after a tenth of the steps; then it falls to zero by a cosine.", above=0
    )
    maps: bool = setting(False, "Add adapters to the maps that compute cache entries, too.")
    seed: int = setting(0, "Seed of the adapters, and of the order of the text.", **SEEDS)

    def __post_init__(self) -> None:
        check(self)


MOST_WINDOW = 4096  # tokens: more memory for each sequence than its compressed tokens take


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How an engine stores tokens: their bits, pages and eviction.

    Raises SettingError for values that are not legal, and for fields that exclude each other.
    """

    kv_bytes: int | None = setting(
        None,
        "Bytes of the page pool, with exact windows; by default a share of the free memory.",
        least=1,
    )
    page: int | None = setting(
        None,
        f"Tokens of a page; by default {PAGE}, or as the policy or format was published with.",
        least=1,
        unit="row",
    )
    bits: int | None = setting(
        None, "Bits of every number; by default the planned ones, or 16.", choices=BITS
    )
    zeros: bool = setting(False, "Store a zero point with every scale.")
    sub_group: int | None = setting(
        None,
        "Most numbers that share a scale; by default the format's, mostly a whole latent.",
        least=8,
        unit="numbers",
    )
    rotate: bool = setting(
        True,
        "Rotate numbers that share a scale before they are quantised, so that they are alike.",
        off=("no_rotation", "Quantise numbers without a rotation."),
    )
    format: str = setting(
        "integers",
        f"How numbers are packed; {'; '.join(f'{x}: {y.summary}' for x, y in FORMATS.items())}.",
        choices=FORMATS,
    )
    residual: int | None = setting(
        None,
        "Up to so many last tokens stay in 16 bits, until all of them are packed at once; a"
        " multiple of the page; by default the format's.",
    )
    window: int = setting(
        0,
        "So many last tokens of a sequence are also kept exactly as the model computed them, and"
        " attention reads them there.",
        least=0,
        most=MOST_WINDOW,
        unit="tokens",
    )
    evict: str | Policy | None = setting(
        None,
        f"A policy; {AUTO}: measures a few on the model first, and takes the best; experimental:"
        f" {', '.join(EXPERIMENTAL)}.",
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
        "Refit the remaining keys and values after an eviction to the attention outputs before it.",
    )
    when_full: str = setting(
        "pre-empt",
        "If the page pool is full: pre-empt a request, whose tokens are computed again later; or"
        " demote the oldest tokens of requests from 8 to 4 bits first.",
        choices=("pre-empt", "demote"),
    )

    def __post_init__(self) -> None:
        check(self)
        self._check_eviction()
        self._check_packing()
        self._check_demotion()
        self._check_window()

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
                "`repair=True` refits what stays after an eviction: set `evict` too, such as "
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

    def _check_demotion(self) -> None:
        if self.when_full != "demote":
            return
        needs = "`when_full='demote'` takes tokens from 8 to 4 bits"
        if self.bits != 8:
            got = "none are given" if self.bits is None else f"got {self.bits}"
            raise SettingError(f"{needs}; {got}: set `bits=8`, or leave `when_full` out")
        if self.evict is not None:
            raise SettingError(
                f"{needs} where memory is short, and `evict={str(self.evict)!r}` drops tokens"
                " instead: leave one of them out"
            )
        if self.packs_pages or self.format != "integers":
            raise SettingError(
                f"{needs}, with one scale per token; got {self.packing}: leave that out, or leave"
                " `when_full` out"
            )

    def _check_window(self) -> None:
        if not self.window:
            return
        needs = f"`window={self.window}` keeps the last tokens beside compressed ones"
        if self.evict is not None:
            raise SettingError(
                f"{needs}, of all tokens, and `evict={str(self.evict)!r}` drops some: leave one of"
                " them out"
            )
        if self.packs_pages or self.format != "integers":
            raise SettingError(
                f"{needs}, which are packed one by one; got {self.packing}: leave that out, or"
                " leave `window` out"
            )
        if self.when_full == "demote":
            raise SettingError(
                f"{needs}, and `when_full='demote'` stores tokens in two places, too: leave one of"
                " them out"
            )

    @property
    def packing(self) -> str:
        """The settings that were given of how tokens are packed, in backquotes."""
        settings = [f"`format={self.format!r}`"] * (self.format != "integers")
        settings += [f"`residual={self.residual}`"] * (self.residual is not None)
        return " and ".join(settings)

    @property
    def packs_pages(self) -> bool:
        """Whether tokens are packed together, a page at a time, and so cannot move to other
        pages."""
        return self.residual is not None or format_of(self.format).per_channel
