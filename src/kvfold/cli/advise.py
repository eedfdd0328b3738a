"""kvfold advise: what fits on a GPU, with which setting, and the commands for it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvfold.cli import common
from kvfold.cli.advice_report import TIMED, Report, cache_words
from kvfold.cli.bench_common import RANDOM
from kvfold.cli.options import STORAGE, MapsName, Storage
from kvfold.config import CacheConfig
from kvfold.utils.errors import SettingError
from kvfold.utils.files import write_json

if TYPE_CHECKING:
    from kvfold.evaluation.advice import Option
    from kvfold.maps.sidecar import Sidecar

LOSS = "2%"
BESIDE = ("original", "--bits 8")  # shown beside a setting that is named
ModelOrShape = Annotated[
    str,
    Parameter(
        help="A directory, a GGUF file, a hub id, reference:gqa, a folder of maps, or random:SHAPE"
        " with a shape of bench decode, such as random:llama-3.1-8b."
    ),
]
# Both have the name of a flag of `serve` and of `compress`, and one of their own.
Sequences = Annotated[
    int | None,
    Parameter(
        name=("--max-sequences", "--sequences"),
        help="Requests that should fit at once; by default as many as possible.",
        show_default=False,
    ),
]
Loss = Annotated[
    str | None,
    Parameter(
        name=("--budget", "--loss"),
        help='The most perplexity to add, such as 1% or "ppl<=1.01"; by default 2%.',
        show_default=False,
    ),
]
Share = Annotated[float, Parameter(help="Share of the GPU's memory to use.")]


def advise(
    model: ModelOrShape,
    /,
    *,
    gpu: str = "h100",
    context: int | None = None,
    sequences: Sequences = None,
    loss: Loss = None,
    maps: MapsName = None,
    storage: Storage = STORAGE,
    share: Share = 0.9,
    json: Path | None = None,
) -> None:
    """Say which setting to take for MODEL on a GPU: how many requests fit, what it loses, how long
    a decode step takes, and the commands to run.

    Reads only the model's config and its maps, if there are any, and needs no GPU. Sizes are those
    that kvfold's engine would allocate. With --bits, --evict or --maps it is about that setting
    alone. Losses that were measured on another model are marked as such.

    Parameters
    ----------
    gpu
        t4, l4, a10g, rtx-4090, a100-40, l40s, a100-80, h100, h200, b200, or a size such as 24GB.
    context
        Tokens of a request, prompt and answer together; by default 8192, or the model's maximum if
        that is less.
    json
        File for the results as JSON.
    """
    common.check_outputs(json=json)
    with common.fast_imports():
        from kvfold.compression.planning.step_time import load_of
        from kvfold.evaluation import advice
        from kvfold.evaluation.gpu_memory import GPUMemory, gpu_bytes
        from kvfold.hub.checkpoint import saved_config

    limit = advice.parse_loss(LOSS if loss is None else loss)
    for name, value, legal in (
        ("sequences", sequences, sequences is None or sequences >= 1),
        ("share", share, 0 < share <= 1),
    ):
        if not legal:
            bounds = "in (0, 1]" if name == "share" else "at least 1"
            raise SettingError(f"`{name}` must be {bounds}, got {value}")
    memory: dict[str, Any] = {"gpu_bytes": gpu_bytes(gpu), "share": share}
    name, folder = common.base_and_maps(model, maps)
    sidecar = common.load_maps(folder)
    memory["config"] = config = load_config(name, sidecar)
    saved = saved_config(config)
    stored = saved or sidecar
    spec, provenance = (None, {}) if stored is None else (stored.spec, dict(stored.provenance))
    cache = storage.config(planned=spec is not None and spec.planned) or CacheConfig()
    is_named = stored is not None or cache != CacheConfig()
    if loss is not None and is_named:
        raise SettingError(
            "`loss` chooses between settings, and here one is named, by an option of the cache, by"
            " maps or by a compressed model: leave `loss` out, or name the original model alone"
        )
    context = load_of(config, context=context).context
    original = GPUMemory(spec=None, cache=CacheConfig(), **memory)
    measured = advice.nearest_models(name, config)
    timed = gpu.lower() in TIMED
    chosen: Option | None
    if is_named:
        if sidecar is not None:
            estimate = GPUMemory.of_maps(sidecar, cache=cache, **memory)
        else:
            estimate = GPUMemory(spec=spec, cache=cache, **memory)
        title = None if stored is None else "maps" if sidecar is not None else "folded"
        chosen = advice.option(
            name_of(cache, title), original, estimate, context, sequences, timed=timed
        )
        options = advice.options_of(original, context, sequences, timed=timed, plans=False)
        options = [x for x in options if x.name in BESIDE and x.name != chosen.name]
        options.append(chosen)
    else:
        options = advice.options_of(original, context, sequences, timed=timed, plans=True)
        chosen = advice.choose(options, measured[0], limit, sequences)
    report = Report(
        model=model,
        base=name,
        maps=folder,
        gpu=gpu,
        context=context,
        sequences=sequences,
        limit=None if is_named else limit,
        options=options,
        chosen=chosen,
        measured=measured,
        spec=spec,
        provenance=provenance,
    )
    report.show()
    if json is not None:
        write_json(json, report.record())


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


def name_of(cache: CacheConfig, title: str | None) -> str:
    """What a table calls a setting that the user named. title: of a compressed model."""
    words = cache_words(cache)
    if title is not None:
        return f"{title}, options" if words else title
    return " ".join(words) if cache == CacheConfig(bits=cache.bits) else "these options"
