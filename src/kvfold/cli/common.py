"""Shared parts of commands: loading, progress, records of what ran."""

import dataclasses
import gc
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvfold import __version__
from kvfold.cli.options import Calibration, Place, Storage, Windows
from kvfold.config import AUTO
from kvfold.utils.errors import SettingError
from kvfold.utils.files import check_writable

if TYPE_CHECKING:
    from kvfold.compression.compressor import Compressor
    from kvfold.compression.planning.target import Target
    from kvfold.config import CacheConfig, Recipe
    from kvfold.evaluation.measure import Measurement
    from kvfold.evaluation.tasks.base import Task
    from kvfold.layout import CacheSpec
    from kvfold.maps.sidecar import Sidecar

Progress = Callable[[str, int, int], None]
DEFAULT_CTX = 1024
FIRST, EVERY = 10, 30  # seconds before the first and between further lines of progress in a log


@contextmanager
def fast_imports() -> Iterator[None]:
    """Context manager for the first import of torch and transformers: pauses the garbage collector,
    which would visit what they have created again and again. Later collections leave it out."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def quiet() -> None:
    """Turn off messages and progress bars of transformers and of the hub's client."""
    import transformers
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as hub_logging

    disable_progress_bars()

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    hub_logging.set_verbosity_error()


def load_config(name: str, maps: "Sidecar | None" = None) -> Any:
    """The config of a model. Raises ValueError for maps that cannot be of this model."""
    from kvfold.hub import loading

    quiet()
    config = loading.load_config(name)
    if maps is not None:
        if saved_spec(config) is not None:
            raise SettingError(
                f"`maps` work with an original model, but {name!r} is compressed already: leave"
                " them out, or name the original"
            )
        maps.check_config(config)
    return config


def load(name: str, place: Place) -> Any:
    """Load the model of a directory, hub id or reference."""
    from kvfold.hub import loading

    quiet()
    return loading.load(name, dtype=place.dtype, device=place.device)


def base_and_maps(model: str, maps: str | None) -> tuple[str, str | None]:
    """The names of a model and its maps, for a MODEL that may be a folder of maps."""
    from kvfold.maps.named import base_and_maps

    quiet()
    return base_and_maps(model, maps)


def load_maps(name: str | None) -> "Sidecar | None":
    """Load maps from a folder or the hub; None for None."""
    if name is None:
        return None
    from kvfold.maps.sidecar import Sidecar

    quiet()
    return Sidecar.load(name)


def check_original(model: str, command: str) -> None:
    """Raises ValueError for a folder of maps, which `command` makes itself."""
    from kvfold.maps.named import holds_maps
    from kvfold.maps.sidecar import Sidecar

    if holds_maps(model):
        source = Sidecar.load(model).source
        raise ValueError(
            f"{model} holds maps for {source}, and kvfold {command} compresses a model itself: give"
            f" {source}, or measure these maps by kvfold eval {model}"
        )


