"""kvfold compress: makes maps of a model's keys and values, or a folded checkpoint."""

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    NewDirectory,
    Place,
    RecipeName,
    SizeFlags,
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
    size: SizeFlags = SIZE,
    windows: Flag = False,
    fold: Flag = False,
    fastest: Fastest = FASTEST,
    recover: int = 0,
    learn_scores: Flag = False,
    no_check: Flag = False,
    output: NewDirectory,
    calibration: Calibration = CALIBRATION,
    place: Place = PLACE,
) -> None:
    """Make MODEL's KV cache smaller: write maps for it, or with --fold a new checkpoint.

    Maps are a folder of a few MB, used together with the unchanged model by `generate`, `eval`,
    `serve`, `kvfold.attach` and vLLM. The model may be of any type, quantised, or have a LoRA.
    --fold works for the model families that docs/recipes.md lists. It is needed for the recipes of
    papers, and for the settings fastest, hybrid, recover and learn-scores.

    Parameters
    ----------
    windows
        Also make maps for layers with a sliding window, which are left out by default where other
        layers hold most of a long context.
    fold
        Write an ordinary checkpoint with the maps folded into its weights, instead of maps.
    recover
        Training steps in which the maps learn from the original model; best on a GPU.
    learn_scores
        Learn the scores of --evict learned.
    no_check
        Skip the check before saving: it measures what maps lose on text that calibration did not
        read, or compares a checkpoint's answer to a short prompt with the original's.
    """
    from kvfold import api
    from kvfold.hub.checkpoint import provenance_of

    common.quiet()
    recipe = recipe_of(goal, recipe)
    fastest.check(size, recipe, calibration.stats)
    api.check_fold(fold, windows, fastest=fastest.fastest)
    target = size.target
    begin = time.perf_counter()
    with stopped(output), renamed(max_tokens="calib_tokens"), common.progress() as progress:
        options: dict[str, Any] = {
            "calib": list(calibration.calib) or None,
            "device": place.device,
            "dtype": place.dtype,
            "output": output,
            "max_tokens": calibration.max_tokens,
            "recover": recover,
            "learn_scores": learn_scores,
            "check": not no_check,
            "seed": calibration.seed,
            "progress": progress,
            "say": say,
        }
        if fastest.fastest:
            assert target.budget is not None  # Fastest.check
            result = api.compress_fastest(
                model,
                target.budget,
                levels=target.levels,
                batch=fastest.batch,
                context=fastest.context,
                **options,
            )
        else:
            result = api.compress(
                model,
                recipe,
                fold=fold,
                keep=target.keep,
                factor=target.factor,
                bytes_per_token=target.bytes_per_token,
                budget=target.budget,
                tasks=list(size.tasks) or None,
                hybrid=target.hybrid,
                levels=target.levels,
                prefer=target.prefer,
                layouts=target.layouts,
                windows=windows,
                align=size.align,
                statistics=calibration.stats,
                **options,
            )
    seconds = time.perf_counter() - begin
    if fold:
        why = None if fastest.fastest else provenance_of(result).get("chosen")
        stored = api.stored_dtype(common.load_config(model), place.dtype)
        say_folded(result, stored or result.dtype, why)
        print(f"compressed in {seconds:.1f} seconds, saved to {output}")
    else:
        say_maps(result)
        disk = in_bytes(folder_bytes(output))
        print(f"made in {seconds:.1f} seconds, saved to {output} ({disk})")
        name = shlex.quote(str(output))
        print(f"use them: kvfold generate {name} --prompt TEXT, kvfold serve {name},")
        print(f'or in Python: kvfold.attach(model, "{output}")')


def recipe_of(goal: Goal, recipe: str | None) -> str | None:
    """The recipe that is named, or the one for a goal; None for the default, which is for
    speed."""
    if goal is None:
        return recipe
    if recipe is not None:
        raise SettingError(
            f"`goal={goal}` chooses a recipe, and so does `recipe={recipe}`: leave one out"
        )
    return GOALS[goal]


def say(line: str) -> None:
    """Print a line to stderr, with settings as flags."""
    print(line.replace("`max_tokens`", "--calib-tokens"), file=sys.stderr, flush=True)


@contextmanager
def stopped(output: Path) -> Iterator[None]:
    """Context manager: if the work ends early, say where its calibration is saved."""
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
    """Print what a folded model stores, why its recipe was chosen, and which kernels serve it.

    stored: dtype of the saved weights. why: None if the recipe was named.
    """
    from kvfold.compression.planning.step_time import reconstruction_cost
    from kvfold.hub.card import facts
    from kvfold.hub.checkpoint import provenance_of, spec_of
    from kvfold.models.kernels import kernels_of, one_pass_summary

    provenance, spec = provenance_of(model), spec_of(model)
    assert spec is not None
    name, config = provenance["recipe"]["name"], model.config
    if note := reconstruction_cost(name, config, spec):
        print(note)
    if why is not None:
        print(f"recipe {name}: {why}")
    print(f"{name}: " + "\n".join(facts(spec, provenance)))
    print(f"kernels on a GPU: {kernels_of(config, spec, stored)}")
    if provenance["prefer"] == "speed":
        print(f"in one pass on a Hopper GPU: {one_pass_summary(config, spec)}")


def say_maps(maps: "Sidecar") -> None:
    """Print what maps store, and which layers have none."""
    from kvfold.hub.card import facts
    from kvfold.layout.pages import cache_layout

    provenance = dict(maps.provenance)
    if why := provenance.get("chosen"):
        print(f"recipe {provenance['recipe']['name']}: {why}")
    print(f"maps of {len(maps.maps)} layers: " + "\n".join(facts(maps.spec, provenance)))
    if left := provenance.get("left"):
        fraction = cache_layout(maps.spec).kept_fraction
        whole = (
            f"{1 / (share + (1 - share) * fraction):.2f}x smaller at {tokens} tokens"
            for tokens, share in left["share"].items()
        )
        print(f"{left['words']}; the cache of all layers together is {', '.join(whole)}")
    if maps.spec.planned:
        print(
            "these sizes are with kvfold's engine and vLLM, which store the planned bits;"
            " transformers' cache (kvfold.attach) stores 16-bit numbers"
        )


def folder_bytes(folder: Path) -> int:
    """Bytes on disk of the files of maps."""
    from kvfold.maps.sidecar import FILES

    return sum((folder / x).stat().st_size for x in FILES if (folder / x).exists())


def in_bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
