"""compress: from a model and a recipe to a folded model, in one call."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold import recipes
from kvfold.artifact import mark, spec_of
from kvfold.compression import build, pipeline
from kvfold.compression.calibrate import artifact_key, calibrate
from kvfold.compression.recover import BATCH, recover
from kvfold.compression.statistics import Statistics
from kvfold.config import DEFAULT_KEEP, Recipe
from kvfold.files import new_directory
from kvfold.loading import load, load_tokenizer
from kvfold.models.adapter import Family
from kvfold.models.copies import shared_copy
from kvfold.models.families import family_of
from kvfold.spec import CacheSpec
from kvfold.text import documents, encode, packaged, read_texts

Progress = Callable[[str, int, int], None]  # what is being done, done, total

CALIBRATION_TOKENS = 32768
CALIBRATION_WINDOW = 1024
MIN_WINDOWS = 4


def compress(
    model: Any,
    recipe: str | Recipe = "small",
    *,
    keep: float | None = None,
    factor: float | None = None,
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
    folded in place. recipe: a name from `kvfold.recipes` or a `Recipe`. keep: in (0, 1], 0.5 if
    neither it nor `factor` is given. factor: dimensions and bits planned together (see
    `Job.plan_factor`); the planned bits take effect on the paged cache. align: ranks are multiples
    of it (default 16, 8 for head_dim <= 64). calib: text files instead of the packaged
    text. tokenizer: needed with a loaded model. statistics: an artifact file, reused if it exists
    and fits, written if not. recover: steps in which the maps learn from the original on the
    calibration text (see `compression.recover`; for a GPU). output: a directory to save to; written
    whole or not at all.

    Returns the folded model. Raises ValueError for settings or inputs that cannot work.
    """
    recipe = recipes.get(recipe) if isinstance(recipe, str) else recipe
    _check_size(recipe, keep, factor)
    check_recover(recover)
    if output is not None:
        check_output(Path(output))
    name = model if isinstance(model, str | Path) else None
    if name is not None:
        tokenizer = tokenizer or load_tokenizer(str(name))
        model = load(str(name))
    job = Job(model, recipe, tokenizer, calib=calib, max_tokens=max_tokens, seed=seed)
    job.prepare(statistics, progress)
    if factor is not None:
        spec = job.plan_factor(factor, align)
    else:
        keep = DEFAULT_KEEP if keep is None else keep
        spec = job.plan(keep, align)
    source = str(name or model.config.name_or_path)
    asked = {"model": source, "keep": keep, "factor": factor}
    job.fold(spec, asked, recover=recover, progress=progress)
    if output is not None:
        save(model, tokenizer, Path(output))
    return model


