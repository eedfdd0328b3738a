"""kvfold compress: fold a model and save it."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.commands import common
from kvfold.commands.options import CALIBRATION, PLACE, Calibration, Model, Place
from kvfold.search import parse_budget

if TYPE_CHECKING:
    from kvfold.api import Job
    from kvfold.spec import CacheSpec

DEFAULT_KEEP = 0.5


@dataclass(frozen=True)
class Target:
    """A fraction to keep, or a perplexity ratio that decides it."""

    keep: float
    limit: float | None = None


def compress(
    model: Model,
    /,
    *,
    recipe: str = "small",
    keep: float | None = None,
    budget: str | None = None,
    align: int | None = None,
    output: Path,
    calibration: Calibration = CALIBRATION,
    place: Place = PLACE,
) -> None:
    """Shrink MODEL's cache and save the result as an ordinary checkpoint.

    Parameters
    ----------
    recipe
        zack, zdc, lorc, palu-m, palu-g, palu-j, fast, lean or small.
    keep
        Share of the cache to keep, in (0, 1]; 0.5 if no budget is given.
    budget
        Instead of --keep: "ppl<=1.01" finds the smallest cache within 1 % of the perplexity.
    align
        Ranks are multiples of it; default 16, or 8 where heads are narrow.
    output
        New directory, written whole or not at all.
    """
    target = parse_target(keep, budget)
    from kvfold.api import check_output
    from kvfold.compress.pipeline import check_keep

    check_keep(target.keep)
    check_output(output)
    job = common.job(model, recipe, calibration, place)
    begin = time.perf_counter()
    with common.progress() as progress:
        job.prepare(calibration.stats, progress)
        found, ratio = find(job, target, align, progress)
    spec = job.plan(found, align)
    job.fold(spec, {"model": model, "keep": found, "budget": budget, "align": align})
    seconds = time.perf_counter() - begin
    store(job.model, job.tokenizer, model, place, output)
    print(summary(job, spec, found, seconds))
    if ratio is not None:
        print(f"perplexity ratio {ratio:.4f} on held-out text, {target.limit:g} allowed")
    print(f"saved to {output}")


def parse_target(keep: float | None, budget: str | None) -> Target:
    if budget is None:
        return Target(DEFAULT_KEEP if keep is None else keep)
    if keep is not None:
        raise ValueError(
            "--keep and --budget exclude each other: with a budget, keep is the result"
        )
    return Target(1.0, parse_budget(budget))


def find(
    job: "Job", target: Target, align: int | None, progress: common.Progress | None
) -> tuple[float, float | None]:
    """(keep, perplexity ratio); the ratio only where a budget asked for it."""
    if target.limit is None:
        return target.keep, None
    from kvfold.evaluate.budget import search_keep

    return search_keep(job, target.limit, align=align, progress=progress)


def store(model: Any, tokenizer: Any, name: str, place: Place, output: Path) -> None:
    """Save, in the original checkpoint's dtype unless another one was asked for."""
    from transformers import AutoConfig

    from kvfold.api import save
    from kvfold.loading import resolve

    wanted = AutoConfig.from_pretrained(resolve(name)).dtype
    if place.dtype == "auto" and wanted is not None:
        model.to(wanted)
    save(model, tokenizer, output)


def summary(job: "Job", spec: "CacheSpec", keep: float, seconds: float) -> str:
    full = 2 * spec.geometry.full_numbers
    return (
        f"{job.recipe.name}: {spec.kept_fraction:.4f} of the cache kept ({keep:.4g} asked for)\n"
        f"{full} -> {spec.bytes_per_token()} bytes per token at 16 bits, "
        f"{1 / spec.kept_fraction:.2f} times smaller, in {seconds:.1f} seconds"
    )
