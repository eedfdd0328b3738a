"""Options that several commands share: frozen dataclasses, from which their flags are made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args

from cyclopts import Parameter, Token, convert

from kvfold.config import (
    ALL_LEVELS,
    SEEDS,
    CacheConfig,
    LoRA,
    Prefer,
    Ratios,
    check,
    setting,
    settings_of,
)
from kvfold.evaluation.tasks import LEGAL_ROWS
from kvfold.recipes import NAMES
from kvfold.recipes import Goal as GoalName
from kvfold.utils.errors import SettingError, renamed

if TYPE_CHECKING:
    from kvfold.compression.planning.target import Target

T = TypeVar("T")
MOST = 2**63  # more is no size of anything, and no float may hold it
_QUOTES = "'\""
_EXAMPLES: dict[Any, str] = {int: "1,8", float: ".5,.25"}  # of lists, by what they are of
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Model = Annotated[str, Parameter(help="A directory, a GGUF file, a hub id or reference:gqa.")]
ModelOrMaps = Annotated[
    str,
    Parameter(
        help="A directory, a GGUF file, a hub id, reference:gqa, or a folder of maps, which stands"
        " for the model that they were made for."
    ),
]
Files = Annotated[tuple[Path, ...], Parameter(consume_multiple=1, negative="", show_default=False)]
TaskFiles = Annotated[Files, Parameter(help=f"Files of {LEGAL_ROWS} rows (.jsonl, .xz, .gz).")]
RecipeName = Annotated[
    str | None,
    Parameter(
        help=f"One of {NAMES}. By default swift; with --fold and --keep or --budget"
        " the one of small, lean and swift that loses least and is predicted to be no slower than"
        " the model.",
        show_default=False,
    ),
]
Goal = Annotated[
    GoalName | None,
    Parameter(
        help="Instead of --recipe, what matters most: speed (swift, the default), memory (small:"
        " the smallest cache at a quality, and much slower steps), or balanced (lean).",
        show_default=False,
    ),
]
MapsName = Annotated[
    str | None,
    Parameter(
        help="Maps beside the weights, for a MODEL of any type: their folder, or a hub id USER/NAME"
        " or USER/NAME@REVISION.",
        show_default=False,
    ),
]
Flag = Annotated[bool, Parameter(negative="", show_default=False)]


def flags_of(config: type) -> Callable[[type[T]], type[T]]:
    """Gives a class a flag for every setting of `config`, of its default and with its help."""

    def add(options: type[T]) -> type[T]:
        for name, (kind, own) in settings_of(config).items():
            default, text = getattr(config, name), own.text
            if own.off is not None:
                (name, text), default = own.off, not default
            if own.objects is not None:
                kind = Union[tuple(x for x in get_args(kind) if x is not own.objects)]  # noqa: UP007
            options.__annotations__[name] = Flag if kind is bool else kind
            setattr(options, name, setting(default, text))
        return options

    return add


def converted(kind: Any, tokens: Sequence[Token]) -> Any:
    """The values of one flag, as cyclopts converts them. Raises ValueError for a fraction where a
    whole number is wanted, which cyclopts rounds, and for more than 64 bits hold."""
    whole = kind is int or int in get_args(kind)
    if whole:
        for token in tokens:
            if "." in token.value:
                raise ValueError(f"must be a whole number, got {token.value}")
    found = convert(kind, tokens)
    if whole and isinstance(found, int) and abs(found) >= MOST:
        raise ValueError(f"must be below {MOST:g}, got {found}")
    return found


def flag(name: str, value: str | None = None) -> str:
    """How a setting is written here: max_tokens -> --max-tokens, bits=4 -> --bits 4, check=False ->
    --no-check."""
    written = f"--{'no-' * (value == 'False')}{name.replace('_', '-')}"
    if value == "False":
        return written
    return written if value is None or value == "True" else f"{written} {value.strip(_QUOTES)}"


@Parameter(name="*", group="Device")
@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a model runs, and in which numbers."""

    dtype: Dtype = setting("auto", "auto: the checkpoint's own, computed in float32 on a CPU.")
    device: str | None = setting(None, "Such as cuda:0 or cpu; a GPU by default, if there is one.")

    def __post_init__(self) -> None:
        if self.device is not None:
            from kvfold.hub.device import check_device

            check_device(self.device)


