"""Options that several commands share: frozen dataclasses, from which their flags are made."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from cyclopts import Parameter

if TYPE_CHECKING:
    from kvfold.config import CacheConfig

T = TypeVar("T")
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Model = Annotated[str, Parameter(help="A directory, a GGUF file, a hub id or reference:gqa.")]
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

    see_question: Annotated[
        Flag, Parameter(help="Evict after the needle's question, not before it.")
    ] = False

    @property
    def agnostic(self) -> bool:
        return not self.see_question

    def __post_init__(self) -> None:
        for name in ("ctx", "chunk", "max_tokens", "batch", "needle_contexts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Storage:
    """How the paged cache stores tokens. Any of these runs the model on it."""

    paged: Annotated[Flag, Parameter(help="Use the paged cache even without the rest.")] = False
    kv_bytes: Annotated[int | None, Parameter(help="Bytes of the page pool.")] = None
    page: Annotated[int | None, Parameter(help="Rows a page; 32 by default, 16 for kvc-*.")] = None
    bits: Annotated[int | None, Parameter(help="Of every stored number: 16, 8, 4, 3, 2 or 1.")] = (
        None
    )
    zeros: Annotated[Flag, Parameter(help="Store a zero beside every scale.")] = False
    sub_group: Annotated[
        int | None, Parameter(help="Most numbers that share a scale; 32 with kivi.")
    ] = None
    no_rotation: Annotated[Flag, Parameter(help="Quantise numbers as they are.")] = False
    format: Annotated[
        str, Parameter(help="integers, or kivi: keys per channel, groups of 32, residual 128.")
    ] = "integers"
    residual: Annotated[
        int | None, Parameter(help="Tokens that wait in 16 bits to be packed; 128 with kivi.")
    ] = None
    evict: Annotated[
        str | None,
        Parameter(help="A policy: kv-compress, kvc-w32, snapkv, ada-snapkv, h2o, pyramidkv, ..."),
    ] = None
    keep_tokens: Annotated[
        float | None, Parameter(help="Share of the prompt's tokens to keep, in (0, 1].")
    ] = None
    max_cache_tokens: Annotated[
        int | None, Parameter(help="Tokens to keep of a request, averaged over heads.")
    ] = None

    def config(self, planned: bool = False) -> "CacheConfig | None":
        """The engine's configuration; None where nothing asks for pages (`planned`: bits do)."""
        if self == Storage() and not planned:
            return None
        if self.evict and self.keep_tokens is None and self.max_cache_tokens is None:
            raise ValueError(
                f"--evict {self.evict} evicts down to a budget: give --keep-tokens, such as 0.5, "
                "or --max-cache-tokens"
            )
        from kvfold.config import CacheConfig

        return CacheConfig(
            kv_bytes=self.kv_bytes,
            page=self.page,
            bits=self.bits,
            zeros=self.zeros,
            sub_group=self.sub_group,
            rotate=not self.no_rotation,
            format=self.format,
            residual=self.residual,
            evict=self.evict,
            keep_tokens=self.keep_tokens,
            max_cache_tokens=self.max_cache_tokens,
        )


PLACE, CALIBRATION, WINDOWS, STORAGE = Place(), Calibration(), Windows(), Storage()


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
