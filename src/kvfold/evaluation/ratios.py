"""Searches for the hybrid ratios of fewest numbers within a loss limit (ZDC §5.2, eq. 5 and 6).

Shape legend: n windows of `ctx` tokens.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from kvfold.compression.compressor import Prepared
from kvfold.config import CacheConfig, Ratios
from kvfold.evaluation.budget import held_out
from kvfold.evaluation.comparison import ORIGINAL
from kvfold.evaluation.measure import runner_for
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.perplexity import window_perplexity
from kvfold.utils.errors import SettingError
from kvfold.utils.progress import Progress, stage

STEPS = (0.0, 0.25, 0.5, 0.75)  # shares of a head's numbers that are removed
RISING = ((0.1, 0.3), (0.2, 0.6), (0.4, 0.8))  # important tokens of the first and last layer
WINDOWS = 4


def removals() -> Iterator[Ratios]:
    """Yield the ratios that the paper allows: unimportant tokens lose more than important ones, and
    keys at least as much as values."""
    for keys, values, low_keys, low_values in product(STEPS, repeat=4):
        if low_keys > keys >= values < low_values <= low_keys:
            yield Ratios(
                keys=keys, values=values, low_rank_keys=low_keys, low_rank_values=low_values
            )


def candidate_ratios() -> Iterator[Ratios]:
    """Yield `removals` with each share of important tokens."""
    for ratios, (first, last) in product(removals(), RISING):
        yield replace(ratios, important=first, important_last=last)


def search_ratios(
    prepared: Prepared,
    limit: float,
    *,
    align: int | None = None,
    progress: Progress | None = None,
) -> tuple[Ratios, float]:
    """Return the choice of fewest numbers per token whose perplexity ratio to the original is <=
    `limit` (1 + Q_d), and that ratio.

    It is measured on the second half of held-out windows, with a ranking of tokens per layer.
    Raises SettingError if no choice is within the limit.
    """
    compressor = prepared.compressor
    held_out_ids = held_out(compressor, compressor.windows().shape[1], WINDOWS)

    def at(model: Any, label: str) -> float:
        runner = runner_for(model, CacheConfig(), held_out_ids.shape[1])
        sessions, report = partial(PagedSession, runner), stage(progress, f"search {label}")
        half = held_out_ids.shape[1] // 2
        result, _ = window_perplexity(sessions, held_out_ids, scored_from=half, progress=report)
        return result.perplexity

    plans = [(ratios, prepared.plan_hybrid(ratios, align)) for ratios in candidate_ratios()]
    original = at(compressor.model, ORIGINAL)
    for number, (ratios, spec) in enumerate(sorted(plans, key=lambda x: x[1].kept_fraction)):
        ratio = at(prepared.folded_copy(spec), f"choice {number + 1}") / original
        if ratio <= limit:
            return ratios, ratio
    raise SettingError(
        f"`hybrid`: none of {len(plans)} choices of ratios is within {limit} times the perplexity;"
        " allow more, or give `keep`"
    )
