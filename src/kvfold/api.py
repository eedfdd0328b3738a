"""`kvfold.compress`: makes projections of a model's keys and values, or folds them into it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvfold import recipes
from kvfold.calibration.documents import is_self
from kvfold.calibration.saved_pass import SavedPass, saved_beside
from kvfold.calibration.statistics import Statistics
from kvfold.calibration.statistics.artifact import check_place
from kvfold.calibration.text import check_tokens
from kvfold.compression.compressor import Compressor, Prepared, check_config
from kvfold.compression.planning.default import choose_for_maps, choose_recipe
from kvfold.compression.planning.step_time import load_of
from kvfold.compression.planning.target import Target
from kvfold.compression.training.recover import check_steps
from kvfold.compression.work import CheckWork, check_disk, work_of
from kvfold.config import Prefer, Ratios, Recipe, check_types
from kvfold.evaluation import answers, maps, scores
from kvfold.evaluation.accuracy import check_count, search_accuracy
from kvfold.evaluation.answers import ReferenceAnswer, check_answer
from kvfold.evaluation.budget import search_keep
from kvfold.evaluation.comparison import compressors_of
from kvfold.evaluation.fastest import TRIED, search_fastest
from kvfold.evaluation.importance import find_leaders
from kvfold.evaluation.ratios import search_ratios
from kvfold.evaluation.tasks import read_tasks
from kvfold.evaluation.tasks.base import Task
from kvfold.hub import card
from kvfold.hub.checkpoint import provenance_of, spec_of
from kvfold.hub.loading import check_loaded, load, load_config, load_tokenizer
from kvfold.maps.compress import make_maps, recipe_of
from kvfold.maps.layers import unwrapped
from kvfold.maps.sidecar import Sidecar
from kvfold.models.families import family_of, has_family
from kvfold.models.foldable import check_weights
from kvfold.models.weights import rounded, write
from kvfold.utils.errors import SettingError
from kvfold.utils.files import check_makeable, new_directory, writing
from kvfold.utils.progress import Progress, counter
from kvfold.utils.search import Budget, parse_budget, parse_ratio
from kvfold.utils.text import read_texts
from kvfold.utils.tokens import check_tokenizer


def compress(
    model: Any,
    recipe: str | Recipe | None = None,
    *,
    fold: bool = False,
    keep: float | None = None,
    factor: float | None = None,
    bytes_per_token: float | None = None,
    levels: tuple[int, ...] | None = None,
    prefer: Prefer | None = None,
    layouts: int | None = None,
    windows: bool = False,
    budget: str | None = None,
    tasks: list[str | Path] | None = None,
    hybrid: Ratios | str | None = None,
    align: int | None = None,
    calib: list[str | Path] | None = None,
    tokenizer: Any = None,
    device: str | None = None,
    dtype: str | torch.dtype = "auto",
    statistics: Path | str | Statistics | None = None,
    output: Path | str | None = None,
    max_tokens: int | None = None,
    recover: int = 0,
    learn_scores: bool = False,
    check: bool = True,
    seed: int = 0,
    progress: Progress | None = None,
    say: Callable[[str], object] | None = None,
) -> Any:
    """Compress a model's KV cache to a size: calibrate, plan, and return projections for it.

    Returns maps (projections of keys and values) as a `Sidecar`, for `kvfold.attach(model, maps)`
    and `kvfold.LLM(model, maps=maps)`; the model stays as it is. The model may be of any type whose
    layers call transformers' attention interface. With fold=True the maps are folded into the
    weights in place, and the model is returned. That needs a model of the families in
    `models.families`, and serves all recipes.

    What to compress:

    - model: a name (directory, GGUF file, hub id, `reference:gqa`) or a loaded causal LM.
    - tokenizer: needed with a loaded model. device, dtype: as in `load`, for a named model.
    - recipe: a name from `kvfold.recipes`, a `Recipe`, or None for the one that `planning.default`
      chooses. Maps are made by swift, fast, lean and small; lean and small store keys before RoPE,
      for which RoPE must rotate pairs of numbers.
    - windows: also make maps for layers with a sliding window where other layers hold most of a
      long context. Folding always includes them.

    The size: at most one of these; none is factor=4, or keep=0.5 for recipes that plan no bits:

    - keep: share of the numbers that stay, in (0, 1].
    - factor: how many times smaller, in dimensions and bits planned together (see
      `Prepared.plan_factor`). The planned bits take effect in kvfold's paged cache and in vLLM.
    - bytes_per_token: the same in bytes, of the layers that get maps.
    - budget: "ppl<=1.01", the smallest keep whose perplexity is within that ratio of the
      original's, on calibration text that calibration does not read; or "accuracy>=0.99", the
      smallest keep with that share of the original's accuracy (ZACK §6.3) on the questions of the
      files `tasks`, which docs/tasks.md describes.
    - hybrid (fold=True): two ranks, the low one for unimportant tokens (ZDC §5.2, see `Ratios`), or
      "ppl<=1.1": the smallest ratios tried that are within that ratio (Q_d <= 0.1). The recipe is
      zdc unless named.

    How the size is planned:

    - levels: bits that planned numbers may have, of 8, 6, 4, 3, 2, 1. Default (8, 4, 2), which
      kernels read.
    - prefer: `speed` plans entries that a Hopper GPU reads in one pass (swift and lean); `size`
      plans the least loss at a size, in all levels; `balanced` is between (see
      `planning.preference`). None: balanced, or without a recipe speed where a GPU can use it.
    - layouts: most bit-width layouts (how many numbers of a key or value have 8, 4, 2 bits) that
      the model's layers have; each takes kernels of its own. None: 4 with `prefer="speed"`, else as
      many as the plan likes.
    - align: ranks are multiples of it where no bits are planned (default 16, or 8 for head_dim <=
      64).

    Calibration:

    - calib: text files to read instead of the packaged text, or ["self"] for text that the model
      writes itself. max_tokens: tokens of it, which decide the time; None: 32768 where the model is
      on a GPU, 12288 on a CPU. seed: of what is sampled.
    - statistics: an artifact file, reused if it exists and fits, written if not.

    Training, with fold=True:

    - recover: steps in which the maps learn from the original on the calibration text (see
      `training.recover`; for a GPU).
    - learn_scores: also learn the scores of `evict="learned"` (see `evaluation.scores`).

    The result:

    - output: a directory to save to, written complete or not at all, with weights in the
      checkpoint's own dtype unless `dtype` names another. The calibration pass is saved beside it
      as it runs, and the same call continues a stopped one; the file is removed at the end.
    - check: before saving, measure what maps lose (see `evaluation.maps`), or compare the folded
      model's answer to a short prompt with the original's (see `evaluation.answers`).
    - say: is called with a line on what the work will take before it starts, and on where it
      continues. progress: is called as work proceeds.

    Raises ValueError for settings or inputs that cannot work, and for a disk without space for the
    output. The model is then unchanged, unless recovery diverged or the check of a folded model
    failed.
    """
    check_types(compress, locals())
    target = Target(
        keep=keep,
        factor=factor,
        bytes_per_token=bytes_per_token,
        budget=budget,
        hybrid=hybrid,
        levels=levels,
        prefer=prefer,
        layouts=layouts,
    )
    settings = _Settings(
        fold=fold,
        target=target,
        windows=windows,
        align=align,
        text={"calib": calib, "max_tokens": max_tokens, "seed": seed},
        statistics=statistics,
        output=output,
        recover=recover,
        learn_scores=learn_scores,
        check=check,
        progress=progress,
        say=say,
        tasks=read_questions(budget, tasks),
    )
    settings.verify()
    check_tokenizer(tokenizer)
    if not isinstance(model, str | Path):
        model = model if fold else unwrapped(model)
        check_loaded(model, device, dtype)
    with output_files(output, say) as files:
        source = _Source.of(model, tokenizer, dtype)
        chosen = _choose(recipe, source.config, settings)
        source = source.loaded(device, dtype, say)
        run = _fold if fold else _map
        return run(source, chosen, settings, files)


def compress_fastest(
    model: str,
    budget: str,
    *,
    output: Path,
    levels: tuple[int, ...] | None = None,
    batch: int | None = None,
    context: int | None = None,
    calib: list[str | Path] | None = None,
    device: str | None = None,
    dtype: str = "auto",
    max_tokens: int | None = None,
    recover: int = 0,
    learn_scores: bool = False,
    check: bool = True,
    seed: int = 0,
    progress: Progress | None = None,
    say: Callable[[str], object] | None = None,
    report: Callable[[str], None] = print,
) -> Any:
    """Fold a named model by the recipe and to the size within a budget whose decode step is
    predicted to be the fastest on a GPU, and return it.

    batch, context: sequences of that step and tokens of each; None: 64, and 8192 or the model's
    maximum. report: is called with a line for every candidate that is measured. Everything else as
    in `compress` with fold=True, which raises the same errors.
    """
    target, limit = Target(budget=budget, levels=levels), parse_ratio(budget)
    settings = _Settings(
        fold=True,
        target=target,
        windows=False,
        align=None,
        text={"calib": calib, "max_tokens": max_tokens, "seed": seed},
        statistics=None,
        output=output,
        recover=recover,
        learn_scores=learn_scores,
        check=check,
        progress=progress,
        say=say,
    )
    settings.verify()
    with output_files(output, say) as files:
        source = _Source.of(model, None, dtype)
        load = load_of(source.config, batch, context)
        for name in TRIED:
            check_config(source.config, recipes.get(name), max_tokens, target, None)
        source = source.loaded(device, dtype, say)
        compressors = compressors_of(
            source.model, source.tokenizer, list(TRIED), saved=files.saved, **settings.text
        )
        settings.announce(compressors[0], source.stored)
        answer = settings.reference_answer(source)
        best = search_fastest(compressors, limit, load, say=report, progress=progress)
        size = {"ratio": best.ratio, "align": None, "factor": best.factor, "prefer": best.prefer}
        provenance = {"model": model, **asdict(target), **size, "chosen": f"{best}, at {load}"}
        best.prepared.fold(best.spec, provenance, recover=recover, progress=progress)
        report(f"the fastest within the budget at {load}: {best}")
        finish(
            best.prepared.compressor,
            best.prepared.predicted_loss(best.spec),
            answer,
            learn_scores=learn_scores,
            folder=files.folder,
            output=output,
            stored=source.stored,
            progress=progress,
        )
    return source.model


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What `compress` is asked to do with a model. text: calib, max_tokens and seed; tasks: the
    questions of the files; the other fields are its arguments."""

    fold: bool
    target: Target
    windows: bool
    align: int | None
    text: dict[str, Any]
    statistics: Path | str | Statistics | None
    output: Path | str | None
    recover: int
    learn_scores: bool
    check: bool
    progress: Progress | None
    say: Callable[[str], object] | None
    tasks: Sequence[Task] = ()

    def verify(self) -> None:
        """Raises ValueError for settings and files that cannot work, whatever the model is."""
        self.target.check_align(self.align)
        check_steps(self.recover)
        check_fold(
            self.fold,
            self.windows,
            hybrid=self.target.hybrid,
            recover=self.recover,
            learn_scores=self.learn_scores,
        )
        check_files(self.text["calib"], self.statistics, self.output)

    def search(
        self, prepared: Prepared, budget: Budget, **options: Any
    ) -> tuple[float, dict[str, Any]]:
        """The smallest share to keep within a budget, and what it reaches, as provenance has it.
        options: of `search_keep`."""
        if budget.metric == "ppl":
            keep, ratio = search_keep(prepared, budget.limit, **options)
            return keep, {"ratio": ratio}
        keep, reached = search_accuracy(prepared, budget.limit, self.tasks, **options)
        return keep, {"accuracy": reached.record()}

    def announce(self, compressor: Compressor, stored: torch.dtype | None = None) -> None:
        """Say what the work will take. stored: as in `announce`."""
        announce(
            compressor,
            fold=self.fold,
            output=self.output,
            stored=stored,
            statistics=self.statistics,
            check=self.check_work(compressor.model),
            say=self.say,
        )

    def check_work(self, model: Any) -> CheckWork:
        """What the check of the result computes."""
        if not self.check or self.output is None:
            return CheckWork()
        return answers.check_work(model) if self.fold else maps.check_work(model)

    def reference_answer(self, source: "_Source") -> ReferenceAnswer | None:
        """The original model's answer, which a folded one is compared with; None without a
        check."""
        if not self.check or self.output is None:
            return None
        model = source.model
        step = counter(self.progress, "original answer", answers.num_tokens(model))
        return ReferenceAnswer.of(model, source.tokenizer, source.stored, step=step)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The model to compress, and where it is from. model: None until it is loaded by its name.
    stored: dtype to save weights in; None: the dtype that they have."""

    name: str | None
    config: Any
    model: Any
    tokenizer: Any
    stored: torch.dtype | None

    @classmethod
    def of(cls, model: Any, tokenizer: Any, dtype: str | torch.dtype) -> "_Source":
        """From the arguments of `compress`; of a model that is named, its config alone."""
        if not isinstance(model, str | Path):
            return cls(
                name=None, config=model.config, model=model, tokenizer=tokenizer, stored=None
            )
        config = load_config(str(model))
        stored = stored_dtype(config, dtype)
        return cls(name=str(model), config=config, model=None, tokenizer=tokenizer, stored=stored)

    def loaded(
        self,
        device: str | None,
        dtype: str | torch.dtype,
        say: Callable[[str], object] | None,
    ) -> "_Source":
        """With the model and the tokenizer that are named."""
        if self.name is None:
            return self
        tokenizer = self.tokenizer or load_tokenizer(self.name)
        if say is not None:
            say(f"loading {self.name}")
        model = load(self.name, dtype=dtype, device=device)
        return replace(self, model=model, tokenizer=tokenizer)

    @property
    def words(self) -> str:
        """What provenance calls the original model."""
        return self.name or str(self.config.name_or_path) or type(self.model).__name__


@dataclass(frozen=True, kw_only=True)
class _ChosenRecipe:
    """The recipe, the size, and why this recipe, where none was named. With maps beside the weights
    these are the arguments of `compress`: `make_maps` decides, once it knows the layers."""

    recipe: str | Recipe | None
    target: Target
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class OutputFiles:
    """Where a compression writes while it works. folder: becomes the output when it ends without an
    error; saved: the calibration pass, so that a stopped one goes on. None without an output."""

    folder: Path | None = None
    saved: SavedPass | None = None


@contextmanager
def output_files(
    output: Path | str | None, say: Callable[[str], object] | None = None
) -> Iterator[OutputFiles]:
    """The files of a compression that writes to `output`, complete or not at all. Raises ValueError
    for an output that is in use."""
    if output is None:
        yield OutputFiles()
        return
    path = Path(output)
    with saved_beside(path, say) as saved, new_directory(path) as folder:
        yield OutputFiles(folder=folder, saved=saved)


def _choose(recipe: str | Recipe | None, config: Any, settings: _Settings) -> _ChosenRecipe:
    """The recipe and size for a model of this config. Raises ValueError where they do not fit the
    model, before it is loaded."""
    target, max_tokens = settings.target, settings.text["max_tokens"]
    if not settings.fold:
        check_mappable(config, recipe, max_tokens, target, settings.align)
        return _ChosenRecipe(recipe=recipe, target=target)
    chosen_recipe, target, reason = choose_recipe(recipe, config, target)
    check_config(config, chosen_recipe, max_tokens, target, settings.align)
    if settings.learn_scores:
        scores.check_learnable(config, target)
    return _ChosenRecipe(recipe=chosen_recipe, target=target, reason=reason)


def _map(
    source: _Source, chosen: _ChosenRecipe, settings: _Settings, files: OutputFiles
) -> Sidecar:
    """Calibrate, plan, and save maps beside the weights."""
    compressor, sidecar = make_maps(
        source.model,
        source.tokenizer,
        chosen.recipe,
        chosen.target,
        source=source.words,
        search=settings.search,
        windows=settings.windows,
        align=settings.align,
        statistics=settings.statistics,
        progress=settings.progress,
        begun=settings.announce,
        saved=files.saved,
        **settings.text,
    )
    if settings.check and settings.output is not None:
        sidecar = maps.measured(compressor, sidecar, settings.progress)
    if files.folder is not None and settings.output is not None:
        sidecar.write(files.folder, Path(settings.output))
    return sidecar


def _fold(source: _Source, chosen: _ChosenRecipe, settings: _Settings, files: OutputFiles) -> Any:
    """Calibrate, plan, fold the model in place, and save it."""
    model, tokenizer, recipe = source.model, source.tokenizer, chosen.recipe
    assert isinstance(recipe, Recipe)
    check_weights(model, family_of(source.config))
    compressor = Compressor(model, recipe, tokenizer, saved=files.saved, **settings.text)
    settings.announce(compressor, source.stored)
    answer = settings.reference_answer(source)
    predicted = _fold_to_size(compressor, chosen, settings, source.words)
    finish(
        compressor,
        predicted,
        answer,
        learn_scores=settings.learn_scores,
        folder=files.folder,
        output=settings.output,
        stored=source.stored,
        progress=settings.progress,
    )
    return model


def _fold_to_size(
    compressor: Compressor, chosen: _ChosenRecipe, settings: _Settings, source: str
) -> float | None:
    """Fold a compressor's model in place to a size. Returns the predicted increase in cross-entropy
    (nats/token), None where nothing predicts it."""
    limit = chosen.target.hybrid if isinstance(chosen.target.hybrid, str) else chosen.target.budget
    prepared = compressor.prepare(settings.statistics, settings.progress)
    target, reached = _searched(prepared, chosen.target, settings)
    spec = prepared.plan_target(target, settings.align)
    size = asdict(target) | {"align": settings.align, "budget": limit}
    provenance = {"model": source, **size, "ratio": None, **reached}
    if chosen.reason is not None:
        provenance["chosen"] = chosen.reason
    prepared.fold(spec, provenance, recover=settings.recover, progress=settings.progress)
    if spec.hybrid is not None:
        spec = find_leaders(compressor.model, compressor.windows())
    return prepared.predicted_loss(spec)


def _searched(
    prepared: Prepared, target: Target, settings: _Settings
) -> tuple[Target, dict[str, Any]]:
    """A size found by search for a target that is a loss, and what it reaches, as provenance has
    it. Other targets as they are."""
    options: dict[str, Any] = {"align": settings.align, "progress": settings.progress}
    if target.limit is not None:
        keep, reached = settings.search(prepared, target.limit, **options)
        return replace(target, keep=keep, budget=None), reached
    if isinstance(target.hybrid, str):
        hybrid, ratio = search_ratios(prepared, parse_ratio(target.hybrid), **options)
        return replace(target, hybrid=hybrid), {"ratio": ratio}
    return target, {}


def announce(
    compressor: Compressor,
    *,
    fold: bool,
    output: Path | str | None,
    stored: torch.dtype | None = None,
    statistics: Path | str | Statistics | None = None,
    check: CheckWork | None = None,
    say: Callable[[str], object] | None = None,
) -> None:
    """Say what the work will take, if statistics are still to be measured.

    stored: dtype that weights are saved in, as in `fill`. check: of the result. Raises SettingError
    where the output's disk has too little space.
    """
    if output is None and say is None:
        return
    work = work_of(compressor, fold, stored, check)
    if output is not None:
        check_disk(Path(output), work)
    measured_before = isinstance(statistics, Statistics) or (
        statistics is not None and Path(statistics).exists()
    )
    if say is not None and compressor.needs and not measured_before:
        say(work.words)


def finish(
    compressor: Compressor,
    predicted: float | None,
    answer: ReferenceAnswer | None,
    *,
    learn_scores: bool = False,
    folder: Path | None = None,
    output: Path | str | None = None,
    stored: torch.dtype | None = None,
    progress: Progress | None = None,
) -> None:
    """Finish a folded model: learn scores, check its answer if one is given, and save it.

    predicted: increase in cross-entropy that the plan predicts (nats/token). folder: is filled, and
    becomes `output`. stored: dtype of the saved weights.
    """
    model, tokenizer = compressor.model, compressor.tokenizer
    if learn_scores:
        scores.learn_scores(model, tokenizer, scores.readings(compressor), progress)
    if answer is not None:
        check_answer(model, answer, predicted, progress)
    if folder is not None and output is not None:
        with writing(Path(output)):
            fill(folder, model, tokenizer, stored)


def check_fold(fold: bool, windows: bool, **only_folded: object) -> None:
    """Raises SettingError for settings that need `fold` without it, or exclude it.

    only_folded: settings that need it, by name.
    """
    if fold and windows:
        raise SettingError("`windows` says which layers get maps: leave `windows` or `fold` out")
    if not fold and (wrong := [name for name, value in only_folded.items() if value]):
        raise SettingError(f"`{wrong[0]}` needs a folded model: add `fold=True`")


def read_questions(budget: str | None, tasks: Sequence[str | Path] | None) -> Sequence[Task]:
    """The questions of an accuracy budget. Raises ValueError for files that are missing, not
    needed, cannot be read, or have too few questions."""
    limit = None if budget is None else parse_budget(budget)
    if limit is None or limit.metric != "accuracy":
        if tasks:
            raise SettingError(
                "`tasks` are the questions of a budget of accuracy: give `budget=accuracy>=0.99`"
                " too, or leave `tasks` out"
            )
        return ()
    if not tasks:
        raise SettingError(
            f"`budget={budget}` needs questions to measure the accuracy on: give files of them with"
            " `tasks`"
        )
    questions = [question for path in tasks for question in read_tasks(path)]
    check_count(questions, limit.limit)
    return questions


def check_mappable(
    config: Any,
    recipe: str | Recipe | None,
    max_tokens: int | None,
    target: Target,
    align: int | None,
) -> None:
    """Raises ValueError where maps beside the weights cannot work, as far as the config tells.

    The layers of a model of no family are known only once it is loaded: `make_maps` checks those.
    """
    recipe_of(recipe)
    if has_family(config):
        chosen_recipe, target, _ = choose_for_maps(recipe, family_of(config), config, target)
        check_config(config, chosen_recipe, max_tokens, target, align)
    if max_tokens is not None:
        check_tokens(config, max_tokens)


def stored_dtype(config: Any, dtype: str | torch.dtype) -> torch.dtype | None:
    """The dtype to save a model in that was loaded with `dtype`; None: the dtype that it has."""
    checkpoint_dtype: torch.dtype = config.dtype
    return checkpoint_dtype if dtype == "auto" else None


def check_files(
    calib: Sequence[str | Path] | None,
    statistics: Path | str | Statistics | None,
    output: Path | str | None,
) -> None:
    """Raises ValueError for files that cannot be read, or could not be written after the work."""
    if calib and not is_self(calib):
        read_texts(calib)
    if isinstance(statistics, str | Path):
        check_place(Path(statistics))
    if output is not None:
        check_makeable(Path(output))


def save(model: Any, tokenizer: Any, path: Path, dtype: torch.dtype | None = None) -> None:
    """Save a checkpoint completely or not at all.

    dtype: of the saved weights; the model's own stay as they are.
    """
    with new_directory(path) as folder, writing(path):
        fill(folder, model, tokenizer, dtype)


def fill(folder: Path, model: Any, tokenizer: Any, dtype: torch.dtype | None = None) -> None:
    """Write a checkpoint into an existing folder, with a README of how it was made."""
    with rounded(model, dtype):
        write(model, tokenizer, folder)
    spec = spec_of(model)
    if spec is not None:
        (folder / "README.md").write_text(card.text(spec, provenance_of(model)), encoding="utf-8")
