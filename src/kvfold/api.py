"""compress: from a model and a recipe to maps of its keys and values, or a folded model."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvfold.calibration.documents import is_self
from kvfold.calibration.saved_pass import saved_beside
from kvfold.calibration.statistics import Statistics
from kvfold.calibration.statistics.artifact import check_place
from kvfold.calibration.text import check_tokens
from kvfold.compression.compressor import Compressor, check_config
from kvfold.compression.planning.default import chosen, chosen_beside
from kvfold.compression.planning.target import Target
from kvfold.compression.training.recover import check_steps
from kvfold.compression.work import check_disk, work_of
from kvfold.config import Prefer, Ratios, Recipe, check_types
from kvfold.evaluation import scores
from kvfold.evaluation.answers import Answer, check_answer
from kvfold.evaluation.budget import search_keep
from kvfold.evaluation.importance import find_leaders
from kvfold.evaluation.maps import measured
from kvfold.evaluation.ratios import search_ratios
from kvfold.hub import card
from kvfold.hub.checkpoint import provenance_of, spec_of
from kvfold.hub.loading import check_loaded, load, load_config, load_tokenizer
from kvfold.layout import CacheSpec
from kvfold.maps.compress import make_maps, recipe_of
from kvfold.maps.layers import unwrapped
from kvfold.models.families import family_of, has_family
from kvfold.models.plain import check_weights
from kvfold.models.weights import rounded, write
from kvfold.utils.errors import SettingError
from kvfold.utils.files import check_makeable, new_directory, writing
from kvfold.utils.progress import Progress
from kvfold.utils.search import parse_budget
from kvfold.utils.text import check_tokenizer, read_texts


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
    windows: bool = False,
    budget: str | None = None,
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
    """Make a model's KV cache keep `keep` of its numbers, or be `factor` times smaller.

    Returns maps of keys and values, a `Sidecar`, for `kvfold.attach(model, maps)` and
    `kvfold.LLM(model, maps=maps)`; the model stays as it is. It may be of any type whose layers
    call transformers' attention interface. fold: fold the maps into the weights instead, in place,
    and return the model. That takes a model of the families in `models.families`, and all recipes.

    model: a name (directory, GGUF file, hub id, `reference:gqa`) or a loaded causal LM. recipe: a
    name from `kvfold.recipes`, a `Recipe`, or None: see `compression.default`; maps are made by
    swift and fast, and by lean and small, which take keys before RoPE, where that rotates pairs.
    keep: in (0, 1]. factor: dimensions and bits planned together (see `Prepared.plan_factor`); the
    planned bits take effect on the paged cache. Without a size it is 4, or for a recipe that plans
    no bits, keep is 0.5. bytes_per_token: the same, as bytes, of the layers that get maps. levels:
    bits that planned numbers may have, of 8, 6, 4, 3, 2, 1 (default (8, 4, 2), those that kernels
    read). prefer: what such a plan is for: `speed`, rows that a Hopper GPU reads in one pass, of
    recipes swift and lean; `size`, the least loss at a size, in all levels; `balanced` (see
    `compression.preference`). None: balanced, or without a recipe speed where a GPU can use it.
    windows: also plan layers with a sliding window where other layers hold most of a long context
    (a folded model has them anyway). align: ranks whose bits are not planned are multiples of it
    (default 16, 8 for head_dim <= 64). calib: text files instead of the packaged text, or ["self"]:
    text that the model writes itself. tokenizer: needed with a loaded model. device, dtype: as of
    `load`, for a model by its name. statistics: an artifact file, reused if it exists and fits,
    written if not. output: a directory to save to, written whole or not at all; weights in the
    checkpoint's own dtype unless another is asked for. check: before it is saved, measure what maps
    lose (see `evaluation.maps`), or compare the folded model's answer to a short prompt, through an
    engine's cache, with the original's (see `evaluation.answers`). max_tokens: of calibration text,
    which decide the time; None: 32768 where the model is on a GPU, 12288 on a CPU. say: is told
    what the work will take before it starts, and where it goes on.

    With `output`, statistics are saved beside it as they are measured, and the same call goes on
    from there after it was stopped; the file is removed at the end. A disk that has no room for the
    output is refused before the work.

    budget: "ppl<=1.01", the smallest keep within that ratio of the original's perplexity on
    calibration text that calibration does not read.

    With fold=True alone: hybrid: two widths, the narrow one for tokens that are not important (ZDC
    §5.2, see `Ratios`), or "ppl<=1.1": the smallest within that ratio (Q_d <= 0.1) of those that
    are tried; of recipe zdc where none is named. recover: steps in which the maps learn from the
    original on the calibration text (see `compression.recover`; for a GPU). learn_scores: learn
    what rows are worth, too, for `evict="learned"` (see `evaluation.scores`).

    Raises ValueError for settings or inputs that cannot work, and then leaves the model as it was,
    unless it is recovery that diverges, or the check of a folded model that fails.
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
    )
    target.check_align(align)
    check_steps(recover)
    check_tokenizer(tokenizer)
    check_fold(fold, windows, hybrid=hybrid, recover=recover, learn_scores=learn_scores)
    check_files(calib, statistics, output)
    name = str(model) if isinstance(model, str | Path) else None
    if name is None:
        model = model if fold else unwrapped(model)
        check_loaded(model, device, dtype)
    saved = None if output is None else saved_beside(Path(output), say)
    with saved or nullcontext(), _new_directory(output) as folder:
        config = model.config if name is None else load_config(name)
        why = None
        if fold:
            recipe, target, why = chosen(recipe, config, target)
            check_config(config, recipe, max_tokens, target, align)
        else:
            check_mappable(config, recipe, max_tokens, target, align)
        if learn_scores:
            scores.check_learnable(config, target)
        stored = stored_dtype(config, dtype) if name is not None else None
        if name is not None:
            tokenizer = tokenizer or load_tokenizer(name)
            if say is not None:
                say(f"loading {name}")
            model = load(name, dtype=dtype, device=device)
        source = name or str(model.config.name_or_path) or type(model).__name__
        text: dict[str, Any] = {"calib": calib, "max_tokens": max_tokens, "seed": seed}
        text["saved"] = saved
        size: dict[str, Any] = {"align": align, "statistics": statistics, "progress": progress}
        told: dict[str, Any] = {"output": output, "say": say}
        if not fold:
            about = {"source": source, "search": search_keep, "windows": windows, **text, **size}
            about["begun"] = partial(announce, fold=False, statistics=statistics, **told)
            compressor, maps = make_maps(model, tokenizer, recipe, target, **about)
            if check and output is not None:
                maps = measured(compressor, maps)
            if folder is not None and output is not None:
                maps.write(folder, Path(output))
            return maps
        assert isinstance(recipe, Recipe)
        check_weights(model, family_of(config))
        compressor = Compressor(model, recipe, tokenizer, **text)
        announce(compressor, fold=True, stored=stored, statistics=statistics, **told)
        answer = Answer.of(model, tokenizer, stored) if check and output is not None else None
        folded = fold_to(compressor, target, source=source, why=why, recover=recover, **size)
        finish(
            compressor,
            folded.predicted,
            answer,
            learn_scores=learn_scores,
            folder=folder,
            output=output,
            stored=stored,
            progress=progress,
        )
    return model


