"""kvfold compress: fold a model and save it."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cli import common
from kvfold.cli import maps as beside
from kvfold.cli.options import (
    CALIBRATION,
    FASTEST,
    PLACE,
    SIZE,
    Calibration,
    Fastest,
    Flag,
    Model,
    Place,
    RecipeName,
    Size,
)
from kvfold.errors import SettingError

if TYPE_CHECKING:
    import torch

    from kvfold.compression.compressor import Compressor
    from kvfold.evaluation.answers import Answer
    from kvfold.spec import CacheSpec


def compress(
    model: Model,
    /,
    *,
    recipe: RecipeName = None,
    size: Size = SIZE,
    fastest: Fastest = FASTEST,
    recover: int = 0,
    learn_scores: Flag = False,
    no_check: Flag = False,
    maps: Flag = False,
    windows: Flag = False,
    output: Path,
    calibration: Calibration = CALIBRATION,
    place: Place = PLACE,
) -> None:
    """Shrink MODEL's cache and save the result as an ordinary checkpoint.

    Parameters
    ----------
    recover
        Steps in which the maps learn from the original on the calibration text; for a GPU.
    learn_scores
        Learn what rows are worth, for --evict learned.
    no_check
        Save it without comparing its answer to a short prompt with the original's, and maps
        without measuring what they lose on text that calibration did not read.
    maps
        Write maps beside the weights, some megabytes that `kvfold.attach` gives to a model of
        transformers, instead of a checkpoint: of any model type, quantised or with a LoRA.
    windows
        With --maps: also of layers with a sliding window where others hold most of a long context.
    output
        New directory, written whole or not at all.
    """
    from kvfold.api import check_files, fill, stored_dtype
    from kvfold.compression.recover import check_steps
    from kvfold.evaluation import scores
    from kvfold.evaluation.answers import check_answer
    from kvfold.files import new_directory, writing

    fastest.check(size, recipe, calibration.stats)
    size.target.check_align(size.align)
    check_steps(recover)
    check_files(calibration.calib, calibration.stats, output)
    if maps:
        beside.check(size, fastest, recover=recover, learn_scores=learn_scores)
        beside.write_maps(model, recipe, size, windows, calibration, place, output, not no_check)
        return
    if windows:
        raise SettingError("`windows` says which layers get maps: give `maps` too")
    with new_directory(output) as folder:
        config = common.load_config(model)
        if learn_scores:
            scores.check_learnable(config, size.target)
        if fastest.fastest:
            made = fold_fastest(
                model, config, size, fastest, calibration, place, recover, not no_check
            )
        else:
            made = fold_asked(
                model, config, recipe, size, calibration, place, recover, not no_check
            )
        if learn_scores:
            own = made.compressor
            with common.progress() as progress:
                scores.learn_scores(own.model, own.tokenizer, scores.readings(own), progress)
        if made.answer is not None:
            check_answer(made.compressor.model, made.answer, made.predicted)
        stored = stored_dtype(config, place.dtype) or made.compressor.model.dtype
        with writing(output):
            fill(folder, made.compressor.model, made.compressor.tokenizer, stored)
    say(made, config, stored)
    print(f"compressed in {made.seconds:.1f} seconds, saved to {output}")


@dataclass(frozen=True, kw_only=True)
class Made:
    """A compressor whose model was folded in place, to what, why by its recipe, and how long it
    took. answer: the original's, where it is to be checked; predicted: as of `api.Folded`."""

    compressor: "Compressor"
    spec: "CacheSpec"
    seconds: float
    answer: "Answer | None"
    predicted: float | None
    why: str | None = None


def fold_asked(
    model: str,
    config: Any,
    recipe: str | None,
    size: Size,
    calibration: Calibration,
    place: Place,
    recover: int,
    check: bool,
) -> Made:
    """To a size, by a recipe or the default."""
    from kvfold.api import fold_to
    from kvfold.compression.default import chosen

    align = size.align
    settings, target, why = chosen(recipe, config, size.target)
    compressor = common.compressor(model, config, settings, calibration, place, target, align)
    answer = answer_of(compressor, config, place) if check else None
    begin = time.perf_counter()
    with common.progress() as progress:
        folded = fold_to(
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
    return Made(
        compressor=compressor,
        spec=folded.spec,
        seconds=seconds,
        answer=answer,
        predicted=folded.predicted,
        why=why,
    )


def answer_of(compressor: "Compressor", config: Any, place: Place) -> "Answer":
    """What the original answers, before it is folded."""
    from kvfold.api import stored_dtype
    from kvfold.evaluation.answers import Answer

    stored = stored_dtype(config, place.dtype)
    return Answer.of(compressor.model, compressor.tokenizer, stored)


def fold_fastest(
    model: str,
    config: Any,
    size: Size,
    fastest: Fastest,
    calibration: Calibration,
    place: Place,
    recover: int,
    check: bool,
) -> Made:
    """To what is predicted to be the fastest within a budget."""
    from kvfold.evaluation import comparison
    from kvfold.evaluation.fastest import TRIED, search_fastest
    from kvfold.step_time import load_of

    target, load = size.target, load_of(config, fastest.batch, fastest.context)
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
    answer = answer_of(compressors[0], config, place) if check else None
    assert target.limit is not None
    begin = time.perf_counter()
    with common.progress() as progress:
        best = search_fastest(compressors, target.limit, load, say=print, progress=progress)
        provenance = {"model": model, **asdict(target), "ratio": best.ratio, "align": None}
        provenance |= {"factor": best.factor, "prefer": best.prefer}
        provenance |= {"chosen": f"{best}, at {load}"}
        best.prepared.fold(best.spec, provenance, recover=recover, progress=progress)
    print(f"the fastest within the budget at {load}: {best}")
    seconds = time.perf_counter() - begin
    return Made(
        compressor=best.prepared.compressor,
        spec=best.spec,
        seconds=seconds,
        answer=answer,
        predicted=best.prepared.predicted_loss(best.spec),
    )


def say(made: Made, config: Any, stored: "torch.dtype") -> None:
    """What was made, and what kernels serve it."""
    from kvfold.artifact import provenance_of
    from kvfold.card import facts
    from kvfold.models.kernels import in_one_pass, kernels_of
    from kvfold.step_time import rebuilt_keys

    name = made.compressor.recipe.name
    if note := rebuilt_keys(name, config, made.spec):
        print(note)
    if made.why is not None:
        print(f"recipe {name}: {made.why}")
    provenance = provenance_of(made.compressor.model)
    print(f"{name}: " + "\n".join(facts(made.spec, provenance)))
    print(f"kernels on a GPU: {kernels_of(config, made.spec, stored)}")
    if provenance["prefer"] == "speed":
        print(f"in one pass on a Hopper GPU: {in_one_pass(config, made.spec)}")
