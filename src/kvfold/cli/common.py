"""Parts of every command: load quietly, show progress, say what ran."""

import dataclasses
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvfold import __version__
from kvfold.cli.options import Calibration, Place, Storage, Windows
from kvfold.files import check_writable

if TYPE_CHECKING:
    from kvfold.compression.compressor import Compressor
    from kvfold.config import CacheConfig, Recipe
    from kvfold.evaluation.measure import Measurement
    from kvfold.evaluation.tasks.base import Task

Progress = Callable[[str, int, int], None]
DEFAULT_CTX = 1024


def load_config(name: str) -> Any:
    """The config of a model, and from here on no output of transformers' own."""
    import transformers
    from huggingface_hub.utils import logging as hub_logging

    from kvfold import loading

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
    return loading.load_config(name)


def load(name: str, place: Place) -> tuple[Any, Any]:
    """(model, tokenizer) of a directory, hub id or reference, without transformers' own output."""
    from kvfold import loading

    load_config(name)
    tokenizer = loading.load_tokenizer(name)
    return loading.load(name, dtype=place.dtype, device=place.device), tokenizer


def check_outputs(*, html: Path | None = None, json: Path | None = None) -> None:
    """Raises ValueError for a file that could not be written after the work is done."""
    for path in (html, json):
        if path is not None:
            check_writable(path)
    if html is not None:
        from kvfold.report import check_installed

        check_installed()


def context(model: Any, windows: Windows) -> int:
    """--ctx, or the default where the model has that many positions."""
    from kvfold.evaluation.perplexity import max_positions

    return windows.ctx or min(DEFAULT_CTX, max_positions(model) or DEFAULT_CTX)


def named_texts(paths: Sequence[Path]) -> dict[str, str]:
    """Texts by file name (without .txt and the like), or the packaged held-out text."""
    from kvfold.text import packaged, read_text

    if not paths:
        return {"packaged": packaged("filler.txt")}
    stems = [path.name.split(".")[0] or path.name for path in paths]
    unique = len(set(stems)) == len(stems)
    names = stems if unique else [str(path) for path in paths]
    return {name: read_text(path) for name, path in zip(names, paths, strict=True)}


def measurement(
    model: Any,
    tokenizer: Any,
    windows: Windows,
    cache: "CacheConfig | None",
    texts: dict[str, str],
    tasks: "dict[str, list[Task]]",
) -> "Measurement":
    """A measurement to make, and through which cache."""
    from kvfold.evaluation.measure import Measurement, text_windows

    ctx = context(model, windows)
    return Measurement(
        windows=text_windows(model, tokenizer, texts, ctx=ctx, max_tokens=windows.max_tokens),
        tasks=tasks,
        needle=windows.needle_contexts * windows.needle,
        chunk=windows.chunk,
        batch=windows.batch,
        cache=cache,
        agnostic=windows.agnostic,
    )


def read_tasks(paths: Sequence[Path]) -> "dict[str, list[Task]]":
    """The rows of every file."""
    from kvfold.evaluation import tasks

    return {str(path): tasks.read_tasks(path) for path in paths}


def cache_config(model: Any, storage: Storage) -> "CacheConfig | None":
    """How the paged cache is to store tokens; None: transformers' cache serves."""
    from kvfold.artifact import spec_of

    spec = spec_of(model)
    return storage.config(planned=spec is not None and spec.planned)


def settings(model: Any, windows: Windows, storage: Storage) -> dict[str, Any]:
    """The settings of a measurement, for its record."""
    resolved = {"ctx": context(model, windows), "dtype": str(model.dtype).removeprefix("torch.")}
    return {**dataclasses.asdict(windows), **resolved, "cache": dataclasses.asdict(storage)}


@contextmanager
def progress() -> Iterator[Progress | None]:
    """A bar on stderr for the work in hand, where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
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


def versions(device: Any) -> dict[str, str | None]:
    """Versions that a measurement was made with."""
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
    model: str, recipe: "Recipe", calibration: Calibration, place: Place
) -> "Compressor":
    """A recipe on a loaded model, with its calibration settings."""
    from kvfold.compression.compressor import Compressor

    loaded, tokenizer = load(model, place)
    return Compressor(
        loaded,
        recipe,
        tokenizer,
        calib=list(calibration.calib) or None,
        max_tokens=calibration.max_tokens,
        seed=calibration.seed,
    )