def check_context(maps: str | None, context: object) -> None:
    """Raises SettingError for packed contexts together with maps: packing evicts tokens, which
    works without maps only."""
    if maps is not None and context:
        raise SettingError(
            "`maps` and `context` exclude each other: a packed context has evicted tokens, which"
            " does not work with maps: leave one out"
        )


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a model."""
    from kvfold.hub import loading

    return loading.load_tokenizer(name)


def check_outputs(*, html: Path | None = None, json: Path | None = None) -> None:
    """Raises ValueError for a file that cannot be written, before the work starts."""
    for path in (html, json):
        if path is not None:
            check_writable(path)
    if html is not None:
        from kvfold.evaluation.report import check_installed

        check_installed()


def context(model: Any, windows: Windows) -> int:
    """Tokens per window: --ctx, or the default, at most the model's positions. model: or its
    config."""
    from kvfold.evaluation.perplexity import max_positions

    return windows.ctx or min(DEFAULT_CTX, max_positions(model) or DEFAULT_CTX)


def named_texts(paths: Sequence[Path]) -> dict[str, str]:
    """Texts by file name without its ending, or the packaged held-out text."""
    from kvfold.utils.text import packaged, read_text

    if not paths:
        return {"packaged": packaged("filler.txt")}
    stems = [path.name.split(".")[0] or path.name for path in paths]
    unique = len(set(stems)) == len(stems)
    names = stems if unique else [str(path) for path in paths]
    return {name: read_text(path) for name, path in zip(names, paths, strict=True)}


def measurement(
    config: Any,
    tokenizer: Any,
    windows: Windows,
    cache: "CacheConfig | None",
    texts: dict[str, str],
    tasks: "dict[str, list[Task]]",
    maps: "Sidecar | None" = None,
) -> "Measurement":
    """What to measure on a model of this config, and with which cache and maps."""
    from kvfold.evaluation.measure import Measurement, needle_lengths, text_windows

    ctx = context(config, windows)
    return Measurement(
        windows=text_windows(config, tokenizer, texts, ctx=ctx, max_tokens=windows.max_tokens),
        tasks=tasks,
        needle=windows.needle_contexts * windows.needle,
        lengths=needle_lengths(config) if windows.needle else None,
        chunk=windows.chunk,
        batch=windows.batch,
        cache=cache,
        maps=maps,
        agnostic=windows.agnostic,
    )


def read_tasks(paths: Sequence[Path]) -> "dict[str, list[Task]]":
    """The tasks of every file, by its path."""
    from kvfold.evaluation import tasks

    return {str(path): tasks.read_tasks(path) for path in paths}


def cache_config(
    config: Any,
    storage: Storage,
    place: Place,
    planned: bool = False,
    maps: "Sidecar | None" = None,
) -> "CacheConfig | None":
    """The paged cache's configuration for a model of this config; None if transformers' cache
    serves.

    planned: the model's bits will be planned. Raises ValueError for settings that do not work with
    this model, these maps or this device.
    """
    from kvfold.cache.eviction import policies
    from kvfold.engine.runner.build import check_served, check_sidecar_cache
    from kvfold.hub.loading import default_device
    from kvfold.models.families import has_family
    from kvfold.ops.backend import use_triton

    spec = saved_spec(config) if maps is None else maps.spec
    cache = storage.config(planned or (spec is not None and spec.planned))
    if cache is not None and (maps is not None or not has_family(config)):
        check_sidecar_cache(cache)
        use_triton((place.device or default_device()).partition(":")[0])
    elif cache is not None:
        policy = next(iter(policies.POLICIES)) if cache.evict == AUTO else cache.evict
        check_served(config, spec, policies.get(policy) if policy else None, cache)
        use_triton((place.device or default_device()).partition(":")[0])
    return cache


def with_policy(model: Any, tokenizer: Any, cache: "CacheConfig | None") -> "CacheConfig | None":
    """The configuration with a policy in place of `auto`: measures several on the model and prints
    the results to stderr."""
    if cache is None or cache.evict != AUTO:
        return cache
    from kvfold.evaluation import auto

    with progress() as report:
        trials = auto.trials(model, tokenizer, cache, report)
    best = auto.choose(trials)
    results = (f"{x.policy} {x.right:.0%} answered, {x.lost:+.3f} nats" for x in trials)
    print(f"--evict {AUTO}: {best} ({'; '.join(results)})", file=sys.stderr)
    return dataclasses.replace(cache, evict=best)


def saved_spec(config: Any) -> "CacheSpec | None":
    """What a folded checkpoint stores; None for an ordinary model."""
    from kvfold.hub import checkpoint

    return checkpoint.saved_spec(config)


def settings(model: Any, windows: Windows, storage: Storage) -> dict[str, Any]:
    """The settings of a measurement, for its JSON record."""
    resolved = {"ctx": context(model, windows), "dtype": str(model.dtype).removeprefix("torch.")}
    return {**dataclasses.asdict(windows), **resolved, "cache": dataclasses.asdict(storage)}


def print_table(table: Table) -> None:
    """Print a table without cutting a number or a name: where a terminal is too narrow for the
    columns that do not wrap, lines are longer than the terminal."""
    console = Console()
    for column in table.columns:
        if column.no_wrap:
            cells = [column.header, *column.cells]
            column.min_width = max(console.measure(cell).maximum for cell in cells)
        else:
            column.overflow = "fold"
    any_width = console.options.update(width=1000)
    console.width = max(console.width, console.measure(table, options=any_width).minimum)
    console.print(table)


@contextmanager
def progress(clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """Show progress on stderr: a bar on a terminal, else a line now and then. clock: in seconds."""
    if not sys.stderr.isatty():
        yield Lines(clock)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)
            if done >= total:
                bars.remove_task(tasks.pop(name))

        yield show


class Lines:
    """Prints progress for a log: a line after FIRST seconds, then one every EVERY seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.name = clock, ""
        self.begin = self.last = clock()  # when the current work began, and last reported
        self.due = self.begin + FIRST

    def __call__(self, name: str, done: int, total: int) -> None:
        if name != self.name:
            self.name, self.begin = name, self.last
        now = self.last = self.clock()
        if done == 0:  # it begins
            self.begin = now
            return
        if now < self.due:
            return
        self.due = now + EVERY
        left = (now - self.begin) / max(done, 1) * (total - done)
        time_left = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
        print(f"{name}: {done} of {total}, about {time_left} left", file=sys.stderr, flush=True)


def versions(device: Any) -> dict[str, str | None]:
    """Versions of everything that decides a measurement."""
    import torch
    import transformers

    device = torch.device(device)
    cuda = device.type == "cuda"
    return {
        "kvfold": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else str(device),
    }


def commit() -> str | None:
    """The git commit of a source checkout, with + if it was changed; None for an installed copy."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    except OSError:
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "") or None


def compressor(
    model: str,
    config: Any,
    recipe: "str | Recipe",
    calibration: Calibration,
    place: Place,
    target: "Target",
    align: int | None,
) -> "Compressor":
    """A compressor of a named model, which is loaded after the recipe and size are checked."""
    from kvfold.compression.compressor import Compressor

    settings = check_recipe(config, recipe, calibration.max_tokens, target, align)
    return Compressor(
        load(model, place),
        settings,
        load_tokenizer(model),
        calib=list(calibration.calib) or None,
        max_tokens=calibration.max_tokens,
        seed=calibration.seed,
    )


def check_recipe(
    config: Any, recipe: "str | Recipe", max_tokens: int | None, target: "Target", align: int | None
) -> "Recipe":
    """The recipe of a name, checked before a model is loaded. Raises ValueError if a model of this
    config cannot be folded by it to this size, or not be calibrated on that many tokens."""
    from kvfold import recipes
    from kvfold.compression.compressor import check_config

    recipe = recipes.get(recipe) if isinstance(recipe, str) else recipe
    check_config(config, recipe, max_tokens, target, align)
    return recipe
