"""kvfold compress: fold a model and save it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvfold.cli import common
from kvfold.cli.options import CALIBRATION, PLACE, Calibration, Model, Place, RecipeName
from kvfold.files import writing

if TYPE_CHECKING:
    from kvfold.compression.compressor import Compressor
    from kvfold.spec import CacheSpec


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
    from kvfold.api import check_files, fold_to
    from kvfold.compression.recover import check_steps
    from kvfold.compression.target import Target, check_align

    target = Target(keep=keep, budget=budget, factor=factor, bytes_per_token=bytes_per_token)
    check_align(align)
    check_steps(recover)
    check_files(calibration.calib, calibration.stats, output)
    compressor = common.compressor(model, recipe, calibration, place, target)
    begin = time.perf_counter()
    with common.progress() as progress:
        spec, ratio = fold_to(
            compressor,
            target,
            source=model,
            align=align,
            statistics=calibration.stats,
            recover=recover,
            progress=progress,
        )
    seconds = time.perf_counter() - begin
    store(compressor, model, place, output)
    print(summary(compressor, spec, seconds))
    if ratio is not None:
        print(f"perplexity ratio {ratio:.4f} on held-out text, {target.limit:g} allowed")
    print(f"saved to {output}")


def store(compressor: "Compressor", name: str, place: Place, output: Path) -> None:
    """Save, in the original checkpoint's dtype unless another one was asked for."""
    from kvfold.api import save
    from kvfold.loading import load_config

    wanted = load_config(name).dtype
    if place.dtype == "auto" and wanted is not None:
        compressor.model.to(wanted)
    with writing(output):
        save(compressor.model, compressor.tokenizer, output)


def summary(compressor: "Compressor", spec: "CacheSpec", seconds: float) -> str:
    from kvfold.artifact import provenance_of

    full = 2 * spec.geometry.full_numbers
    lines = [
        f"{compressor.recipe.name}: {spec.kept_fraction:.4f} of the numbers kept",
        f"{full} -> {spec.bytes_per_token()} bytes per token at 16 bits, "
        f"{1 / spec.kept_fraction:.2f} times smaller, in {seconds:.1f} seconds",
    ]
    if recovery := provenance_of(compressor.model).get("recovery"):
        lines.append(
            f"recovered in {recovery['steps']} steps: {recovery['before']:.4f} to"
            f" {recovery['after']:.4f} nats a token from the original"
        )
    if spec.planned:
        from kvfold.spec.layout import cache_layout

        bits = cache_layout(spec).bits_per_token
        lines.append(
            f"{bits / 8:.0f} bytes per token with the planned bits and scales, "
            f"{8 * full / bits:.2f} times smaller on the paged cache"
        )
    return "\n".join(lines)
