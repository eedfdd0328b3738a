"""kvfold pack: a text, compressed once for all who ask about it."""

import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvfold.cache.eviction.policies import POLICIES
from kvfold.cli import common
from kvfold.cli.options import PLACE, Flag, Model, Place, Storage
from kvfold.config import CacheConfig, check, setting
from kvfold.utils.errors import SettingError
from kvfold.utils.files import check_writable

if TYPE_CHECKING:
    from kvfold.engine.requests.packed import PackedContext

DEFAULT = "kvzip"


@Parameter(name="*", group="Paged cache")
@dataclass(frozen=True, kw_only=True)
class Stored:
    """How rows of a context are stored and chosen."""

    factor: float = setting(100.0, "How many times fewer bits than at 16 bits, in all.", least=1)
    evict: str = setting(DEFAULT, "The policy that says which tokens stay.", choices=POLICIES)
    bits: int | None = setting(None, "Of every number; by default as planned, or 16.")
    page: int | None = setting(None, "Rows a page, the fewest that a head keeps.", least=1)
    repair: Flag = setting(False, "Fit rows that stay, so that they attend as all rows did.")
    zeros: Flag = setting(False, "Store a zero beside every scale.")
    sub_group: int | None = setting(None, "Most numbers that share a scale.")
    kv_bytes: int | None = setting(None, "Bytes of the page pool that it is read into.", least=1)
    no_sample: Flag = setting(False, "Measure no loss.")

    def __post_init__(self) -> None:
        check(self)

    @property
    def cache(self) -> CacheConfig:
        """Of the pool it is read into, where nothing is evicted but by factor."""
        given = dataclasses.asdict(self)
        del given["factor"], given["no_sample"]
        return CacheConfig(**given, keep_tokens=1.0)


STORED = Stored()
Context = Annotated[Path, Parameter(help="The text's file (.txt, .xz, .gz).")]
Output = Annotated[Path, Parameter(help="The file to write, such as book.kvf.")]


def pack(
    model: Model,
    /,
    *,
    context: Context,
    output: Output,
    stored: Stored = STORED,
    place: Place = PLACE,
) -> None:
    """Read a text, compress what the cache holds of it, and write that to a file.

    `kvfold generate MODEL --context FILE.kvf` goes on from it, in milliseconds.
    """
    from kvfold.cli.generate import read_prompt

    check_writable(output)
    cache = stored.cache
    text = read_prompt(None, context)
    config, tokenizer = common.load_config(model), common.load_tokenizer(model)
    from kvfold.cache.eviction import policies
    from kvfold.engine.api.llm import LLM
    from kvfold.engine.runner.build import check_served
    from kvfold.evaluation.perplexity import max_positions
    from kvfold.utils.tokens import longer

    check_served(config, common.saved_spec(config), policies.get(stored.evict), cache)
    limit = max_positions(config)
    if limit is not None and longer(tokenizer, text, limit - 1):
        raise ValueError(
            f"the context has more tokens than the model's {limit} positions, less one for a "
            "question; shorten it"
        )
    began = time.monotonic()
    settings = dataclasses.asdict(cache) | {"max_sequences": 1}
    llm = LLM(common.load(model, place), tokenizer=tokenizer, owned=True, **settings)
    with common.progress() as progress:
        measure = not stored.no_sample
        found = llm.pack(text, factor=stored.factor, measure=measure, progress=progress)
    found.save(output)
    print(f"{output}: {found.summary} ({time.monotonic() - began:.0f} s)", file=sys.stderr)


def read(path: Path, storage: Storage) -> "tuple[CacheConfig, PackedContext]":
    """A packed context, and the cache that takes it. Raises ValueError where it cannot be read, or
    storage says what it says itself."""
    from kvfold.engine.requests.packed import PackedContext, cache_of

    size: int | None = getattr(storage, "kv_bytes")  # noqa: B009
    others: dict[str, Any] = {"kv_bytes": None, "paged": False}
    if dataclasses.replace(storage, **others).asked:
        raise SettingError(
            "`context` says how the cache stores tokens: beside it give `kv_bytes` alone"
        )
    found = PackedContext.load(path)
    return cache_of(found.origin["settings"], size), found
