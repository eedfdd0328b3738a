"""Options that several commands share: frozen dataclasses that flags are generated from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args

from cyclopts import CoercionError, Parameter, Token, convert

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
from kvfold.evaluation.tasks import LEGAL_EXAMPLES
from kvfold.recipes import NAMES
from kvfold.recipes import Goal as GoalName
from kvfold.utils.errors import SettingError, renamed
from kvfold.utils.search import parse_ratio

if TYPE_CHECKING:
    from kvfold.compression.planning.target import Target

T = TypeVar("T")
MOST = 2**63  # larger numbers are no size of anything, and a float may not hold them
_QUOTES = "'\""
_EXAMPLES: dict[Any, str] = {int: "1,8", float: ".5,.25"}  # of lists, by the type of their items
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Model = Annotated[str, Parameter(help="A directory, a GGUF file, a hub id or reference:gqa.")]
ModelOrMaps = Annotated[
    str,
    Parameter(
        help="A directory, a GGUF file, a hub id, reference:gqa, or a folder of maps, which loads"
        " the model that they were made for too."
    ),
]
Files = Annotated[tuple[Path, ...], Parameter(consume_multiple=1, negative="", show_default=False)]
TaskFiles = Annotated[
    Files,
    Parameter(
        help="Files with one task per line (.jsonl, .xz, .gz), as JSON with the fields"
        f" {LEGAL_EXAMPLES}."
    ),
]
RecipeName = Annotated[
    str | None,
    Parameter(
        help=f"The compression method: one of {NAMES}. By default swift; with --fold and --set keep"
        " or --budget, the one of small, lean and swift with the least loss that is predicted to be"
        " no slower than the original model.",
        show_default=False,
    ),
]
Goal = Annotated[
    GoalName | None,
    Parameter(
        help="What matters most, instead of --recipe: speed (the default: recipe swift, with"
        " prefer=speed where a GPU can use it), memory (small: the smallest cache at the same loss,"
        " but much slower steps), or balanced (lean).",
        show_default=False,
    ),
]
MapsName = Annotated[
    str | None,
    Parameter(
        help="Maps to use with MODEL, made by `kvfold compress`: a folder, or a hub id USER/NAME or"
        " USER/NAME@REVISION.",
        show_default=False,
    ),
]
NewDirectory = Annotated[
    Path,
    Parameter(help="A new directory to write to. It is written completely or not at all."),
]
Flag = Annotated[bool, Parameter(negative="", show_default=False)]


def flags_of(config: type) -> Callable[[type[T]], type[T]]:
    """Class decorator: adds a flag for every setting of `config`, with its default and help."""

    def add(options: type[T]) -> type[T]:
        for name, (kind, rule) in settings_of(config).items():
            default, text = getattr(config, name), rule.text
            if rule.off is not None:
                (name, text), default = rule.off, not default
            if rule.objects is not None:
                kind = Union[tuple(x for x in get_args(kind) if x is not rule.objects)]  # noqa: UP007
            options.__annotations__[name] = Flag if kind is bool else kind
            setattr(options, name, setting(default, text))
        return options

    return add


def converted(kind: Any, tokens: Sequence[Token]) -> Any:
    """The value of one flag, as cyclopts converts it. Raises ValueError for what is no number where
    one is expected, for a fraction where a whole number is, which cyclopts would round, and for
    numbers of more than 64 bits."""
    whole = kind is int or int in get_args(kind)
    if whole:
        for token in tokens:
            if "." in token.value:
                raise ValueError(f"must be a whole number, got {token.value}")
    try:
        value = convert(kind, tokens)
    except CoercionError as error:
        if error.target_type not in (int, float) or error.token is None:
            raise
        wanted = "a whole number" if error.target_type is int else "a number"
        raise ValueError(f"must be {wanted}, got {error.token.value or 'nothing'}") from None
    if whole and isinstance(value, int) and abs(value) >= MOST:
        raise ValueError(f"must be below {MOST:g}, got {value}")
    return value


def flag(name: str, value: str | None = None) -> str:
    """A setting as a flag: max_tokens -> --max-tokens, bits=4 -> --bits 4, check=False ->
    --no-check."""
    written = f"--{'no-' * (value == 'False')}{name.replace('_', '-')}"
    if value == "False":
        return written
    return written if value is None or value == "True" else f"{written} {value.strip(_QUOTES)}"


@Parameter(name="*", group="Device")
@dataclass(frozen=True, kw_only=True)
class Place:
    """The device that a model runs on, and its dtype."""

    dtype: Dtype = setting(
        "auto", "Dtype of the weights; auto: the checkpoint's dtype on a GPU, float32 on a CPU."
    )
    device: str | None = setting(
        None, "Device such as cuda:0 or cpu; by default a GPU, if there is one."
    )

    def __post_init__(self) -> None:
        if self.device is not None:
            from kvfold.hub.device import check_device

            check_device(self.device)


@Parameter(name="*", group="Calibration")
@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The text that a model is calibrated on."""

    calib: Files = setting(
        (),
        "Text files to calibrate on (.txt, .xz, .gz), or self: text that the model writes itself;"
        " by default a packaged text.",
    )
    stats: Path | None = setting(
        None,
        "File for the results of the calibration pass: read if it exists and fits the model, else"
        " written.",
    )
    max_tokens: Annotated[int | None, Parameter(name=("--calib-tokens", "--max-tokens"))] = setting(
        None,
        "Tokens to calibrate on; more take longer. By default 32768 on a GPU, 12288 on a CPU.",
        least=1,
    )
    seed: int = setting(0, "Seed of what calibration draws at random.", **SEEDS)

    def __post_init__(self) -> None:
        with renamed(max_tokens="calib_tokens"):
            check(self)


