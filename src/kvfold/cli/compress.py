"""kvfold compress: maps of a model's keys and values, or a folded checkpoint."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cli import common
from kvfold.cli.options import (
    CALIBRATION,
    FASTEST,
    PLACE,
    SIZE,
    Calibration,
    Fastest,
    Flag,
    Goal,
    Model,
    Place,
    RecipeName,
    Size,
)
from kvfold.recipes import GOALS
from kvfold.utils.errors import SettingError, renamed

if TYPE_CHECKING:
    import torch

    from kvfold.maps.sidecar import Sidecar


def compress(
    model: Model,
    /,
    *,
    goal: Goal = None,
    recipe: RecipeName = None,
    size: Size = SIZE,
    windows: Flag = False,
    fold: Flag = False,
    fastest: Fastest = FASTEST,
    recover: int = 0,
    learn_scores: Flag = False,
    no_check: Flag = False,
    output: Path,
    calibration: Calibration = CALIBRATION,
    place: Place = PLACE,
) -> None:
    """Write maps by which MODEL's cache becomes smaller; with --fold, a checkpoint that has them in
    its weights.

    Maps are some megabytes beside a model of any type, which `generate`, `eval`, `serve`,
    `kvfold.attach` and vLLM take; the model may be quantised or have a LoRA. --hybrid, --fastest,
    --recover, --learn-scores and the published recipes need --fold, which takes a model
    of the families that kvfold knows.

    Parameters
    ----------
    windows
        Maps also of layers with a sliding window where others hold most of a long context.
    fold
        Write an ordinary checkpoint that stores less, instead of maps.
    recover
        Steps in which the maps learn from the original on the calibration text; for a GPU.
    learn_scores
        Learn what rows are worth, for --evict learned.
    no_check
        Save it without measuring first what maps lose on text that calibration did not read, or
        without comparing a checkpoint's answer to a short prompt with the original's.
    output
        New directory, written whole or not at all.
    """
    from kvfold import api
    from kvfold.hub.checkpoint import provenance_of

    common.quiet()
    recipe = recipe_of(goal, recipe)
    fastest.check(size, recipe, calibration.stats)
    api.check_fold(fold, windows, fastest=fastest.fastest)
    begin = time.perf_counter()
    if fastest.fastest:
        with stopped(output), renamed(max_tokens="calib_tokens"):
            made = fold_fastest(
                model,
                size,
                fastest,
                calibration,
                place,
                recover,
                learn_scores,
                not no_check,
                output,
            )
    else:
        with stopped(output), renamed(max_tokens="calib_tokens"), common.progress() as progress:
            made = api.compress(
                model,
                recipe,
                fold=fold,
                **vars(size.target),
                windows=windows,
                align=size.align,
                calib=list(calibration.calib) or None,
                device=place.device,
                dtype=place.dtype,
                statistics=calibration.stats,
                output=output,
                max_tokens=calibration.max_tokens,
                recover=recover,
                learn_scores=learn_scores,
                check=not no_check,
                seed=calibration.seed,
                progress=progress,
                say=say,
            )
    seconds = time.perf_counter() - begin
    if fold:
        why = None if fastest.fastest else provenance_of(made).get("chosen")
        stored = api.stored_dtype(common.load_config(model), place.dtype)
        say_folded(made, stored or made.dtype, why)
        print(f"compressed in {seconds:.1f} seconds, saved to {output}")
    else:
        say_maps(made)
        disk = in_bytes(folder_bytes(output))
        print(f"made in {seconds:.1f} seconds, saved to {output} ({disk})")
        print(f'use them by --maps {output}, or kvfold.attach(model, "{output}")')


def recipe_of(goal: Goal, recipe: str | None) -> str | None:
    """The recipe that is named, or serves a goal; None for the default, which serves speed."""
    if goal is None:
        return recipe
    if recipe is not None:
        raise SettingError(
            f"`goal={goal}` chooses a recipe, and so does `recipe={recipe}`: leave one out"
        )
    return GOALS[goal]


def fold_fastest(
    model: str,
    size: Size,
    fastest: Fastest,
    calibration: Calibration,
    place: Place,
    recover: int,
    learn_scores: bool,
    check: bool,
    output: Path,
) -> Any:
    """A model folded to what is predicted to be the fastest within a budget, and saved."""
    from kvfold import api
    from kvfold.calibration.saved_pass import saved_beside
    from kvfold.compression.planning.step_time import load_of
    from kvfold.compression.training.recover import check_steps
    from kvfold.evaluation import comparison
    from kvfold.evaluation.answers import Answer
    from kvfold.evaluation.fastest import TRIED, search_fastest
    from kvfold.utils.files import new_directory

    check_steps(recover)
    api.check_files(calibration.calib, calibration.stats, output)
    with saved_beside(output, say) as saved, new_directory(output) as folder:
        config = common.load_config(model)
        target, load = size.target, load_of(config, fastest.batch, fastest.context)
        for name in TRIED:
            common.check_recipe(config, name, calibration.max_tokens, target, None)
        say(f"loading {model}")
        loaded, tokenizer = common.load(model, place), common.load_tokenizer(model)
        compressors = comparison.compressors_of(
            loaded,
            tokenizer,
            list(TRIED),
            calib=list(calibration.calib) or None,
            max_tokens=calibration.max_tokens,
            seed=calibration.seed,
            saved=saved,
        )
        stored = api.stored_dtype(config, place.dtype)
        api.announce(compressors[0], fold=True, output=output, stored=stored, say=say)
        answer = Answer.of(loaded, tokenizer, stored) if check else None
        assert target.limit is not None
        with common.progress() as progress:
            best = search_fastest(compressors, target.limit, load, say=print, progress=progress)
            provenance = {"model": model, **asdict(target), "ratio": best.ratio, "align": None}
            provenance |= {"factor": best.factor, "prefer": best.prefer}
            provenance |= {"chosen": f"{best}, at {load}"}
            best.prepared.fold(best.spec, provenance, recover=recover, progress=progress)
            print(f"the fastest within the budget at {load}: {best}")
            api.finish(
                best.prepared.compressor,
                best.prepared.predicted_loss(best.spec),
                answer,
                learn_scores=learn_scores,
                folder=folder,
                output=output,
                stored=stored,
                progress=progress,
            )
    return loaded


def say(line: str) -> None:
    """Print a line to stderr at once, with settings as flags."""
    print(line.replace("`max_tokens`", "--calib-tokens"), file=sys.stderr, flush=True)


@contextmanager
def stopped(output: Path) -> Iterator[None]:
    """Say what is saved of the calibration where the work ends before it is done."""
    from kvfold.calibration.saved_pass import saved_beside

    try:
        yield
    except ValueError:  # refused
        raise
    except BaseException:
        path = saved_beside(output).path
        if path.exists():
            say(f"calibration is saved in {path}: the same command goes on from there")
        raise


def say_folded(model: Any, stored: "torch.dtype", why: str | None) -> None:
    """What a model was folded to, why by its recipe, and what kernels serve it as it is stored."""
    from kvfold.compression.planning.step_time import rebuilt_keys
    from kvfold.hub.card import facts
    from kvfold.hub.checkpoint import provenance_of, spec_of
    from kvfold.models.kernels import kernels_of, one_pass_summary

    provenance, spec = provenance_of(model), spec_of(model)
    assert spec is not None
    name, config = provenance["recipe"]["name"], model.config
    if note := rebuilt_keys(name, config, spec):
        print(note)
    if why is not None:
        print(f"recipe {name}: {why}")
    print(f"{name}: " + "\n".join(facts(spec, provenance)))
    print(f"kernels on a GPU: {kernels_of(config, spec, stored)}")
    if provenance["prefer"] == "speed":
        print(f"in one pass on a Hopper GPU: {one_pass_summary(config, spec)}")


def say_maps(made: "Sidecar") -> None:
    """What maps store, and which layers were left."""
    from kvfold.hub.card import facts
    from kvfold.layout.pages import cache_layout

    provenance = dict(made.provenance)
    if why := provenance.get("chosen"):
        print(f"recipe {provenance['recipe']['name']}: {why}")
    print(f"maps of {len(made.maps)} layers: " + "\n".join(facts(made.spec, provenance)))
    if left := provenance.get("left"):
        kept = cache_layout(made.spec).kept_fraction
        whole = (
            f"{1 / (share + (1 - share) * kept):.2f} times at {tokens}"
            for tokens, share in left["share"].items()
        )
        print(f"{left['words']}; the whole cache is smaller {', '.join(whole)} tokens")
    if made.spec.planned:
        print(
            "kvfold's engine and vLLM store the planned bits; attached, transformers' cache stores"
            " 16-bit numbers"
        )


def folder_bytes(folder: Path) -> int:
    """Of a sidecar's files, as they are on the disk."""
    from kvfold.maps.sidecar import FILES

    return sum((folder / x).stat().st_size for x in FILES if (folder / x).exists())


def in_bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
