"""Measures a model on texts, hidden facts and tasks, through a cache of choice.

Shape legend: n windows, T = ctx.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.runner import ModelRunner
from kvfold.evaluation.dense import DenseSession, inference
from kvfold.evaluation.needle import NeedleResult, evaluate_needle
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.perplexity import (
    PerplexityResult,
    check_length,
    max_positions,
    vocabulary,
    window_perplexity,
)
from kvfold.evaluation.reader import Reader
from kvfold.evaluation.session import Footprint, Sessions
from kvfold.evaluation.tasks.base import Task
from kvfold.evaluation.tasks.run import TaskResult, run_tasks
from kvfold.hub.checkpoint import spec_of
from kvfold.maps.attach import attach
from kvfold.maps.layers import attention_layers
from kvfold.maps.sidecar import Sidecar
from kvfold.utils.errors import SettingError
from kvfold.utils.progress import Progress, stage
from kvfold.utils.text import running
from kvfold.utils.tokens import check_ids, windows

QUESTION_ROOM = 64  # tokens of a question and its answer beyond the context
NEEDLE_LENGTHS = (512, 1024, 2048, 4096)
MIN_EVICTING_WINDOW = 3  # tokens: the first half (1) is only read, and 2 must be left to score


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a model is measured on, and how.

    windows: token ids int64 [n, T] by the name of their text. tasks: examples by the name of their
    file. needle: how many contexts with hidden facts to try per length. lengths: of those contexts
    in tokens; None: those of NEEDLE_LENGTHS that the model has positions for. chunk: tokens that
    are fed at a time. batch: windows in one forward. cache: settings of the paged cache; None:
    transformers' cache. agnostic: needle contexts are compressed before the model sees their
    question. scored_from: as in `window_perplexity`. maps: to attach to the model.
    """

    windows: Mapping[str, Tensor] = field(default_factory=dict)
    tasks: Mapping[str, Sequence[Task]] = field(default_factory=dict)
    needle: int = 0
    lengths: Sequence[int] | None = None
    chunk: int = 512
    batch: int = 1
    cache: CacheConfig | None = None
    agnostic: bool = True
    scored_from: int | None = None
    maps: Sidecar | None = None

    def __post_init__(self) -> None:
        shortest = min((ids.shape[1] for ids in self.windows.values()), default=MIN_EVICTING_WINDOW)
        if self.cache is not None and self.cache.evict and shortest < MIN_EVICTING_WINDOW:
            raise SettingError(
                f"`ctx` must be at least {MIN_EVICTING_WINDOW} where tokens are evicted, since the"
                f" first half of a window is the prompt and only the rest is scored; got {shortest}"
            )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Results by text, by context length in tokens and by task file. footprint: of a sequence in
    the cache."""

    texts: dict[str, PerplexityResult]
    needle: dict[int, NeedleResult]
    tasks: dict[str, TaskResult]
    footprint: Footprint | None

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of the largest cache that a text's windows took; None if no text was measured."""
        return max((result.cache_bytes_allocated for result in self.texts.values()), default=None)


def measure(
    model: Any,
    tokenizer: Any,
    what: Measurement,
    progress: Progress | None = None,
    label: str = "",
) -> Measured:
    """Measure perplexity on every text, retrieval at every length and scores on every task file.

    label: names the model in the progress. The model is not changed.
    """
    lengths = (what.lengths or needle_lengths(model)) if what.needle else ()
    spec = spec_of(model)
    if what.cache is None and spec is not None and spec.hybrid is not None:
        what = replace(what, cache=CacheConfig())  # only pages have low-rank entries
    sessions = _sessions(model, tokenizer, what, lengths)
    texts, footprint = {}, None
    needle: list[NeedleResult] = []
    with inference(model), _attached(model, what):
        for name, ids in what.windows.items():
            texts[name], footprint = window_perplexity(
                sessions,
                ids,
                batch=what.batch if what.cache is None else 1,
                scored_from=what.scored_from,
                progress=stage(progress, f"{label} {name}"),
            )
        if lengths:
            with closing(Reader(sessions, agnostic=what.agnostic)) as reader:
                needle = evaluate_needle(
                    model,
                    tokenizer,
                    lengths=lengths,
                    num_contexts=what.needle,
                    reader=reader,
                    progress=stage(progress, f"{label} needle"),
                )
            footprint = footprint or reader.footprint
        tasks = {}
        with closing(Reader(sessions)) as reader:
            for name, examples in what.tasks.items():
                report = stage(progress, f"{label} {name}")
                tasks[name] = run_tasks(model, tokenizer, examples, reader=reader, progress=report)
        footprint = footprint or reader.footprint
    by_length = {result.length: result for result in needle}
    return Measured(texts=texts, needle=by_length, tasks=tasks, footprint=footprint)