@Parameter(name="*", group="Calibration")
@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Text that statistics are measured on."""

    calib: Files = setting(
        (), "Text files instead of ours (.txt, .xz, .gz); self: text that the model writes."
    )
    stats: Path | None = setting(None, "Statistics file: reused if it fits, written if absent.")
    max_tokens: Annotated[int | None, Parameter(name=("--calib-tokens", "--max-tokens"))] = setting(
        None,
        "Tokens of calibration text, which decide the time: by default 32768 where the model is on"
        " a GPU, 12288 on a CPU.",
        least=1,
    )
    seed: int = setting(0, "Of labels and clusters.", **SEEDS)

    def __post_init__(self) -> None:
        with renamed(max_tokens="calib_tokens"):
            check(self)


@Parameter(name="*", group="Size of the cache")
@dataclass(frozen=True, kw_only=True)
class Size:
    """How small a cache is to be: a `Target`, which checks it, and what ranks are multiples of."""

    keep: float | None = setting(
        None,
        "Share of the cache to keep, in (0, 1]; 0.5 if no size is given and the recipe plans no"
        " bits.",
    )
    budget: str | None = setting(
        None,
        'Instead of --keep: "ppl<=1.01" finds the smallest cache within 1 % of the perplexity.',
    )
    factor: float | None = setting(
        None,
        "Instead of --keep: a cache so many times smaller, in dimensions and bits together, for the"
        " least predicted loss. For recipes that predict it, ours, of which it is 4 if no size is"
        " given; runs on the paged cache.",
    )
    bytes_per_token: float | None = setting(None, "The same, as bytes a token.")
    hybrid: str | None = setting(
        None,
        "Instead of --keep: ZDC's two widths of a token by its importance, as shares removed, such "
        "as keys=0.25,values=0.25,narrow_keys=0.5,narrow_values=0.5,important=0.2,important_last="
        "0.5 (of tokens, in the first and the last layer), or ppl<=1.1: the smallest of some within"
        " 10 % of the perplexity. Runs on the paged cache.",
    )
    levels: str | None = setting(
        None,
        "Bits that planned numbers may have, separated by commas, of 8,6,4,3,2,1, or all of them;"
        " default 8,4,2, those that kernels read.",
    )
    prefer: Prefer | None = setting(
        None,
        "What such a plan is for: balanced, or without --recipe speed where a GPU can use it."
        " speed: rows that a Hopper GPU reads in one pass, of recipes swift and lean; size: the"
        " least loss at a size, in all levels, of which not all have kernels.",
    )
    align: int | None = setting(
        None,
        "Ranks are multiples of it; default 16, or 8 where heads are narrow. Not of planned bits.",
    )

    @property
    def target(self) -> "Target":
        from kvfold.compression.planning.target import Target

        given = {name: getattr(self, name) for name in ("keep", "budget", "factor", "prefer")}
        levels = parse_levels(self.levels)
        text = self.hybrid
        hybrid = text if text is None or "<" in text else Ratios.parse(text)
        size = self.bytes_per_token
        return Target(bytes_per_token=size, levels=levels, hybrid=hybrid, **given)


@Parameter(name="*", group="Search for the fastest")
@dataclass(frozen=True, kw_only=True)
class Fastest:
    """Whether time decides the recipe and the size, and of which step."""

    fastest: Flag = setting(
        False,
        "Of fast, swift, lean and small at sizes from 2 to 14 times, bits planned: the one within"
        " --budget whose decode step is predicted to take the least time on a GPU.",
    )
    batch: int | None = setting(None, "Sequences of that step: 64 without it.")
    context: int | None = setting(
        None,
        "Tokens that each of them has stored: 8192 without it, or as many as the model has"
        " positions.",
    )

    def check(self, size: Size, recipe: str | None, stats: Path | None) -> None:
        """Raises SettingError for what it needs or decides by itself, or what only it has."""
        given = {"recipe": recipe, "align": size.align, "stats": stats, "prefer": size.prefer}
        if not self.fastest:
            for name in ("batch", "context"):
                if getattr(self, name) is not None:
                    raise SettingError(
                        f"`{name}` is of the step that is predicted: give `fastest` too"
                    )
            return
        if size.budget is None:
            raise SettingError("`fastest` is the fastest within a loss: give `budget` too")
        for name, value in given.items():
            if value is not None:
                raise SettingError(
                    f"`fastest` tries several recipes, sizes and plans: leave `{name}` out"
                )


@Parameter(name="*", group="How texts are read")
@dataclass(frozen=True, kw_only=True)
class Windows:
    """How texts are read."""

    ctx: int | None = setting(None, "Tokens a window; by default 1024, or all there are.", least=1)
    chunk: int = setting(512, "Tokens fed through the cache at a time.", least=1)
    max_tokens: int | None = setting(None, "Most tokens to read of each text.", least=1)
    batch: int = setting(1, "Windows run together, on transformers' cache.", least=1)
    needle: Flag = setting(False, "Ask for facts hidden in 512 to 4K tokens.")
    needle_contexts: int = setting(25, "Contexts a length, four questions each.", least=1)
    see_question: Flag = setting(False, "Evict after the needle's question, not before it.")

    @property
    def agnostic(self) -> bool:
        return not self.see_question

    def __post_init__(self) -> None:
        check(self)
        for name in ("see_question", "needle_contexts"):
            if not self.needle and getattr(self, name) != getattr(Windows, name):
                raise SettingError(f"`{name}` is about hidden facts: give `needle` too")


@Parameter(name="*", group="Sampling")
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a continuation is chosen."""

    max_new_tokens: int = setting(128, "Most tokens to add.", least=1)
    temperature: float | None = setting(
        None,
        "Sample at this temperature; greedy without it.",
        above=0,
        hint="leave it out for greedy",
    )
    top_k: int | None = setting(None, "Sample from the K likeliest tokens only.", least=1)
    top_p: float | None = setting(
        None, "Sample from the likeliest tokens that hold this probability only.", above=0, most=1
    )
    seed: int = setting(0, "Of the sampling.", **SEEDS)

    def __post_init__(self) -> None:
        if self.temperature is None and (self.top_k is not None or self.top_p is not None):
            raise SettingError("`top_k` and `top_p` choose what is sampled; give `temperature` too")
        check(self)