def _new_directory(output: Path | str | None) -> AbstractContextManager[Path | None]:
    return nullcontext() if output is None else new_directory(Path(output))


def announce(
    compressor: Compressor,
    *,
    fold: bool,
    output: Path | str | None,
    stored: torch.dtype | None = None,
    statistics: Path | str | Statistics | None = None,
    say: Callable[[str], object] | None = None,
) -> None:
    """Say what the work will take, where statistics are to be measured. Raises SettingError where
    the output's disk has no room. stored: of weights, as in `fill`."""
    if output is None and say is None:
        return
    work = work_of(compressor, fold, stored)
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
    answer: Answer | None,
    *,
    learn_scores: bool = False,
    folder: Path | None = None,
    output: Path | str | None = None,
    stored: torch.dtype | None = None,
    progress: Progress | None = None,
) -> None:
    """What follows folding: learn scores, check the answer, where there is one, and save.

    predicted: as of `Folded`; folder: to fill, that becomes `output`; stored: dtype of its weights.
    """
    model, tokenizer = compressor.model, compressor.tokenizer
    if learn_scores:
        scores.learn_scores(model, tokenizer, scores.readings(compressor), progress)
    if answer is not None:
        check_answer(model, answer, predicted)
    if folder is not None and output is not None:
        with writing(Path(output)):
            fill(folder, model, tokenizer, stored)


