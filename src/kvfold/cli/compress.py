"""kvfold compress: fold a model and save it."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cli import common
from kvfold.cli.options import (
    CALIBRATION,
    PLACE,
    Calibration,
    Flag,
    Model,
    Place,
    RecipeName,
    parse_levels,
)
from kvfold.errors import SettingError

if TYPE_CHECKING:
    from kvfold.compression.target import Target
    from kvfold.spec import CacheSpec


def compress(
    model: Model,
    /,
    *,
    recipe: RecipeName = None,
    keep: float | None = None,
    budget: str | None = None,
    fastest: Flag = False,
    batch: int | None = None,
    context: int | None = None,
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
    fastest
        Of fast, swift, lean and small at sizes from 2 to 14 times, bits planned: the one within
        --budget whose decode step is predicted to take the least time on a GPU.
    batch
        Sequences of that step: 64 without it.
    context
        Tokens that each of them has stored: 8192 without it, or as many as the model has positions.
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
    from kvfold.step_time import load_of

    target = Target(
        keep=keep,
        factor=factor,
        bytes_per_token=bytes_per_token,
        levels=parse_levels(levels),
        budget=budget,
    )
    target.check_align(align)
    check_steps(recover)
    check_fastest(
        fastest,
        budget=budget,
        recipe=recipe,
        align=align,
        stats=calibration.stats,
        batch=batch,
        context=context,
    )
    check_files(calibration.calib, calibration.stats, output)
    with new_directory(output) as folder:
        config = common.load_config(model)
        begin, why = time.perf_counter(), None
        if fastest:
            load = load_of(config, batch, context)
            compressor, spec = fold_fastest(
                model, config, target, load, calibration, place, recover
            )
        else:
            settings, why = chosen(recipe, config, target)
            compressor = common.compressor(
                model, config, settings, calibration, place, target, align
            )
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
        print(f"recipe {compressor.recipe.name}: {why}")
    done = facts(spec, provenance_of(compressor.model))
    print(f"{compressor.recipe.name}: " + "\n".join(done))
    print(f"kernels on a GPU: {kernels_of(config, spec, stored)}")
    print(f"compressed in {seconds:.1f} seconds, saved to {output}")


def check_fastest(fastest: bool, *, budget: str | None, **given: Any) -> None:
    """Raises SettingError for what it needs or decides by itself, or what only it has."""
    if fastest and budget is None:
        raise SettingError("`fastest` is the fastest within a loss: give `budget` too")
    for name in ("recipe", "align", "stats") if fastest else ("batch", "context"):
        if given[name] is not None:
            hint = (
                f"`fastest` tries several recipes and sizes: leave `{name}` out"
                if fastest
                else f"`{name}` is of the step that is predicted: give `fastest` too"
            )
            raise SettingError(hint)


def fold_fastest(
    model: str,
    config: Any,
    target: "Target",
    load: Any,
    calibration: Calibration,
    place: Place,
    recover: int,
) -> "tuple[Any, CacheSpec]":
    """The compressor whose model was folded in place, and to what."""
    from kvfold.evaluation import comparison
    from kvfold.evaluation.fastest import TRIED, search_fastest

    for name in TRIED:
        common.check_recipe(config, name, calibration.max_tokens, target, None)
    compressors = comparison.compressors_of(
        common.load(model, place),
        common.load_tokenizer(model),
        list(TRIED),
        calib=list(calibration.calib) or None,
        max_tokens=calibration.max_tokens,
        seed=calibration.seed,
    )
    assert target.limit is not None
    with common.progress() as progress:
        best = search_fastest(compressors, target.limit, load, say=print, progress=progress)
        provenance = {"model": model, **asdict(target), "factor": best.factor, "ratio": best.ratio}
        provenance |= {"align": None, "chosen": f"{best}, at {load}"}
        best.prepared.fold(best.spec, provenance, recover=recover, progress=progress)
    print(f"the fastest within the budget at {load}: {best}")
    return best.prepared.compressor, best.spec
