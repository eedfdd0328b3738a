"""kvfold serve: an OpenAI-compatible server."""

import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from kvfold.cli import common, serve_vllm
from kvfold.cli.options import PLACE, STORAGE, Flag, MapsName, ModelOrMaps, Place, Storage, flags_of
from kvfold.config import check, setting
from kvfold.server import check_installed
from kvfold.server.limits import Limits
from kvfold.utils.errors import SettingError
from kvfold.utils.tokens import check_text

if TYPE_CHECKING:
    from kvfold.config import CacheConfig
    from kvfold.engine.requests.packed import PackedContext

KEY = "KVFOLD_API_KEY"
ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^\s/?#@,]+")  # as a browser names it
EngineName = Annotated[
    Literal["kvfold", "vllm"], Parameter(help="vllm: vLLM's own server, see docs/vllm.md.")
]


@Parameter(name="*", group="Address and access")
@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the server is, and who may ask it."""

    host: str = setting("127.0.0.1", "Address to listen at; 0.0.0.0 is every network's.")
    port: int = setting(8000, "Port; 0 takes any.", least=0, most=65535)
    api_key: str | None = setting(None, f"What clients must send; ${KEY} is not shown by ps.")
    served_model_name: str | None = setting(None, "What clients call the model; MODEL by default.")

    def __post_init__(self) -> None:
        check(self)
        for name in ("api_key", "served_model_name"):
            if (value := getattr(self, name)) is not None:
                check_text(name, value)
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise SettingError("`served_model_name` is empty: give a name, or leave it out")

    @property
    def key(self) -> str | None:
        """Raises ValueError for an empty one, which would let everyone in."""
        key = os.environ.get(KEY) if self.api_key is None else self.api_key
        if key is not None and not key.strip():
            raise ValueError(f"the API key is empty: give --api-key or ${KEY} one, or neither")
        return key


@Parameter(name="*", group="Capacity")
@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What an engine makes room for."""

    max_sequences: int = setting(64, "Choices that run at once.", least=1)
    max_tokens: int | None = setting(
        None, "Of a prompt and its answer; by default the model's positions.", least=1
    )
    no_prefix_caching: Flag = setting(False, "Compute again what prompts begin with.")

    @property
    def settings(self) -> dict[str, Any]:
        """Of LLM."""
        found = dataclasses.asdict(self)
        return found | {"prefix_caching": False if found.pop("no_prefix_caching") else None}

    def __post_init__(self) -> None:
        check(self)


@Parameter(name="*", group="Limits")
@dataclass(frozen=True, kw_only=True)
@flags_of(Limits)
class Bounds:
    """`Limits`."""

    @property
    def limits(self) -> Limits:
        return Limits(**dataclasses.asdict(self))

    def __post_init__(self) -> None:
        self.limits  # noqa: B018


ADDRESS, SIZES, BOUNDS = Address(), Sizes(), Bounds()


def serve(
    model: ModelOrMaps,
    /,
    *,
    engine: EngineName = "kvfold",
    maps: MapsName = None,
    context: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    allow_origins: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    no_request_log: Flag = False,
    address: Address = ADDRESS,
    sizes: Sizes = SIZES,
    bounds: Bounds = BOUNDS,
    storage: Storage = STORAGE,
    place: Place = PLACE,
) -> None:
    """Serve a model to OpenAI's clients, from the paged cache.

    Chats, completions, streams; /metrics for Prometheus. SIGTERM answers what is open, then ends.

    Parameters
    ----------
    context
        NAME=FILE, of a file that `kvfold pack` made: completions that send {"context": "NAME"} go
        on from it. Any number of them, made alike; how the cache stores tokens is in them.
    allow_origins
        Origins of web pages that may ask, such as https://example.org; * is every page's.
    no_request_log
        Do not log a line for each request: its tokens, seconds and status.
    """
    key = address.key
    check_origins(allow_origins)
    name = address.served_model_name or model
    model, maps = common.base_and_maps(model, maps)
    if engine == "vllm":
        if context:
            raise SettingError("`context` is of kvfold's own server: leave `engine=vllm` out")
        address = dataclasses.replace(address, served_model_name=name)
        if allow_origins:
            raise SettingError("`allow_origins` is of kvfold's own server: leave `engine=vllm` out")
        if no_request_log:
            raise SettingError(
                "`no_request_log` is of kvfold's own server: leave `engine=vllm` out"
            )
        serve_vllm.serve(vllm_words(model, maps, address, sizes, bounds, storage, place), key)
    check_installed()
    common.check_context(maps, context)
    packed, contexts = read_contexts(context, storage)
    beside = common.load_maps(maps)
    config, tokenizer = common.load_config(model, beside), common.load_tokenizer(model)
    paged = dataclasses.replace(storage, paged=True)
    cache = packed or common.cache_config(config, paged, place, beside=beside)
    assert cache is not None
    from kvfold.server.run import LOCAL, bind, run, say

    listener = bind(address.host, address.port)
    if key is None and address.host not in LOCAL:
        say(f"anyone who reaches {address.host} may ask: no --api-key is set")
    from kvfold.engine.api.async_llm import AsyncLLM
    from kvfold.engine.api.llm import LLM
    from kvfold.server.app import create_app

    loaded = common.load(model, place)
    cache = common.with_policy(loaded, tokenizer, cache) or cache
    settings = dataclasses.asdict(cache) | sizes.settings
    llm = LLM(loaded, tokenizer=tokenizer, owned=True, maps=beside, **settings)
    for what, value in llm.summary():
        say(f"{what}: {value}")
    for each, one in contexts.items():
        say(f"context {each}: {one.summary}")
    asked = AsyncLLM(llm)
    app = create_app(
        asked,
        name,
        limits=bounds.limits,
        api_key=key,
        contexts=contexts,
        allow_origins=allow_origins,
    )
    run(app, listener, bounds.limits, log_requests=not no_request_log)


def check_origins(origins: Sequence[str]) -> None:
    """Raises SettingError for what is no origin, which would match none."""
    for origin in origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise SettingError(
                "`allow_origins` must be origins, such as https://example.org, without a path, or"
                f" *; got {origin!r:.100}"
            )


def read_contexts(
    named: Sequence[str], storage: Storage
) -> "tuple[CacheConfig | None, dict[str, PackedContext]]":
    """Packed contexts by name, and the cache that takes the first; None where there are none."""
    from kvfold.cli.pack import read

    cache, found = None, {}
    for item in named:
        name, _, path = item.partition("=")
        if not (name and path):
            raise SettingError(f"`context` must be NAME=FILE, such as book=book.kvf; got {item!r}")
        if name in found:
            raise SettingError(f"`context`: {name!r} is given twice; take another name")
        own, found[name] = read(Path(path), storage)
        cache = cache or own
    return cache, found


def vllm_words(
    model: str,
    maps: str | None,
    address: Address,
    sizes: Sizes,
    bounds: Bounds,
    storage: Storage,
    place: Place,
) -> list[str]:
    """The same as a command line of vLLM's."""
    return serve_vllm.command(
        model, maps, storage, place, bounds.limits,
        host=address.host, port=address.port, served_model_name=address.served_model_name,
        max_num_seqs=sizes.max_sequences, max_model_len=sizes.max_tokens,
    )  # fmt: skip