@Parameter(name="*", group="Size of the cache")
@dataclass(frozen=True, kw_only=True)
class SizeFlags:
    """The size of the compressed cache: a `Target`, which checks the flags, and the alignment of
    ranks."""

    keep: float | None = setting(
        None,
        "Share of the cache's dimensions to keep, in (0, 1], instead of --factor. By default 0.5,"
        " for recipes that --factor does not take.",
    )
    budget: str | None = setting(
        None,
        'Search for the smallest cache within a loss, instead of --factor: "ppl<=1.01" allows 1 %'
        ' more perplexity, "accuracy>=0.99" 1 % less accuracy on the questions of --set'
        " tasks=FILE.",
    )
    tasks: Files = setting(
        (),
        "Files of questions for --budget, with one task per line (.jsonl, .xz, .gz), as JSON with"
        f" the fields {LEGAL_EXAMPLES}.",
    )
    factor: float | None = setting(
        None,
        "How many times smaller the cache becomes, by keeping fewer dimensions and by storing them"
        " in fewer bits, with the least predicted loss. By default 4. For the recipes swift, lean,"
        " small and fast.",
    )
    bytes_per_token: float | None = setting(
        None, "Size of the cache in bytes per token, instead of --factor."
    )
    hybrid: str | None = setting(
        None,
        "Instead of --keep: ZDC's two widths of a token by its importance, as shares removed, such "
        "as keys=0.25,values=0.25,low_rank_keys=0.5,low_rank_values=0.5,important=0.2,"
        "important_last=0.5 (of tokens, in the first and the last layer), or ppl<=1.1: the smallest"
        " of some within 10 % of the perplexity. Runs on the paged cache.",
    )
    levels: str | None = setting(
        None,
        "Bits that --factor may choose from, separated by commas: some of 8,6,4,3,2,1, or all. By"
        " default 8,4,2, which kernels read.",
    )
    prefer: Prefer | None = setting(
        None,
        "What --factor plans for. speed: entries that a Hopper GPU reads in one pass (recipes swift"
        " and lean). size: the least loss, with all levels, though some have no kernels. balanced:"
        " in between. By default speed where no --recipe is named and a Hopper GPU can read such"
        " entries, else balanced.",
    )
    layouts: int | None = setting(
        None,
        "Most bit-width layouts (how many numbers have 8, 4, 2 bits) among the layers; each needs"
        " its own kernels. By default 4 with prefer=speed, else no limit.",
    )
    align: int | None = setting(
        None,
        "Make ranks multiples of this number, with --keep and --budget. By default 16, or 8 for a"
        " head dim of up to 64.",
    )

    @property
    def target(self) -> "Target":
        from kvfold.compression.planning.target import Target

        text = self.hybrid
        return Target(
            keep=self.keep,
            budget=self.budget,
            factor=self.factor,
            bytes_per_token=self.bytes_per_token,
            hybrid=text if text is None or {*text} & {*"<>"} else Ratios.parse(text),
            levels=parse_levels(self.levels),
            prefer=self.prefer,
            layouts=self.layouts,
        )


@Parameter(name="*", group="Search for the fastest")
@dataclass(frozen=True, kw_only=True)
class Fastest:
    """Whether to search for the recipe and size with the fastest decode step, and of which
    step."""

    fastest: Flag = setting(
        False,
        "Search for the recipe (fast, swift, lean or small) and --factor (2 to 14) within --budget"
        " whose decode step is predicted to be the fastest on a GPU.",
    )
    batch: int | None = setting(None, "Sequences in that decode step; by default 64.")
    context: int | None = setting(
        None,
        "Tokens per sequence in that decode step; by default 8192, or the model's maximum if that"
        " is less.",
    )

    def check(self, size: SizeFlags, recipe: str | None, stats: Path | None) -> None:
        """Raises SettingError for settings that `fastest` needs and lacks, or that contradict it,
        and for settings that need `fastest`."""
        excluded = {
            "recipe": recipe,
            "align": size.align,
            "stats": stats,
            "prefer": size.prefer,
            "tasks": size.tasks or None,
        }
        if not self.fastest:
            for name in ("batch", "context"):
                if getattr(self, name) is not None:
                    raise SettingError(
                        f"`{name}` is a setting of `fastest`: give `fastest` too, or leave it out"
                    )
            return
        if size.budget is None:
            raise SettingError("`fastest` needs a limit on the loss: give `budget` too")
        for name, value in excluded.items():
            if value is not None:
                raise SettingError(
                    f"`fastest` tries several recipes, sizes and plans itself: leave `{name}` out"
                )
        parse_ratio(size.budget)