@Parameter(name="*", group="Paged cache")
@dataclass(frozen=True, kw_only=True)
@flags_of(CacheConfig)
class Storage:
    """How the paged cache stores tokens, a `CacheConfig`. Any of these runs the model on it."""

    paged: Flag = setting(False, "Use the paged cache even without the rest.")

    @property
    def asked(self) -> bool:
        """Whether anything is set."""
        return any(getattr(self, field.name) != field.default for field in fields(self))

    def __post_init__(self) -> None:
        if self.asked:  # checking formats imports torch
            self._cache()

    def config(self, planned: bool = False) -> CacheConfig | None:
        """The engine's configuration; None where nothing asks for pages (`planned`: bits do).

        Raises SettingError for what only packed numbers have, where none are packed.
        """
        if not self.asked and not planned:
            return None
        cache = self._cache()
        packed = planned if cache.bits is None else cache.bits < 16
        for name in ("zeros", "sub_group", "no_rotation", "residual"):
            if not packed and getattr(self, name):
                raise SettingError(
                    f"`{name}` is about packed numbers, and at 16 bits none are: set `bits` to 8 or"
                    " fewer, or leave it out"
                )
        return cache

    def _cache(self) -> CacheConfig:
        given: dict[str, Any] = {
            name: not getattr(self, own.off[0]) if own.off else getattr(self, name)
            for name, (_, own) in settings_of(CacheConfig).items()
        }
        cache = CacheConfig(**given)
        if cache.evict and cache.keep_tokens is None and cache.max_cache_tokens is None:
            raise SettingError(
                f"`evict={cache.evict!r}` evicts down to a budget: give `keep_tokens`, such as "
                "0.5, or `max_cache_tokens`"
            )
        return cache


@Parameter(name="*", group="Low-rank additions")
@dataclass(frozen=True, kw_only=True)
@flags_of(LoRA)
class Adapters:
    """How low-rank additions learn, a `LoRA`."""

    def __post_init__(self) -> None:
        check(self)


PLACE, CALIBRATION, WINDOWS, ADAPTERS = Place(), Calibration(), Windows(), Adapters()
SIZE, FASTEST = Size(), Fastest()
SAMPLING, STORAGE = Sampling(), Storage()


def parse_levels(text: str | None) -> tuple[int, ...] | None:
    """Bits of planned numbers, or all of them. Raises ValueError for what is no list."""
    if text is None:
        return None
    return ALL_LEVELS if text == "all" else tuple(parse_list(text, "--levels", int, "8,4,2 or all"))


def parse_list(
    text: str, option: str, item: Callable[[str], T], example: str | None = None
) -> list[T]:
    """The values of a comma-separated option. Raises ValueError naming it."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        values = [item(part) for part in parts]
    except ValueError:
        values = []
    if not values or any(isinstance(x, int) and abs(x) >= MOST for x in values):
        example = example or _EXAMPLES.get(item)
        kind = f"numbers such as {example}" if example else "names"
        raise ValueError(f"{option}: {text!r} is not a comma-separated list of {kind}")
    return list(dict.fromkeys(values))