@contextmanager
def _attached(model: Any, what: Measurement) -> Iterator[None]:
    """Attach the maps for a measurement through transformers' cache; the engine applies them
    itself."""
    if what.maps is None or what.cache is not None:
        yield
        return
    detach = attach(model, what.maps)
    try:
        yield
    finally:
        detach()


def _sessions(model: Any, tokenizer: Any, what: Measurement, lengths: Sequence[int]) -> Sessions:
    """A function that opens sessions of the requested cache, long enough for every input."""
    if what.cache is None:
        return partial(DenseSession, model, what.chunk)
    tasks = [task for examples in what.tasks.values() for task in examples]
    prompts = [prompt for task in tasks for prompt in task.prompts(tokenizer)]
    sizes = [len(prompt.context) + prompt.num_following for prompt in prompts]
    longest = max([*lengths, *sizes, *(ids.shape[1] for ids in what.windows.values())])
    runner = runner_for(model, what.cache, longest, tokenizer=tokenizer, maps=what.maps)
    return partial(PagedSession, runner, what.chunk)


def runner_for(
    model: Any,
    cache: CacheConfig,
    longest: int,
    policy: Any = None,
    tokenizer: Any = None,
    maps: Sidecar | None = None,
) -> ModelRunner:
    """Build a runner for one sequence of `longest` tokens, a question and an answer. The other
    arguments are those of `build_runner`."""
    most = min(longest + QUESTION_ROOM, max_positions(model) or longest + QUESTION_ROOM)
    options = {"policy": policy, "tokenizer": tokenizer, "maps": maps}
    return build_runner(model, cache, num_slots=1, max_tokens=most, **options)


def text_windows(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, str],
    *,
    ctx: int,
    max_tokens: int | None = None,
) -> dict[str, Tensor]:
    """Cut every text into windows of `ctx` tokens. model: a model or its config. Raises ValueError
    that names a text which is shorter than one window, or has tokens that the model lacks."""
    check_length(model, ctx)
    ids = {}
    for name, text in texts.items():
        try:
            ids[name] = windows(tokenizer, running(text), ctx, max_tokens)
            check_ids([int(ids[name].max())], vocabulary(model))
        except SettingError as error:
            raise SettingError(f"{name}: {error.text}") from None
    return ids


def needle_lengths(model: Any) -> tuple[int, ...]:
    """Return the NEEDLE_LENGTHS that a model, or a config, has positions for."""
    limit = max_positions(model) or max(NEEDLE_LENGTHS)
    lengths = tuple(length for length in NEEDLE_LENGTHS if length <= limit)
    if not lengths:
        raise SettingError(
            f"`needle`: the model has {limit} positions, the shortest context takes"
            f" {NEEDLE_LENGTHS[0]}; leave `needle` out"
        )
    return lengths


def full_numbers(model: Any) -> int:
    """The numbers that an uncompressed model of any type stores per token."""
    storing = [x for x in attention_layers(model) if x.source == x.name]
    return sum(x.num_kv_heads * (x.head_dim + x.value_dim) for x in storing)


def storage(
    model: Any, footprint: Footprint | None = None, maps: Sidecar | None = None
) -> dict[str, Any]:
    """Return `kept_fraction`, and bytes per token of this cache and of the uncompressed 16-bit one.

    footprint: what pages held of a sequence after its prompt, if that was measured; otherwise the
    figures follow from the spec.
    """
    spec = spec_of(model) if maps is None else maps.spec
    planned = 0 if spec is None else spec.geometry.full_numbers
    folded = maps is None and spec is not None
    uncompressed = 0 if folded else full_numbers(model) - planned  # layers without maps
    baseline = 2 * (planned + uncompressed)
    if footprint is not None and footprint.kept_fraction is not None:
        fraction = footprint.kept_fraction
        size = fraction * baseline
    elif spec is not None:
        fraction = (uncompressed + spec.kept_fraction * planned) / (uncompressed + planned)
        size = spec.bytes_per_token() + 2 * uncompressed
    else:
        fraction, size = 1.0, baseline
    return {
        "kept_fraction": fraction,
        "bytes_per_token": size,
        "baseline_bytes_per_token": baseline,
    }