@Parameter(name="*", group="How texts are read")
@dataclass(frozen=True, kw_only=True)
class Windows:
    """How texts are split into windows, and the test of hidden facts."""

    ctx: int | None = setting(
        None, "Tokens per window; by default 1024, or the model's maximum if that is less.", least=1
    )
    chunk: int = setting(512, "Tokens per forward pass.", least=1)
    max_tokens: int | None = setting(None, "Read at most this many tokens of each text.", least=1)
    batch: int = setting(1, "Windows that run together, on transformers' cache.", least=1)
    needle: Flag = setting(
        False, "Also ask for facts that are hidden in texts of 512 to 4096 tokens."
    )
    needle_contexts: int = setting(
        25, "Texts per length with hidden facts; four questions each.", least=1
    )
    see_question: Flag = setting(
        False, "Evict after the question about a hidden fact is known, not before."
    )

    @property
    def agnostic(self) -> bool:
        return not self.see_question

    def __post_init__(self) -> None:
        check(self)
        for name in ("see_question", "needle_contexts"):
            if not self.needle and getattr(self, name) != getattr(Windows, name):
                raise SettingError(
                    f"`{name}` is a setting of `needle`: give `needle` too, or leave it out"
                )


@Parameter(name="*", group="Sampling")
@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    max_new_tokens: int = setting(128, "Generate at most this many tokens.", least=1)
    temperature: float | None = setting(
        None,
        "Sample at this temperature; by default greedy.",
        above=0,
        hint="leave it out for greedy",
    )
    top_k: int | None = setting(None, "Sample from the K most likely tokens.", least=1)
    top_p: float | None = setting(
        None,
        "Sample from the most likely tokens whose probabilities add up to this.",
        above=0,
        most=1,
    )
    seed: int = setting(0, "Seed of the sampling.", **SEEDS)

    def __post_init__(self) -> None:
        if self.temperature is None and (self.top_k is not None or self.top_p is not None):
            raise SettingError("`top_k` and `top_p` need sampling: give `temperature` too")
        check(self)


@Parameter(name="*", group="Paged cache")
@dataclass(frozen=True, kw_only=True)
@flags_of(CacheConfig)
class Storage:
    """Flags of `CacheConfig`: how the paged cache stores tokens. Setting any of them uses the paged
    cache."""

    paged: Flag = setting(False, "Use kvfold's paged cache with its default settings.")

    @property
    def any_set(self) -> bool:
        """Whether any flag is not at its default."""
        return any(getattr(self, field.name) != field.default for field in fields(self))

    def __post_init__(self) -> None:
        if self.any_set:  # checking formats imports torch
            self._cache()

    def config(self, planned: bool = False) -> CacheConfig | None:
        """The paged cache's configuration; None if transformers' cache serves.

        planned: the model's bits are planned, which needs the paged cache. Raises SettingError for
        settings of packed numbers if none are packed.
        """
        if not self.any_set and not planned:
            return None
        cache = self._cache()
        packed = planned if cache.bits is None else cache.bits < 16
        for name in ("zeros", "sub_group", "no_rotation", "residual"):
            if not packed and getattr(self, name):
                raise SettingError(
                    f"`{name}` is a setting of packed numbers, and with 16 bits none are packed:"
                    " set `bits` to 8 or fewer, or leave it out"
                )
        return cache

    def _cache(self) -> CacheConfig:
        settings: dict[str, Any] = {
            name: not getattr(self, rule.off[0]) if rule.off else getattr(self, name)
            for name, (_, rule) in settings_of(CacheConfig).items()
        }
        cache = CacheConfig(**settings)
        if cache.evict and cache.keep_tokens is None and cache.max_cache_tokens is None:
            raise SettingError(
                f"`evict={cache.evict!r}` needs to know how many tokens to keep: give"
                " `keep_tokens`, such as 0.5, or `max_cache_tokens`"
            )
        return cache


@Parameter(name="*", group="Low-rank additions")
@dataclass(frozen=True, kw_only=True)
@flags_of(LoRA)
class Adapters:
    """Flags of `LoRA`: how low-rank additions are trained."""

    def __post_init__(self) -> None:
        check(self)


PLACE, CALIBRATION, WINDOWS, ADAPTERS = Place(), Calibration(), Windows(), Adapters()
SIZE, FASTEST = SizeFlags(), Fastest()
SAMPLING, STORAGE = Sampling(), Storage()


def parse_levels(text: str | None) -> tuple[int, ...] | None:
    """The bits in a list such as 8,4,2, or all levels. Raises ValueError for what is no list."""
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
