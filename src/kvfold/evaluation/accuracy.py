"""Searches for the smallest cache that keeps a share of the original's accuracy on questions.

ZACK chooses its ranks so (§6.3): one removal rate r of the singular values for all heads decides
every head's rank (§5.2, `ranks.spectra.Energy`), and a bisection finds the largest overall rate
that keeps 99 % of the accuracy. Here the questions are paired: every size answers the same ones as
the original, so that the standard error is that of the answers that changed.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from kvfold.compression.compressor import Prepared
from kvfold.evaluation.comparison import ORIGINAL
from kvfold.evaluation.perplexity import mean_and_se
from kvfold.evaluation.tasks.base import Task
from kvfold.evaluation.tasks.run import run_tasks
from kvfold.layout import CacheSpec
from kvfold.utils.errors import SettingError
from kvfold.utils.progress import Progress, stage
from kvfold.utils.search import search

ROUNDING = 1e-9  # of sums of scores

Scores = tuple[float, ...]  # the main score of every question, in order


@dataclass(frozen=True, kw_only=True)
class KeptAccuracy:
    """What a compressed model answers of `questions`.

    original, accuracy: mean main score of both models, with standard errors. lost: the mean loss,
    paired by question, with its standard error. share: the least share of the original's accuracy
    that was allowed. needed: the number of questions at which the standard error of such a loss
    would be what is allowed; None where no answer changed.
    """

    share: float
    questions: int
    original: float
    original_error: float
    accuracy: float
    accuracy_error: float
    lost: float
    lost_error: float
    needed: int | None

    @property
    def reached(self) -> float:
        """The share of the original's accuracy."""
        return self.accuracy / self.original

    @property
    def reached_error(self) -> float:
        """The standard error of `reached`, with the original's accuracy as it is."""
        return self.lost_error / self.original

    def record(self) -> dict[str, Any]:
        """Plain values, for the provenance."""
        return {**asdict(self), "reached": self.reached, "reached_error": self.reached_error}


def kept_accuracy(original: Scores, compressed: Scores, share: float) -> KeptAccuracy:
    """Compare the scores of two models, question by question."""
    mean, error = mean_and_se(original)
    accuracy, accuracy_error = mean_and_se(compressed)
    pairs = zip(original, compressed, strict=True)
    lost, lost_error = mean_and_se([x - y for x, y in pairs])
    needed = len(original) * (lost_error / ((1 - share) * mean)) ** 2
    return KeptAccuracy(
        share=share,
        questions=len(original),
        original=mean,
        original_error=error,
        accuracy=accuracy,
        accuracy_error=accuracy_error,
        lost=lost,
        lost_error=lost_error,
        needed=math.ceil(needed) if lost_error > 0 else None,
    )


def check_count(tasks: Sequence[Task], share: float) -> None:
    """Raises SettingError where there are too few questions for a share, even if all were right."""
    if len(tasks) < (needed := _questions_needed(1.0, share)):
        raise SettingError(
            f"`tasks`: {len(tasks)} questions are too few for {share:g} of an accuracy, even if all"
            f" are answered right: give at least {needed}, or allow more with `budget`"
        )


def _questions_needed(accuracy: float, share: float) -> int:
    """The least number of questions at which a share allows the loss of one question.

    If m questions are lost and none is gained, the standard error is about sqrt(m) questions: a
    loss of less than one is smaller than its own standard error.
    """
    return math.ceil(1 / ((1 - share) * accuracy) - ROUNDING)


def check_original(original: Scores, guessed: float, share: float) -> None:
    """Raises SettingError where the share of the original's accuracy is no better than guesses,
    which any cache reaches, or too few questions were asked."""
    mean, error = mean_and_se(original)
    if share * mean <= guessed:
        raise SettingError(
            f"`tasks`: the original has an accuracy of {mean:.3f} ± {error:.3f}, and guesses have"
            f" {guessed:.3f}: {share:g} of it says nothing about a cache. Give questions that this"
            " model can answer, or allow less with `budget`"
        )
    if len(original) < (needed := _questions_needed(mean, share)):
        allowed = (1 - share) * sum(original)
        raise SettingError(
            f"`tasks`: the original answers {sum(original):g} of {len(original)} questions right,"
            f" too few for {share:g} of its accuracy, which allows a loss of {allowed:.2g}"
            f" questions: give at least {needed}, or allow more with `budget`"
        )


def search_share(
    scores_at: Callable[[float], Scores],
    original: Scores,
    share: float,
    **options: Any,
) -> tuple[float, KeptAccuracy]:
    """Search for the smallest keep whose accuracy is at least `share` of the original's.

    scores_at: the scores of a keep. options: of `utils.search.search`. Returns the keep, and what
    it answers.
    """
    limit = (1 - share) * sum(original) + ROUNDING
    measured: dict[float, Scores] = {}

    def lost_at(keep: float) -> float:
        measured[keep] = scores_at(keep)
        return sum(original) - sum(measured[keep])

    keep, _ = search(lost_at, limit, **options)
    return keep, kept_accuracy(original, measured[keep], share)


def search_accuracy(
    prepared: Prepared,
    share: float,
    tasks: Sequence[Task],
    *,
    align: int | None = None,
    progress: Progress | None = None,
    applied: Callable[[CacheSpec], AbstractContextManager[Any]] | None = None,
) -> tuple[float, KeptAccuracy]:
    """Search for the smallest keep whose accuracy on `tasks` is at least `share` of the original's,
    which is measured once. Both run through transformers' cache.

    The accuracy is the mean of the tasks' main scores. applied: as in `budget.search_keep`. Raises
    SettingError for an accuracy of which no such share can be measured.
    """
    compressor = prepared.compressor
    applied = applied or (lambda spec: nullcontext(prepared.folded_copy(spec)))

    def scores_of(model: Any, label: str) -> Scores:
        report = stage(progress, f"search {label}")
        return run_tasks(model, compressor.tokenizer, tasks, progress=report).main_scores

    original = scores_of(compressor.model, ORIGINAL)
    check_original(original, sum(x.guessed for x in tasks) / len(tasks), share)

    def scores_at(keep: float) -> Scores:
        try:
            spec = prepared.plan(keep, align)
        except ValueError:
            return (0.0,) * len(tasks)  # too small for a dimension in every layer
        with applied(spec) as model:
            return scores_of(model, f"keep {keep:.3f}")

    return search_share(scores_at, original, share)
