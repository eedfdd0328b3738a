"""kvfold compress: fold a model and save it."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cli import common
from kvfold.cli.options import CALIBRATION, PLACE, Calibration, Model, Place
from kvfold.config import DEFAULT_KEEP
from kvfold.search import parse_budget

if TYPE_CHECKING:
    from kvfold.api import Job
    from kvfold.spec import CacheSpec


@dataclass(frozen=True)
class Target:
    """A fraction to keep, a perplexity ratio that decides it, or a factor for dims and bits."""

    keep: float
    limit: float | None = None
    factor: float | None = None


def compress(
    model: Model,
    /,
    *,
    recipe: str = "small",
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
    recipe
        zack, zdc, lorc, palu-m, palu-g, palu-j, fast, swift, lean or small.
    keep
        Share of the cache to keep, in (0, 1]; 0.5 if no budget is given.
    budget
        Instead of --keep: "ppl<=1.01" finds the smallest cache within 1 % of the perplexity.
    factor
        Instead of --keep: a cache so many times smaller, in dimensions and bits together, for the
        least predicted loss. Recipes fast, swift, lean and small; runs on the paged cache.
    bytes_per_token
        The same, as bytes a token.
    align
        Ranks are multiples of it; default 16, or 8 where heads are narrow.
    recover
        Steps in which the maps learn from the original on the calibration text; for a GPU.
    output
        New directory, written whole or not at all.
    """
    target = parse_target(keep, budget, factor, bytes_per_token)
    from kvfold.api import check_output, check_recover
    from kvfold.compression.pipeline import check_keep

    check_keep(target.keep)
    check_recover(recover)
    check_output(output)
    job = common.job(model, recipe, calibration, place)
    target = with_factor(target, job, bytes_per_token)
    begin = time.perf_counter()
    with common.progress() as progress:
        job.prepare(calibration.stats, progress)
        spec, found, ratio = find(job, target, align, progress)
        asked = {"budget": budget, "factor": factor, "bytes_per_token": bytes_per_token}
        asked = {"model": model, "keep": found, "align": align, **asked}
        job.fold(spec, asked, recover=recover, progress=progress)
    seconds = time.perf_counter() - begin
    store(job.model, job.tokenizer, model, place, output)
    print(summary(job, spec, seconds))
    if ratio is not None:
        print(f"perplexity ratio {ratio:.4f} on held-out text, {target.limit:g} allowed")
    print(f"saved to {output}")


def parse_target(
    keep: float | None,
    budget: str | None,
    factor: float | None = None,
    bytes_per_token: float | None = None,
) -> Target:
    given = {
        "--keep": keep,
        "--budget": budget,
        "--factor": factor,
        "--bytes-per-token": bytes_per_token,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} exclude each other: each decides the size alone")
    if bytes_per_token is not None and bytes_per_token <= 0:
        raise ValueError(f"--bytes-per-token must be above 0, got {bytes_per_token:g}")
    if budget is not None:
        return Target(1.0, parse_budget(budget))
    return Target(DEFAULT_KEEP if keep is None else keep, factor=factor)


def with_factor(target: Target, job: "Job", bytes_per_token: float | None) -> Target:
    """The target with bytes a token as a factor, checked before anything is calibrated."""
    from kvfold.api import check_factor

    full = 2 * job.geometry.full_numbers
    if bytes_per_token is not None:
        if not bytes_per_token <= full:
            raise ValueError(
                f"--bytes-per-token must be at most {full}, what the uncompressed cache takes at"
                f" 16 bits; got {bytes_per_token:g}"
            )
        target = replace(target, factor=full / bytes_per_token)
    if target.factor is not None:
        check_factor(job.recipe, target.factor)
    return target


def find(
    job: "Job", target: Target, align: int | None, progress: common.Progress | None
) -> tuple["CacheSpec", float | None, float | None]:
    """The spec, the share of the numbers it was asked for, and the perplexity ratio that decided
    it."""
    if target.factor is not None:
        return job.plan_factor(target.factor, align), None, None
    if target.limit is None:
        return job.plan(target.keep, align), target.keep, None
    from kvfold.evaluation.budget import search_keep

    keep, ratio = search_keep(job, target.limit, align=align, progress=progress)
    return job.plan(keep, align), keep, ratio


def store(model: Any, tokenizer: Any, name: str, place: Place, output: Path) -> None:
    """Save, in the original checkpoint's dtype unless another one was asked for."""
    from kvfold.api import save
    from kvfold.loading import load_config

    wanted = load_config(name).dtype
    if place.dtype == "auto" and wanted is not None:
        model.to(wanted)
    save(model, tokenizer, output)


def summary(job: "Job", spec: "CacheSpec", seconds: float) -> str:
    from kvfold.artifact import provenance_of

    full = 2 * spec.geometry.full_numbers
    lines = [
        f"{job.recipe.name}: {spec.kept_fraction:.4f} of the numbers kept",
        f"{full} -> {spec.bytes_per_token()} bytes per token at 16 bits, "
        f"{1 / spec.kept_fraction:.2f} times smaller, in {seconds:.1f} seconds",
    ]
    if recovery := provenance_of(job.model).get("recovery"):
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
