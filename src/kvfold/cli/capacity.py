"""kvfold capacity: how many requests a GPU holds."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from kvfold.cli import common
from kvfold.cli.bench_common import RANDOM, Served, empty_table
from kvfold.cli.options import STORAGE, Storage, parse_list
from kvfold.config import CacheConfig
from kvfold.utils.errors import SettingError
from kvfold.utils.files import write_json

if TYPE_CHECKING:
    from kvfold.evaluation.capacity import Capacity, Room

Share = Annotated[float, Parameter(help="Of its memory that may be used.")]


def capacity(
    model: Served,
    /,
    *,
    gpu: str = "h100",
    gpu_bytes: int | None = None,
    share: Share = 0.9,
    context: str = "2048,8192,32768",
    storage: Storage = STORAGE,
    json: Path | None = None,
) -> None:
    """Say how many requests fit a GPU with such a cache, before there is one.

    Reads a model's config alone. Bytes are those that an engine would allocate. The uncompressed
    model in 16 and in 8 bits stands beside it.

    Parameters
    ----------
    gpu
        t4, l4, a10g, rtx-4090, a100-40, l40s, a100-80, h100, h200 or b200.
    gpu_bytes
        Memory of another one.
    context
        Tokens of a request, its answer's included, separated by commas.
    json
        File for the results.
    """
    common.check_outputs(json=json)
    from kvfold.evaluation.capacity import GPUS, MIB, Capacity

    contexts = parse_list(context, "--context", int, "2048,8192")
    if gpu not in GPUS:
        raise SettingError(f"`gpu` must be one of {', '.join(GPUS)}; got {gpu!r}; or `gpu_bytes`")
    for name, value, legal in (
        ("context", min(contexts), min(contexts) >= 1),
        ("gpu_bytes", gpu_bytes, gpu_bytes is None or gpu_bytes >= 1),
        ("share", share, 0 < share <= 1),
    ):
        if not legal:
            bounds = "in (0, 1]" if name == "share" else "at least 1"
            raise SettingError(f"`{name}` must be {bounds}, got {value}")
    config = load_config(model)
    spec = common.saved_spec(config)
    planned = spec is not None and spec.planned
    cache = storage.config(planned=planned) or CacheConfig()
    found = Capacity(
        config=config,
        spec=spec,
        cache=cache,
        gpu_bytes=gpu_bytes or GPUS[gpu] * MIB,
        share=share,
    )
    rooms = [found.room(tokens) for tokens in contexts]
    others = {
        name: [own.room(tokens) for tokens in contexts] for name, own in beside(found).items()
    }
    show(found, rooms, others)
    if json is not None:
        about: dict[str, Any] = {
            "model": model,
            "gpu": gpu if gpu_bytes is None else None,
            "share": share,
        }
        about |= {"gpu_bytes": found.gpu_bytes, "cache": asdict(cache)}
        sizes = {"weight_bytes": found.weights, "pool_bytes": found.pool}
        about |= {"beside": {name: [asdict(room) for room in x] for name, x in others.items()}}
        write_json(json, about | sizes | {"rows": [asdict(room) for room in rooms]})


def beside(found: "Capacity") -> dict[str, "Capacity"]:
    """The uncompressed model by the bits of its cache, but for what `found` is itself."""
    caches = {"original": CacheConfig(), "original, --bits 8": CacheConfig(bits=8)}
    plain = {name: replace(found, spec=None, cache=cache) for name, cache in caches.items()}
    return {name: x for name, x in plain.items() if x != found}


def load_config(model: str) -> Any:
    """Of a model, or of a shape."""
    if not model.startswith(RANDOM):
        return common.load_config(model)
    from kvfold.bench import synthetic_engine as served
    from kvfold.cli.bench_common import check_names

    shape = model.removeprefix(RANDOM)
    check_names("MODEL", [shape], served.WIDTHS)
    return served.config_of(shape)


def show(found: "Capacity", rooms: "list[Room]", others: "dict[str, list[Room]]") -> None:
    """others: rooms of the same contexts, by what they are of."""
    from kvfold.compression.planning.step_time import DEFAULT
    from kvfold.evaluation.capacity import GIB, WORK

    layout = found.layout
    full = 2 * layout.spec.geometry.full_numbers
    token = layout.page_bytes / layout.page
    print(f"memory: {found.gpu_bytes / GIB:.1f} GiB, of which {100 * found.share:.0f} % are used")
    print(f"weights: {found.weights / GIB:.2f} GiB in 16 bits; work space: {WORK / GIB:.0f} GiB")
    print(f"pages: {found.pool / GIB:.2f} GiB, as in --set kv-bytes={found.pool}")
    if most := max(found.beside_pages(room.context) for room in rooms):
        print(
            f"repair: {most / 2**20:.1f} MiB of hidden states a request, beside its pages; take"
            " those of all requests off kv-bytes"
        )
    print(f"a token: {token:.0f} B in pages, {full / token:.2f}x smaller than {full} B at 16 bits")
    table = empty_table("cache", "context", "kept", "MiB each", "requests", "step ms", "tokens/s")
    name = "original" if found.spec is None else "checkpoint"
    caches = others | {name if found.cache == CacheConfig() else f"{name}, as asked": rooms}
    for each in zip(*caches.values(), strict=True):
        for cache, room in zip(caches, each, strict=True):
            table.add_row(
                cache,
                str(room.context),
                str(room.kept),
                f"{room.request_bytes / 2**20:.1f}",
                str(room.requests),
                "-" if room.step_ms is None else f"{room.step_ms:.1f}",
                "-" if room.tokens_per_s is None else f"{room.tokens_per_s:.0f}",
            )
    Console().print(table)
    print(f"step and tokens/s: of decoding alone, as predicted on an {DEFAULT}")
