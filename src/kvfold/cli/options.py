"""Options that several commands share: frozen dataclasses, from which their flags are made."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import Parameter

from kvfold.config import CacheConfig, Setting, check, settings_of
from kvfold.evaluation.tasks import LEGAL_ROWS
from kvfold.recipes import RECIPES

T = TypeVar("T")
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Model = Annotated[str, Parameter(help="A directory, a GGUF file, a hub id or reference:gqa.")]
Files = Annotated[
    tuple[Path, ...], Parameter(consume_multiple=True, negative="", show_default=False)
]
TaskFiles = Annotated[Files, Parameter(help=f"Files of {LEGAL_ROWS} rows (.jsonl, .xz, .gz).")]
RecipeName = Annotated[str, Parameter(help=f"One of {', '.join(RECIPES)}.")]
Flag = Annotated[bool, Parameter(negative="", show_default=False)]


def flags_of(config: type) -> Callable[[type[T]], type[T]]:
    """Gives a class a flag for every setting of `config`, of its default and with its help."""

    def add(options: type[T]) -> type[T]:
        for name, (kind, setting) in settings_of(config).items():
            default, text = getattr(config, name), setting.text
            if setting.off is not None:
                (name, text), default = setting.off, not default
            shown = Flag if kind is bool else kind
            options.__annotations__[name] = Annotated[shown, setting, Parameter(help=text)]
            setattr(options, name, default)
        return options

    return add


def own_flags(options: type[T]) -> type[T]:
    """Makes flags of the settings that a class itself has."""
    return flags_of(options)(options)


def flag(name: str) -> str:
    """max_tokens -> --max-tokens."""
    return f"--{name.replace('_', '-')}"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a model runs, and in which numbers."""

    dtype: Annotated[
        Dtype, Parameter(help="auto: the checkpoint's own, computed in float32 on a CPU.")
    ] = "auto"
    device: Annotated[
        str | None, Parameter(help="Such as cuda:0 or cpu; a GPU by default, if there is one.")
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What statistics are measured on."""

    calib: Annotated[Files, Parameter(help="Text files instead of ours (.txt, .xz, .gz).")] = ()
    stats: Annotated[
        Path | None, Parameter(help="Statistics file: reused if it fits, written if absent.")
    ] = None
    max_tokens: Annotated[int, Parameter(help="Tokens of calibration text.")] = 32768
    seed: Annotated[int, Parameter(help="Of labels and clusters.")] = 0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
@own_flags
class Windows:
    """How texts are read."""

    ctx: Annotated[
        int | None,
        Setting(help="Tokens a window; by default 1024, or all there are.", least=1),
    ] = None
    chunk: Annotated[int, Setting(help="Tokens fed through the cache at a time.", least=1)] = 512
    max_tokens: Annotated[
        int | None, Setting(help="Most tokens to read of each text.", least=1)
    ] = None
    batch: Annotated[
        int, Setting(help="Windows run together, on transformers' cache.", least=1)
    ] = 1
    needle: Annotated[bool, Setting(help="Ask for facts hidden in 512 to 4K tokens.")] = False
    needle_contexts: Annotated[
        int, Setting(help="Contexts a length, four questions each.", least=1)
    ] = 25
    see_question: Annotated[
        bool, Setting(help="Evict after the needle's question, not before it.")
    ] = False

    @property
    def agnostic(self) -> bool:
        return not self.see_question

    def __post_init__(self) -> None:
        check(self, flag)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
@own_flags
class Sampling:
    """How a continuation is chosen."""

    max_new_tokens: Annotated[int, Setting(help="Most tokens to add.", least=1)] = 128
    temperature: Annotated[
        float | None,
        Setting(
            help="Sample at this temperature; greedy without it.",
            above=0,
            hint="leave it out for greedy",
        ),
    ] = None
    top_k: Annotated[
        int | None, Setting(help="Sample from the K likeliest tokens only.", least=1)
    ] = None
    top_p: Annotated[
        float | None,
        Setting(
            help="Sample from the likeliest tokens that hold this probability only.",
            above=0,
            most=1,
        ),
    ] = None
    seed: Annotated[int, Setting(help="Of the sampling.")] = 0

    def __post_init__(self) -> None:
        if self.temperature is None and (self.top_k is not None or self.top_p is not None):
            raise ValueError("--top-k and --top-p choose what is sampled; give --temperature too")
        check(self, flag)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
@flags_of(CacheConfig)
class Storage:
    """How the paged cache stores tokens, a `CacheConfig`. Any of these runs the model on it."""

    paged: Annotated[Flag, Parameter(help="Use the paged cache even without the rest.")] = False

    def config(self, planned: bool = False) -> CacheConfig | None:
        """The engine's configuration; None where nothing asks for pages (`planned`: bits do)."""
        if self == Storage() and not planned:
            return None
        given: dict[str, Any] = {
            name: not getattr(self, setting.off[0]) if setting.off else getattr(self, name)
            for name, (_, setting) in settings_of(CacheConfig).items()
        }
        if given["evict"] and given["keep_tokens"] is None and given["max_cache_tokens"] is None:
            raise ValueError(
                f"--evict {given['evict']} evicts down to a budget: give --keep-tokens, such as "
                "0.5, or --max-cache-tokens"
            )
        return CacheConfig(**given)


PLACE, CALIBRATION, WINDOWS = Place(), Calibration(), Windows()
SAMPLING, STORAGE = Sampling(), Storage()


def parse_list(text: str, option: str, item: Callable[[str], T]) -> list[T]:
    """The values of a comma-separated option. Raises ValueError naming it."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        values = [item(part) for part in parts]
    except ValueError:
        values = []
    if not values:
        raise ValueError(f"{option}: {text!r} is not a comma-separated list such as .5,.25")
    return list(dict.fromkeys(values))
