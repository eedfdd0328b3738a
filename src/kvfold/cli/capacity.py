"""kvfold capacity: predicts how many requests fit on a GPU."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from kvfold.cli import common
from kvfold.cli.bench_common import RANDOM, empty_table
from kvfold.cli.options import STORAGE, MapsName, Storage, parse_list
from kvfold.config import CacheConfig
from kvfold.utils.errors import SettingError
from kvfold.utils.files import write_json

if TYPE_CHECKING:
    from kvfold.evaluation.capacity import Capacity, Room
    from kvfold.maps.sidecar import Sidecar

ModelOrShape = Annotated[
    str,
    Parameter(
        help="A directory, a GGUF file, a hub id, reference:gqa, a folder of maps, or random:SHAPE"
        " with a shape of bench decode, such as random:llama-3.1-8b."
    ),
]
Share = Annotated[float, Parameter(help="Share of the GPU's memory to use.")]


def capacity(
    model: ModelOrShape,
    /,
    *,
    gpu: str = "h100",
    gpu_bytes: int | None = None,
    share: Share = 0.9,
    context: str = "2048,8192,32768",
    maps: MapsName = None,
    storage: Storage = STORAGE,
    json: Path | None = None,
) -> None:
    """Predict how many requests fit on a GPU, and how long a decode step takes.

    Reads only the model's config and its maps, if there are any, and needs no GPU. Sizes are those
    that the engine would allocate. For comparison, the table also shows the uncompressed model with
    a cache of 16 and of 8 bits.

    Parameters
    ----------
    gpu
        t4, l4, a10g, rtx-4090, a100-40, l40s, a100-80, h100, h200 or b200.
    gpu_bytes
        Memory in bytes, for a GPU that --gpu does not list.
    context
        Tokens of a request, prompt and answer together; several numbers with commas.
    json
        File for the results as JSON.
    """
    common.check_outputs(json=json)
    from kvfold.evaluation.capacity import GPUS, MIB, Capacity

    contexts = parse_list(context, "--context", int, "2048,8192")
    if gpu not in GPUS:
        raise SettingError(
            f"`gpu` must be one of {', '.join(GPUS)}; got {gpu!r}; for another GPU give `gpu_bytes`"
        )
    for name, value, legal in (
        ("context", min(contexts), min(contexts) >= 1),
        ("gpu_bytes", gpu_bytes, gpu_bytes is None or gpu_bytes >= 1),
        ("share", share, 0 < share <= 1),
    ):
        if not legal:
            bounds = "in (0, 1]" if name == "share" else "at least 1"
            raise SettingError(f"`{name}` must be {bounds}, got {value}")
    name, maps = common.base_and_maps(model, maps)
    sidecar = common.load_maps(maps)
    config = load_config(name, sidecar)
    spec = common.saved_spec(config) if sidecar is None else sidecar.spec
    cache = storage.config(planned=spec is not None and spec.planned) or CacheConfig()
    settings: dict[str, Any] = {
        "cache": cache,
        "gpu_bytes": gpu_bytes or GPUS[gpu] * MIB,
        "share": share,
    }
    if sidecar is not None:
        estimate = Capacity.of_maps(sidecar, config=config, **settings)
    else:
        estimate = Capacity(config=config, spec=spec, **settings)
    rooms = [estimate.room(tokens) for tokens in contexts]
    others = {
        name: [original.room(tokens) for tokens in contexts]
        for name, original in originals(estimate).items()
    }
    show(estimate, rooms, others)
    if json is not None:
        record: dict[str, Any] = {
            "model": name,
            "maps": maps,
            "gpu": gpu if gpu_bytes is None else None,
            "share": share,
            "gpu_bytes": estimate.gpu_bytes,
            "cache": asdict(cache),
            "beside": {name: [room.record() for room in x] for name, x in others.items()},
            "weight_bytes": estimate.weights,
            "pool_bytes": estimate.pool,
            "rows": [room.record() for room in rooms],
        }
        write_json(json, record)


def originals(estimate: "Capacity") -> dict[str, "Capacity"]:
    """Estimates of the uncompressed model with a cache of 16 and of 8 bits, by name, without
    `estimate` itself."""
    caches = {"original": CacheConfig(), "original, --bits 8": CacheConfig(bits=8)}
    plain = {
        name: replace(estimate, spec=None, maps=None, cache=cache) for name, cache in caches.items()
    }
    return {name: x for name, x in plain.items() if x != estimate}


def load_config(model: str, maps: "Sidecar | None" = None) -> Any:
    """The config of a model, or of a shape after `random:`. Raises ValueError for maps that cannot
    be of this model."""
    if not model.startswith(RANDOM):
        return common.load_config(model, maps)
    if maps is not None:
        raise SettingError(f"`maps` are of a model, and {model} has random weights: name the model")
    from kvfold.bench.synthetic_engine import WIDTHS, config_of
    from kvfold.cli.bench_common import check_names

    shape = model.removeprefix(RANDOM)
    check_names("MODEL", [shape], WIDTHS)
    return config_of(shape)


def show(estimate: "Capacity", rooms: "list[Room]", others: "dict[str, list[Room]]") -> None:
    """Print what an estimate is made of, and a table. others: estimates of the same contexts with
    other caches, by the caches' names."""
    from kvfold.compression.planning.step_time import DEFAULT
    from kvfold.evaluation.capacity import GIB, WORK

    layout = estimate.layout
    full = 2 * layout.spec.geometry.full_numbers
    token = layout.page_bytes / layout.page
    used = 100 * estimate.share
    print(f"memory: {estimate.gpu_bytes / GIB:.1f} GiB, of which {used:.0f} % are used")
    print(f"weights: {estimate.weights / GIB:.2f} GiB in 16 bits; work space: {WORK / GIB:.0f} GiB")
    print(f"pages: {estimate.pool / GIB:.2f} GiB, as in --set kv-bytes={estimate.pool}")
    if most := max(estimate.beside_pages(room.context) for room in rooms):
        print(
            f"repair: {most / 2**20:.1f} MiB of hidden states a request, in addition to its pages;"
            " subtract them for all requests from kv-bytes"
        )
    print(f"a token: {token:.0f} B in pages, {full / token:.2f}x smaller than {full} B at 16 bits")
    table = empty_table("cache", "context", "kept", "MiB each", "requests", "step ms", "tokens/s")
    name = "original" if estimate.spec is None else "checkpoint"
    if estimate.maps is not None:
        name = "maps"
    if estimate.cache != CacheConfig():
        name += ", these options"
    caches = others | {name: rooms}
    for same_context in zip(*caches.values(), strict=True):
        for cache, room in zip(caches, same_context, strict=True):
            table.add_row(
                cache,
                str(room.context),
                str(room.num_kept),
                f"{room.request_bytes / 2**20:.1f}",
                str(room.requests),
                "-" if room.step_ms is None else f"{room.step_ms:.1f}",
                "-" if room.tokens_per_s is None else f"{room.tokens_per_s:.0f}",
            )
    Console().print(table)
    unknown = "" if estimate.maps is None else "; not predicted with maps"
    print(f"step ms and tokens/s: for decoding only, predicted for an {DEFAULT}{unknown}")