class Job:
    """One model and recipe: statistics and bases are made once, any number of budgets planned."""

    def __init__(
        self,
        model: Any,
        recipe: Recipe,
        tokenizer: Any,
        *,
        calib: list[str | Path] | None = None,
        max_tokens: int = CALIBRATION_TOKENS,
        seed: int = 0,
    ) -> None:
        if spec_of(model) is not None:
            raise ValueError("this model is compressed already; start from the original checkpoint")
        self.model, self.recipe, self.tokenizer = model, recipe, tokenizer
        self.family: type[Family] = family_of(model.config)
        self.geometry = self.family.geometry(model.config)
        self.calib, self.max_tokens, self.seed = calib, max_tokens, seed
        build.check(recipe, self.geometry, model.config.model_type)
        pipeline.check_weights(model)

    def prepare(
        self,
        statistics: Path | str | Statistics | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Calibrate (or reuse statistics) and build every layer's bases."""
        self.statistics = self._statistics(statistics, progress)
        report = _stage(progress, "bases")
        self.layers = pipeline.build_prospects(
            self.model, self.family, self.recipe, self.statistics, report
        )
        conditions = [0.0] * self.geometry.num_layers
        if self.recipe.ranks == "condition":
            conditions = pipeline.log_conditions(self.model, self.family, self.geometry)
        self.candidates = pipeline.candidates(self.recipe, self.layers, self.statistics, conditions)

    def plan(self, keep: float, align: int | None = None) -> CacheSpec:
        """The ranks that spend `keep` of the cache."""
        pipeline.check_keep(keep)
        align = self._align(align)
        return pipeline.plan(self.recipe, self.geometry, self.layers, self.candidates, keep, align)

    def plan_factor(self, factor: float, align: int | None = None) -> CacheSpec:
        """Ranks and bits that make a token `factor` times smaller than at 16 bits.

        Needs a basis that predicts losses: one of `fast`, `swift`, `lean` and
        `small`.
        """
        check_factor(self.recipe, factor)
        align = self._align(align)
        bits = int(16 * self.geometry.full_numbers / factor)
        return pipeline.plan_bits(
            self.recipe, self.geometry, self.layers, self.candidates, bits, align
        )

    def fold(
        self,
        spec: CacheSpec,
        provenance: dict[str, Any],
        *,
        recover: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """Fold the model in place; `recover` steps of distillation follow."""
        windows = self._recovery_windows(recover)  # what can fail, fails before the model changes
        teacher = None if windows is None else shared_copy(self.model)
        pipeline.fold(self.model, self.family, spec, self.layers)
        measured = {"recipe": asdict(self.recipe), "statistics": self.statistics.key}
        provenance = {**provenance, **measured}
        mark(self.model, spec, provenance)
        if windows is not None:
            learnt = self._recover(spec, teacher, windows, recover, progress)
            mark(self.model, spec, {**provenance, "recovery": learnt})

    def _recovery_windows(self, steps: int) -> Tensor | None:
        """As much text as `steps` steps read; None for none."""
        check_recover(steps)
        if steps == 0:
            return None
        most = steps * BATCH * _window_length(self.model.config)
        return calibration_windows(self.tokenizer, self.model.config, self.calib, most)

    def _recover(
        self,
        spec: CacheSpec,
        teacher: Any,
        windows: Tensor,
        steps: int,
        progress: Progress | None,
    ) -> dict[str, Any]:
        """Train the folded maps; what was done, and the loss before and after."""
        before, after = recover(
            self.model,
            teacher,
            self.family,
            spec,
            windows,
            steps,
            seed=self.seed,
            progress=_stage(progress, "recover"),
        )
        return {"steps": steps, "tokens": windows.numel(), "before": before, "after": after}

    def _align(self, align: int | None) -> int:
        align = pipeline.default_align(self.geometry) if align is None else align
        if align < 1:
            raise ValueError(f"align must be at least 1, got {align}")
        return align

    def _statistics(
        self, given: Path | str | Statistics | None, progress: Progress | None
    ) -> Statistics:
        wanted = build.needs(self.recipe)
        if isinstance(given, Statistics):
            return given
        if not wanted:
            return Statistics({})
        rows = calibration_windows(self.tokenizer, self.model.config, self.calib, self.max_tokens)
        path = Path(given) if given is not None else None
        if path is not None and path.exists():
            key = artifact_key(self.model, rows, self.recipe.centroids)
            found = Statistics.load(path, key)
            if found.has(wanted):
                return found.to(self.model.device)
        report = _stage(progress, "calibrate")
        made = calibrate(
            self.model,
            self.family,
            rows,
            wanted,
            centroids=self.recipe.centroids,
            seed=self.seed,
            progress=report,
        )
        if path is not None:
            made.save(path)
        return made


def check_factor(recipe: Recipe, factor: float) -> None:
    """Raises ValueError for a factor out of range or a recipe that cannot plan bits."""
    if recipe.basis not in ("post", "latent"):
        raise ValueError(
            f"recipe {recipe.name!r} predicts no losses to weigh bits by; use fast, swift, lean or"
            " small"
        )
    if not 1 <= factor < 1000:
        raise ValueError(f"factor must be at least 1 and below 1000, got {factor:g}")


def check_recover(steps: int) -> None:
    """Raises ValueError for a number of steps that cannot be done."""
    if steps < 0:
        raise ValueError(f"recover must be at least 0 steps, got {steps}; 0 leaves the maps alone")


def _check_size(recipe: Recipe, keep: float | None, factor: float | None) -> None:
    if keep is not None and factor is not None:
        raise ValueError(
            f"keep={keep:g} and factor={factor:g} exclude each other: each decides the size alone"
        )
    if factor is None:
        pipeline.check_keep(DEFAULT_KEEP if keep is None else keep)
    if factor is not None:
        check_factor(recipe, factor)


def calibration_windows(
    tokenizer: Any, config: Any, calib: list[str | Path] | None, max_tokens: int
) -> Tensor:
    """Token windows [n, T].

    Documents follow each other with BOS between them. Where they hold more than `max_tokens`,
    every document gives its beginning, long ones no more than an equal share of what is left.
    """
    if tokenizer is None:
        raise ValueError("a tokenizer is needed to read calibration text; pass tokenizer=")
    texts = documents(read_texts(calib) if calib else packaged("calibration.txt"))
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    encoded = [bos + encode(tokenizer, text) for text in texts]
    shares = _shares([len(ids) for ids in encoded], max_tokens)
    pairs = zip(encoded, shares, strict=True)
    stream = [token for ids, share in pairs for token in ids[:share]]
    length = _window_length(config)
    count = len(stream) // length
    if count < MIN_WINDOWS:
        raise ValueError(
            f"the calibration text has {len(stream)} tokens, at least {MIN_WINDOWS * length} are "
            "needed: give more text with --calib, or leave it out for the packaged text"
        )
    rows = torch.tensor(stream[: count * length]).view(count, length)
    rows[:, : len(bos)] = torch.tensor(bos, dtype=rows.dtype)
    return rows


def _window_length(config: Any) -> int:
    return min(CALIBRATION_WINDOW, config.max_position_embeddings)


def _shares(sizes: list[int], total: int) -> list[int]:
    """Split `total` evenly over documents of `sizes`; what short ones leave goes to longer ones."""
    shares, left = [0] * len(sizes), total
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    for position, i in enumerate(order):
        shares[i] = min(sizes[i], left // (len(order) - position))
        left -= shares[i]
    return shares


def check_output(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"output {path} exists and is not an empty directory; name another one")


def save(model: Any, tokenizer: Any, path: Path) -> None:
    """Save a checkpoint whole or not at all."""
    with new_directory(path) as scratch:
        model.save_pretrained(scratch)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)


def _stage(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda done, total: progress(name, done, total)
