"""Options that several commands share: frozen dataclasses, from which their flags are made."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from cyclopts import Parameter

T = TypeVar("T")
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Model = Annotated[str, Parameter(help="A directory, a hub id or reference:gqa.")]
Files = Annotated[
    tuple[Path, ...], Parameter(consume_multiple=True, negative="", show_default=False)
]
Flag = Annotated[bool, Parameter(negative="", show_default=False)]


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
class Windows:
    """How texts are read."""

    ctx: Annotated[
        int | None,
        Parameter(help="Tokens a window; by default 1024, or all that the model has."),
    ] = None
    chunk: Annotated[int, Parameter(help="Tokens fed through the cache at a time.")] = 512
    max_tokens: Annotated[int | None, Parameter(help="Most tokens to read of each text.")] = None
    batch: Annotated[int, Parameter(help="Windows run together.")] = 1
    needle: Annotated[Flag, Parameter(help="Ask for facts hidden in 512 to 4K tokens.")] = False
    needle_contexts: Annotated[int, Parameter(help="Contexts a length, four questions each.")] = 25

    def __post_init__(self) -> None:
        for name in ("ctx", "chunk", "max_tokens", "batch", "needle_contexts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


PLACE, CALIBRATION, WINDOWS = Place(), Calibration(), Windows()


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