def check_fold(fold: bool, windows: bool, **only_folded: object) -> None:
    """Raises SettingError for settings that only folding has, by name, where nothing is folded, and
    the other way round."""
    if fold and windows:
        raise SettingError("`windows` says which layers get maps: leave `windows` or `fold` out")
    if not fold and (wrong := [name for name, value in only_folded.items() if value]):
        raise SettingError(
            f"`{wrong[0]}` is of a model that is folded, not of maps beside its weights: add"
            " `fold=True`"
        )


def check_mappable(
    config: Any,
    recipe: str | Recipe | None,
    max_tokens: int | None,
    target: Target,
    align: int | None,
) -> None:
    """Raises ValueError for what a model's config says cannot work for maps beside its weights."""
    found = recipe_of(recipe)
    if has_family(config):
        found, target, _ = chosen_beside(recipe, family_of(config), config, target)
        check_config(config, found, max_tokens, target, align)
    if max_tokens is not None:
        check_tokens(config, max_tokens)


@dataclass(frozen=True, kw_only=True)
class Folded:
    """What a model was folded to, and the loss that its plan predicts, in nats a token; None where
    nothing predicts it."""

    spec: CacheSpec
    predicted: float | None


def fold_to(
    compressor: Compressor,
    target: Target,
    *,
    source: str,
    why: str | None = None,
    align: int | None = None,
    statistics: Path | str | Statistics | None = None,
    recover: int = 0,
    progress: Progress | None = None,
) -> Folded:
    """Fold a compressor's model in place to a size; the last step, after all that can fail.

    source: the name of the original, why: the reason for a recipe that was not named, both for
    provenance; the rest as in `compress`.
    """
    factor = compressor.factor_of(target, align)
    prepared = compressor.prepare(statistics, progress)
    keep, ratio = target.keep, None
    if target.limit is not None:
        keep, ratio = search_keep(prepared, target.limit, align=align, progress=progress)
    hybrid, allowed = target.hybrid, target.budget
    if isinstance(hybrid, str):
        allowed, within = hybrid, parse_budget(hybrid)
        hybrid, ratio = search_ratios(prepared, within, align=align, progress=progress)
    if hybrid is not None:
        spec = prepared.plan_hybrid(hybrid, align)
    elif factor is not None:
        assert target.levels is not None
        spec = prepared.plan_factor(factor, target.levels, target.plans_for)
    else:
        assert keep is not None
        spec = prepared.plan(keep, align)
    own = None if hybrid is None else asdict(hybrid)
    asked = asdict(target) | {"keep": keep, "align": align, "hybrid": own, "budget": allowed}
    provenance = {"model": source, **asked, "ratio": ratio}
    if why is not None:
        provenance["chosen"] = why
    prepared.fold(spec, provenance, recover=recover, progress=progress)
    if spec.hybrid is not None:
        spec = find_leaders(compressor.model, compressor.windows())
    return Folded(spec=spec, predicted=prepared.predicted_loss(spec))


def stored_dtype(config: Any, dtype: str | torch.dtype) -> torch.dtype | None:
    """What to save a model in that was loaded with `dtype`; None: in the dtype that it has."""
    found: torch.dtype | None = config.dtype if dtype == "auto" else None
    return found


def check_files(
    calib: Sequence[str | Path] | None,
    statistics: Path | str | Statistics | None,
    output: Path | str | None,
) -> None:
    """Raises ValueError for files that cannot be read, or written after the work is done."""
    if calib and not is_self(calib):
        read_texts(calib)
    if isinstance(statistics, str | Path):
        check_place(Path(statistics))
    if output is not None:
        check_makeable(Path(output))


def save(model: Any, tokenizer: Any, path: Path, dtype: torch.dtype | None = None) -> None:
    """Save a checkpoint whole or not at all; dtype: of its weights, which stay as they are here."""
    with new_directory(path) as folder, writing(path):
        fill(folder, model, tokenizer, dtype)


def fill(folder: Path, model: Any, tokenizer: Any, dtype: torch.dtype | None = None) -> None:
    """Write a checkpoint, as `save`, with a README of what was done to it."""
    with rounded(model, dtype):
        write(model, tokenizer, folder)
    spec = spec_of(model)
    if spec is not None:
        (folder / "README.md").write_text(card.text(spec, provenance_of(model)), encoding="utf-8")
