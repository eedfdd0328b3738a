"""kvfold compress: fold a model and save it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cli import common
from kvfold.cli.options import CALIBRATION, PLACE, Calibration, Model, Place, RecipeName

if TYPE_CHECKING:
    from kvfold.compression.compressor import Compressor


def compress(
    model: Model,
    /,
    *,
    recipe: RecipeName = "small",
    keep: float | None = None,
    budget: str | None = None,
    factor: float | None = None,
    bytes_per_token: float | None = None,
    align: int | None = None,
    recover: int = 0,
    output: Path,
    calibration: Calibration = CALIBRATION,
    place: Place = PLACE,
) -> None:
    """Shrink MODEL's cache and save the result as an ordinary checkpoint.

    Parameters
    ----------
    keep
        Share of the cache to keep, in (0, 1]; 0.5 if no budget is given.
    budget
        Instead of --keep: "ppl<=1.01" finds the smallest cache within 1 % of the perplexity.
    factor
        Instead of --keep: a cache so many times smaller, in dimensions and bits together, for the
        least predicted loss. For recipes that predict it, ours; runs on the paged cache.
    bytes_per_token
        The same, as bytes a token.
    align
        Ranks are multiples of it; default 16, or 8 where heads are narrow.
    recover
        Steps in which the maps learn from the original on the calibration text; for a GPU.
    output
        New directory, written whole or not at all.
    """
    sizes: dict[str, Any] = {"keep": keep, "budget": budget, "factor": factor}
    sizes |= {"bytes_per_token": bytes_per_token}
    from kvfold.api import fill, fold_to
    from kvfold.artifact import provenance_of
    from kvfold.card import facts
    from kvfold.compression.recover import check_steps
    from kvfold.compression.target import Target, check_exclusive
    from kvfold.files import new_directory

    check_exclusive({f"--{name.replace('_', '-')}": value for name, value in sizes.items()})
    target = Target(**sizes)
    check_steps(recover)
    with new_directory(output) as folder:
        compressor = common.compressor(model, recipe, calibration, place)
        begin = time.perf_counter()
        with common.progress() as progress:
            spec, _ = fold_to(
                compressor,
                target,
                source=model,
                align=align,
                statistics=calibration.stats,
                recover=recover,
                progress=progress,
            )
        seconds = time.perf_counter() - begin
        restore_dtype(compressor, model, place)
        fill(folder, compressor.model, compressor.tokenizer)
    done = facts(spec, provenance_of(compressor.model))
    print(f"{compressor.recipe.name}: " + "\n".join(done))
    print(f"compressed in {seconds:.1f} seconds, saved to {output}")


def restore_dtype(compressor: "Compressor", name: str, place: Place) -> None:
    """The original checkpoint's dtype, unless another one was asked for."""
    from kvfold.loading import load_config

    wanted = load_config(name).dtype
    if place.dtype == "auto" and wanted is not None:
        compressor.model.to(wanted)
