"""kvfold pack: reads a text once and saves its compressed cache for later requests."""

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
class PackFlags:
    """How the tokens of a context are chosen and stored."""

    factor: float = setting(
        100.0, "How many times smaller than an uncompressed cache of 16 bits.", least=1
    )
    evict: str = setting(
        DEFAULT, "The policy that chooses which tokens are kept.", choices=POLICIES
    )
    bits: int | None = setting(
        None, "Bits of every number; by default as the checkpoint plans them, or 16."
    )
    page: int | None = setting(
        None, "Tokens a page, which is also the fewest that a head keeps.", least=1
    )
    repair: Flag = setting(
        False, "Refit the tokens that are kept to the attention outputs of all tokens."
    )
    zeros: Flag = setting(False, "Store a zero point with every scale.")
    sub_group: int | None = setting(None, "Most numbers that share a scale.")
    kv_bytes: int | None = setting(
        None, "Bytes of the page pool that the text is read into.", least=1
    )
    no_sample: Flag = setting(False, "Do not measure the loss.")

    def __post_init__(self) -> None:
        check(self)

    @property
    def cache(self) -> CacheConfig:
        """The cache that the text is read into. It evicts nothing until `factor` is applied."""
        settings = dataclasses.asdict(self)
        del settings["factor"], settings["no_sample"]
        return CacheConfig(**settings, keep_tokens=1.0)


PACK_FLAGS = PackFlags()
Context = Annotated[Path, Parameter(help="File with the text (.txt, .xz, .gz).")]
Output = Annotated[Path, Parameter(help="File to write, such as book.kvf.")]


def pack(
    model: Model,
    /,
    *,
    context: Context,
    output: Output,
    flags: PackFlags = PACK_FLAGS,
    place: Place = PLACE,
) -> None:
    """Read a long text once and save its compressed cache, for questions about it later.

    `kvfold generate MODEL --set context=FILE.kvf` and `kvfold serve --set context=NAME=FILE.kvf`
    continue from it without reading the text again.
    """
    from kvfold.cli.generate import read_prompt

    check_writable(output)
    cache = flags.cache
    text = read_prompt(None, context)
    config, tokenizer = common.load_config(model), common.load_tokenizer(model)
    from kvfold.cache.eviction import policies
    from kvfold.engine.api.llm import LLM
    from kvfold.engine.runner.build import check_served
    from kvfold.evaluation.perplexity import max_positions
    from kvfold.utils.tokens import longer

    check_served(config, common.saved_spec(config), policies.get(flags.evict), cache)
    limit = max_positions(config)
    if limit is not None and longer(tokenizer, text, limit - 1):
        raise ValueError(
            f"the context has more tokens than the model's {limit} positions, one of which is "
            "needed for a question; shorten it"
        )
    began = time.monotonic()
    settings = dataclasses.asdict(cache) | {"max_sequences": 1}
    llm = LLM(common.load(model, place), tokenizer=tokenizer, owned=True, **settings)
    with common.progress() as progress:
        measure = not flags.no_sample
        packed = llm.pack(text, factor=flags.factor, measure=measure, progress=progress)
    packed.save(output)
    print(f"{output}: {packed.summary} ({time.monotonic() - began:.0f} s)", file=sys.stderr)


def read(path: Path, storage: Storage) -> "tuple[CacheConfig, PackedContext]":
    """The cache that a packed context needs, and the context. Raises ValueError for a file that
    cannot be read, and for storage settings other than `kv_bytes`, since the file has them."""
    from kvfold.engine.requests.packed import PackedContext, cache_of

    size: int | None = getattr(storage, "kv_bytes")  # noqa: B009
    others: dict[str, Any] = {"kv_bytes": None, "paged": False}
    if dataclasses.replace(storage, **others).any_set:
        raise SettingError(
            "the file of `context` sets how the cache stores tokens: of these settings, only"
            " `kv_bytes` can be given with it"
        )
    packed = PackedContext.load(path)
    return cache_of(packed.origin["settings"], size), packed
