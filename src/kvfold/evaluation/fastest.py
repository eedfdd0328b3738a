"""Searches for the recipe and size of least predicted step time within a perplexity ratio."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvfold.compression.compressor import Compressor, Prepared, shared_statistics
from kvfold.compression.planning.step_time import DecodeLoad, Prediction, predict
from kvfold.config import CacheConfig, Prefer
from kvfold.evaluation.budget import held_out
from kvfold.evaluation.comparison import ORIGINAL
from kvfold.evaluation.frontier import named, plans, stored
from kvfold.evaluation.measure import Measurement, measure
from kvfold.layout import CacheSpec
from kvfold.utils.errors import SettingError
from kvfold.utils.progress import Progress

TRIED = ("fast", "swift", "lean", "small")
FACTORS = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 14.0)
TEXT = "held-out"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A recipe at a size. prefer: what its plan prefers. step: the predicted time of a decode step.
    ratio: of its perplexity to the original's; None if it was not measured."""

    prepared: Prepared
    factor: float
    prefer: Prefer
    spec: CacheSpec
    step: Prediction
    ratio: float | None = None

    @property
    def name(self) -> str:
        return named(self.prepared.compressor.recipe.name, self.prefer)

    def __str__(self) -> str:
        approximate = "~" * self.step.estimated
        return f"{self.name} {self.factor:g}x: {approximate}{self.step.ms:.2f} ms a step, predicted"


def search_fastest(
    compressors: Sequence[Compressor],
    limit: float,
    load: DecodeLoad,
    *,
    say: Callable[[str], None],
    progress: Progress | None = None,
) -> Candidate:
    """Find the candidate of least predicted step time whose perplexity ratio, measured on pages, is
    <= `limit`.

    compressors: one per recipe, with a shared model and text. Candidates are measured from the
    fastest on, and the first one within the limit is returned. A recipe is assumed to lose more at
    larger factors. say: called with a line for each that is measured. Raises SettingError if
    nothing faster than the original is within the limit.
    """
    first = compressors[0]
    held_out_ids = held_out(first, first.windows().shape[1])
    what = Measurement(windows={TEXT: held_out_ids}, tasks={}, cache=CacheConfig())

    def at(model: Any, label: str) -> float:
        measured = measure(model, first.tokenizer, what, progress, f"search {label}")
        return measured.texts[TEXT].perplexity

    uncompressed = predict(first.model.config, stored(first.model), load)
    original, too_small = at(first.model, ORIGINAL), dict[str, float]()
    for x in candidates(compressors, load, progress):
        if uncompressed is not None and x.step.ms >= uncompressed.ms:
            break
        if x.factor >= too_small.get(x.name, x.factor + 1):
            continue
        label = f"{x.name} {x.factor:g}x"
        ratio = at(x.prepared.folded_copy(x.spec), label) / original
        say(f"{x}; {ratio:.4f} times the perplexity")
        if ratio <= limit:
            return replace(x, ratio=ratio)
        too_small[x.name] = x.factor
    raise SettingError(
        f"`fastest`: within {limit:g} times the perplexity nothing is predicted to be faster than"
        f" the original at {load}; allow more with `budget`, or leave `fastest` out"
    )


def candidates(
    compressors: Sequence[Compressor], load: DecodeLoad, progress: Progress | None = None
) -> list[Candidate]:
    """Return every recipe at every size that it can plan and kernels serve, fastest first."""
    planned: list[Candidate] = []
    statistics = shared_statistics(compressors, progress)
    for compressor in compressors:
        prepared = compressor.prepare(statistics, progress)
        for factor in FACTORS:
            for prefer, spec in plans(prepared, factor):
                if step := predict(compressor.model.config, spec, load):
                    candidate = Candidate(
                        prepared=prepared, factor=factor, prefer=prefer, spec=spec, step=step
                    )
                    planned.append(candidate)
    return sorted(planned, key=lambda x: (x.step.ms, -x.factor))
