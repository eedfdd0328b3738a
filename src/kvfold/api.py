"""compress: from a model and a recipe to a folded model, in one call."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfold import recipes
from kvfold.compression.calibration_text import CALIBRATION_TOKENS
from kvfold.compression.compressor import Compressor
from kvfold.compression.progress import Progress
from kvfold.compression.recover import check_steps
from kvfold.compression.statistics import Statistics
from kvfold.compression.statistics.artifact import check_place
from kvfold.compression.target import Target, check_align
from kvfold.config import Recipe, check_types
from kvfold.evaluation.budget import search_keep
from kvfold.files import check_makeable, new_directory
from kvfold.loading import load, load_tokenizer
from kvfold.spec import CacheSpec
from kvfold.text import read_texts


def compress(
    model: Any,
    recipe: str | Recipe = "small",
    *,
    keep: float | None = None,
    factor: float | None = None,
    bytes_per_token: float | None = None,
    budget: str | None = None,
    align: int | None = None,
    calib: list[str | Path] | None = None,
    tokenizer: Any = None,
    statistics: Path | str | Statistics | None = None,
    output: Path | str | None = None,
    max_tokens: int = CALIBRATION_TOKENS,
    recover: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Any:
    """Fold a model so that its KV cache keeps `keep` of its numbers, or is `factor` times smaller.

    model: a name (directory, GGUF file, hub id, `reference:gqa`) or a loaded causal LM, which is
    folded in place. recipe: a name from `kvfold.recipes` or a `Recipe`. keep: in (0, 1], 0.5 where
    no size is given. factor: dimensions and bits planned together (see `Prepared.plan_factor`); the
    planned bits take effect on the paged cache. bytes_per_token: the same, as bytes. budget:
    "ppl<=1.01", the smallest keep within that ratio of the original's perplexity on calibration
    text that calibration does not read. align: ranks are multiples of it (default 16, 8 for
    head_dim <= 64). calib: text files instead of the packaged text. tokenizer: needed with a loaded
    model. statistics: an artifact file, reused if it exists and fits, written if not. recover:
    steps in which the maps learn from the original on the calibration text (see
    `compression.recover`; for a GPU). output: a directory to save to; written whole or not at all.

    Returns the folded model. Raises ValueError for settings or inputs that cannot work, and then
    leaves the model as it was, unless it is recovery that diverges.
    """
    check_types(compress, locals())
    recipe = recipes.get(recipe) if isinstance(recipe, str) else recipe
    target = Target(keep=keep, factor=factor, bytes_per_token=bytes_per_token, budget=budget)
    check_align(align)
    check_steps(recover)
    check_files(calib, statistics, output)
    name = model if isinstance(model, str | Path) else None
    if name is not None:
        tokenizer = tokenizer or load_tokenizer(str(name))
        model = load(str(name))
    compressor = Compressor(model, recipe, tokenizer, calib=calib, max_tokens=max_tokens, seed=seed)
    fold_to(
        compressor,
        target,
        source=str(name or model.config.name_or_path),
        align=align,
        statistics=statistics,
        recover=recover,
        progress=progress,
    )
    if output is not None:
        save(model, tokenizer, Path(output))
    return model


def fold_to(
    compressor: Compressor,
    target: Target,
    *,
    source: str,
    align: int | None = None,
    statistics: Path | str | Statistics | None = None,
    recover: int = 0,
    progress: Progress | None = None,
) -> tuple[CacheSpec, float | None]:
    """Fold a compressor's model in place to a size; the last step, after all that can fail.

    source: the name of the original, for provenance; the rest as in `compress`. Returns what it was
    folded to, and the ratio of perplexities where that decided it.
    """
    factor = compressor.factor_of(target)
    compressor.align(align)
    prepared = compressor.prepare(statistics, progress)
    keep, ratio = target.keep, None
    if target.limit is not None:
        keep, ratio = search_keep(prepared, target.limit, align=align, progress=progress)
    if factor is not None:
        spec = prepared.plan_factor(factor, align)
    else:
        assert keep is not None
        spec = prepared.plan(keep, align)
    asked = {"budget": target.budget, "factor": target.factor}
    asked |= {"bytes_per_token": target.bytes_per_token}
    provenance = {"model": source, "keep": keep, "align": align, **asked}
    prepared.fold(spec, provenance, recover=recover, progress=progress)
    return spec, ratio


def check_files(
    calib: Sequence[str | Path] | None,
    statistics: Path | str | Statistics | None,
    output: Path | str | None,
) -> None:
    """Raises ValueError for files that cannot be read, or written after the work is done."""
    if calib:
        read_texts(calib)
    if isinstance(statistics, str | Path):
        check_place(Path(statistics))
    if output is not None:
        check_output(Path(output))


def check_output(path: Path) -> None:
    """Raises ValueError for a directory that is in use, or cannot be made."""
    check_makeable(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"output {path} exists and is not an empty directory; name another one")


def save(model: Any, tokenizer: Any, path: Path) -> None:
    """Save a checkpoint whole or not at all."""
    with new_directory(path) as scratch:
        model.save_pretrained(scratch)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
