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
from kvfold.config import check, parse_share, setting
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
    Literal["kvfold", "vllm"],
    Parameter(help="The engine; vllm starts vLLM's own server, see docs/vllm.md."),
]


@Parameter(name="*", group="Address and access")
@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the server listens, and who may use it."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 for all networks.")
    port: int = setting(8000, "Port to listen on; 0 for any free port.", least=0, most=65535)
    api_key: str | None = setting(
        None,
        f"API key that clients must send; in ${KEY}, other users of this machine do not see it.",
    )
    served_model_name: str | None = setting(
        None, "Name of the model in requests and answers; by default MODEL."
    )

    def __post_init__(self) -> None:
        check(self)
        for name in ("api_key", "served_model_name"):
            if (value := getattr(self, name)) is not None:
                check_text(name, value)
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise SettingError("`served_model_name` is empty: give a name, or leave it out")

    @property
    def key(self) -> str | None:
        """The API key. Raises ValueError for an empty key, which would let everyone in."""
        key = os.environ.get(KEY) if self.api_key is None else self.api_key
        if key is not None and not key.strip():
            raise ValueError(f"the API key is empty: set --api-key or ${KEY} to a key, or neither")
        return key


@Parameter(name="*", group="Capacity")
@dataclass(frozen=True, kw_only=True)
class EngineSize:
    """How many sequences the engine runs, and how long they may be."""

    max_sequences: int = setting(64, "Sequences that run at once.", least=1)
    max_tokens: int | None = setting(
        None, "Most tokens of a prompt and its answer; by default the model's maximum.", least=1
    )
    no_prefix_caching: Flag = setting(
        False, "Do not reuse the cache of earlier requests that share a prefix."
    )
    shadow: str | None = setting(
        None,
        "Share of the requests, such as 0.1%, that the original model scores again in idle time;"
        " /metrics then has what compression loses.",
    )

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of `LLM`."""
        settings = dataclasses.asdict(self) | {"shadow": parse_share("shadow", self.shadow)}
        return settings | {"prefix_caching": False if settings.pop("no_prefix_caching") else None}

    def __post_init__(self) -> None:
        check(self)
        parse_share("shadow", self.shadow)


@Parameter(name="*", group="Limits")
@dataclass(frozen=True, kw_only=True)
@flags_of(Limits)
class LimitFlags:
    """Flags of `Limits`."""

    @property
    def limits(self) -> Limits:
        return Limits(**dataclasses.asdict(self))

    def __post_init__(self) -> None:
        self.limits  # noqa: B018


ADDRESS, ENGINE_SIZE, LIMITS = Address(), EngineSize(), LimitFlags()


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
    size: EngineSize = ENGINE_SIZE,
    limits: LimitFlags = LIMITS,
    storage: Storage = STORAGE,
    place: Place = PLACE,
) -> None:
    """Start an OpenAI-compatible server.

    Serves chats and completions, also streamed, and /metrics for Prometheus. Open the server's URL
    for a dashboard. Ctrl-C and SIGTERM finish open requests before the server stops.

    Parameters
    ----------
    context
        NAME=FILE with a compressed text that `kvfold pack` wrote: completions that send
        {"context": "NAME"} continue from it. May be repeated with files of the same settings, which
        also set how the cache stores tokens.
    allow_origins
        Origins of web pages that may send requests, such as https://example.org; * for all.
    no_request_log
        Do not log a line for every request with its tokens, times and status.
    """
    key = address.key
    check_origins(allow_origins)
    name = address.served_model_name or model
    model, maps = common.base_and_maps(model, maps)
    if engine == "vllm":
        if context:
            raise SettingError(
                "`context` is a setting of kvfold's own server: leave out either it or"
                " `engine=vllm`"
            )
        address = dataclasses.replace(address, served_model_name=name)
        if allow_origins:
            raise SettingError(
                "`allow_origins` is a setting of kvfold's own server: leave out either it or"
                " `engine=vllm`"
            )
        if no_request_log:
            raise SettingError(
                "`no_request_log` is a setting of kvfold's own server: leave out either it or"
                " `engine=vllm`"
            )
        if size.shadow is not None:
            raise SettingError(
                "`shadow` is a setting of kvfold's own server: leave out either it or `engine=vllm`"
            )
        serve_vllm.serve(vllm_words(model, maps, address, size, limits, storage, place), key)
    check_installed()
    common.check_context(maps, context)
    packed, contexts = read_contexts(context, storage)
    sidecar = common.load_maps(maps)
    config, tokenizer = common.load_config(model, sidecar), common.load_tokenizer(model)
    if size.settings["shadow"]:
        from kvfold.engine.runner.original import check_original

        check_original(config)
    paged = dataclasses.replace(storage, paged=True)
    cache = packed or common.cache_config(config, paged, place, maps=sidecar)
    assert cache is not None
    from kvfold.server.run import LOCAL, bind, run, say

    listener = bind(address.host, address.port)
    if key is None and address.host not in LOCAL:
        say(f"anyone who reaches {address.host} may ask: no --api-key is set")
    from kvfold.engine.api.async_llm import AsyncLLM
    from kvfold.engine.api.llm import LLM
    from kvfold.server.app import create_app

    say(f"loading {model}")
    loaded = common.load(model, place)
    cache = common.with_policy(loaded, tokenizer, cache) or cache
    settings = dataclasses.asdict(cache) | size.settings
    llm = LLM(loaded, tokenizer=tokenizer, owned=True, maps=sidecar, **settings)
    for what, value in llm.summary():
        say(f"{what}: {value}")
    for context_name, packed_context in contexts.items():
        say(f"context {context_name}: {packed_context.summary}")
    app = create_app(
        AsyncLLM(llm),
        name,
        limits=limits.limits,
        api_key=key,
        contexts=contexts,
        allow_origins=allow_origins,
    )
    run(app, listener, limits.limits, log_requests=not no_request_log)


def check_origins(origins: Sequence[str]) -> None:
    """Raises SettingError for text that is no origin, which would never match."""
    for origin in origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise SettingError(
                "`allow_origins` must be origins, such as https://example.org, without a path, or"
                f" *; got {origin!r:.100}"
            )


def read_contexts(
    named: Sequence[str], storage: Storage
) -> "tuple[CacheConfig | None, dict[str, PackedContext]]":
    """The cache that packed contexts need, None without any, and the contexts by name."""
    from kvfold.cli.pack import read

    cache: CacheConfig | None = None
    contexts: dict[str, PackedContext] = {}
    for item in named:
        name, _, path = item.partition("=")
        if not (name and path):
            raise SettingError(f"`context` must be NAME=FILE, such as book=book.kvf; got {item!r}")
        if name in contexts:
            raise SettingError(f"`context`: {name!r} is given twice; take another name")
        cache_of_context, contexts[name] = read(Path(path), storage)
        cache = cache or cache_of_context
    return cache, contexts


def vllm_words(
    model: str,
    maps: str | None,
    address: Address,
    size: EngineSize,
    limits: LimitFlags,
    storage: Storage,
    place: Place,
) -> list[str]:
    """The same server as a command line of vLLM."""
    return serve_vllm.command(
        model, maps, storage, place, limits.limits,
        host=address.host, port=address.port, served_model_name=address.served_model_name,
        max_num_seqs=size.max_sequences, max_model_len=size.max_tokens,
    )  # fmt: skip
