"""kvfold serve: an OpenAI-compatible server."""

import dataclasses
import os
import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from kvfold.cli import common, serve_vllm
from kvfold.cli.options import PLACE, STORAGE, Flag, Model, Place, Storage, flags_of
from kvfold.config import check, setting
from kvfold.server import check_installed
from kvfold.server.limits import Limits

KEY = "KVFOLD_API_KEY"
EngineName = Annotated[
    Literal["kvfold", "vllm"], Parameter(help="vllm: vLLM's own server, see docs/vllm.md.")
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the server is, and who may ask it."""

    host: str = setting("127.0.0.1", "Address to listen at; 0.0.0.0 is every network's.")
    port: int = setting(8000, "Port; 0 takes any.", least=0, most=65535)
    api_key: str | None = setting(None, f"What clients must send; ${KEY} is not shown by ps.")
    served_model_name: str | None = setting(None, "What clients call the model; MODEL by default.")

    def __post_init__(self) -> None:
        check(self)

    @property
    def key(self) -> str | None:
        """Raises ValueError for an empty one, which would let everyone in."""
        key = os.environ.get(KEY) if self.api_key is None else self.api_key
        if key is not None and not key.strip():
            raise ValueError(f"the API key is empty: give --api-key or ${KEY} one, or neither")
        return key


@Parameter(name="*")
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


@Parameter(name="*")
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
    model: Model,
    /,
    *,
    engine: EngineName = "kvfold",
    address: Address = ADDRESS,
    sizes: Sizes = SIZES,
    bounds: Bounds = BOUNDS,
    storage: Storage = STORAGE,
    place: Place = PLACE,
) -> None:
    """Serve a model to OpenAI's clients, from the paged cache.

    Chats, completions, streams; /metrics for Prometheus. SIGTERM answers what is open, then ends.
    """
    key = address.key
    if engine == "vllm":
        serve_vllm.serve(vllm_words(model, address, sizes, bounds, storage, place), key)
    check_installed()
    config, tokenizer = common.load_config(model), common.load_tokenizer(model)
    cache = common.cache_config(config, dataclasses.replace(storage, paged=True), place)
    assert cache is not None
    from kvfold.server.run import LOCAL, bind, run

    listener = bind(address.host, address.port)
    if key is None and address.host not in LOCAL:
        print(f"anyone who reaches {address.host} may ask: no --api-key is set", file=sys.stderr)
    from kvfold.engine.async_llm import AsyncLLM
    from kvfold.engine.llm import LLM
    from kvfold.server.app import create_app

    loaded = common.load(model, place)
    cache = common.with_policy(loaded, tokenizer, cache) or cache
    settings = dataclasses.asdict(cache) | sizes.settings
    llm = LLM(loaded, tokenizer=tokenizer, owned=True, **settings)
    for name, value in llm.summary():
        print(f"{name}: {value}", file=sys.stderr)
    name = address.served_model_name or model
    app = create_app(AsyncLLM(llm), name, limits=bounds.limits, api_key=key)
    run(app, listener, bounds.limits)


def vllm_words(
    model: str, address: Address, sizes: Sizes, bounds: Bounds, storage: Storage, place: Place
) -> list[str]:
    """The same as a command line of vLLM's."""
    return serve_vllm.command(
        model, storage, place, bounds.limits,
        host=address.host, port=address.port, served_model_name=address.served_model_name,
        max_num_seqs=sizes.max_sequences, max_model_len=sizes.max_tokens,
    )  # fmt: skip
