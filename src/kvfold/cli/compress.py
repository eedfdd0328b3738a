"""kvfold compress: fold a model and save it."""

import time
from pathlib import Path

from kvfold.cli import common
from kvfold.cli.options import (
    CALIBRATION,
    PLACE,
    Calibration,
    Model,
    Place,
    RecipeName,
    parse_levels,
)


def compress(
    model: Model,
    /,
    *,
    recipe: RecipeName = None,
    keep: float | None = None,
    budget: str | None = None,
    factor: float | None = None,
    bytes_per_token: float | None = None,
    levels: str | None = None,
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
    levels
        Bits that planned numbers may have, separated by commas, of 8,6,4,3,2,1, or all of them;
        default 8,4,2, those that kernels read.
    align
        Ranks are multiples of it; default 16, or 8 where heads are narrow. Not of planned bits.
    recover
        Steps in which the maps learn from the original on the calibration text; for a GPU.
    output
        New directory, written whole or not at all.
    """
    from kvfold.api import check_files, fill, fold_to, stored_dtype
    from kvfold.artifact import provenance_of
    from kvfold.card import facts
    from kvfold.compression.default import chosen
    from kvfold.compression.recover import check_steps
    from kvfold.compression.target import Target
    from kvfold.files import new_directory, writing
    from kvfold.models.kernels import kernels_of

    target = Target(
        keep=keep,
        factor=factor,
        bytes_per_token=bytes_per_token,
        levels=parse_levels(levels),
        budget=budget,
    )
    target.check_align(align)
    check_steps(recover)
    check_files(calibration.calib, calibration.stats, output)
    with new_directory(output) as folder:
        config = common.load_config(model)
        settings, why = chosen(recipe, config, target)
        compressor = common.compressor(model, config, settings, calibration, place, target, align)
        begin = time.perf_counter()
        with common.progress() as progress:
            spec, _ = fold_to(
                compressor,
                target,
                source=model,
                why=why,
                align=align,
                statistics=calibration.stats,
                recover=recover,
                progress=progress,
            )
        seconds = time.perf_counter() - begin
        stored = stored_dtype(config, place.dtype) or compressor.model.dtype
        with writing(output):
            fill(folder, compressor.model, compressor.tokenizer, stored)
    if why is not None:
        print(f"recipe {settings.name}: {why}")
    done = facts(spec, provenance_of(compressor.model))
    print(f"{compressor.recipe.name}: " + "\n".join(done))
    print(f"kernels on a GPU: {kernels_of(config, spec, stored)}")
    print(f"compressed in {seconds:.1f} seconds, saved to {output}")
