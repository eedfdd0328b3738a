"""One model on texts, hidden facts and tasks, through the cache that is asked for.

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
LEAST_EVICTED = 3  # tokens of a window of which half, rounded down, leaves 2 to score


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a model is measured on: windows int64 [n, T] and rows of tasks by name of their file,
    `needle` contexts a length.

    `chunk` tokens are fed at a time and `batch` windows together; `lengths` None means those of
    NEEDLE_LENGTHS that the model has positions for. `cache`: measure on the paged cache, as it
    says, instead of transformers'; then `agnostic` needle contexts are compressed before their
    question is seen, and `scored_from` as in `window_perplexity`. `maps`: beside the
    model's weights.
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
        shortest = min((ids.shape[1] for ids in self.windows.values()), default=LEAST_EVICTED)
        if self.cache is not None and self.cache.evict and shortest < LEAST_EVICTED:
            raise SettingError(
                f"`ctx` must be at least {LEAST_EVICTED} where tokens are evicted, since half of"
                f" a window is only read; got {shortest}"
            )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Results by text and task file and by context length in tokens, and what the cache held."""

    texts: dict[str, PerplexityResult]
    needle: dict[int, NeedleResult]
    tasks: dict[str, TaskResult]
    footprint: Footprint | None

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of the largest cache that measuring a text took."""
        return max((result.cache_bytes_allocated for result in self.texts.values()), default=None)


def measure(
    model: Any,
    tokenizer: Any,
    what: Measurement,
    progress: Progress | None = None,
    label: str = "",
) -> Measured:
    """Perplexity on every text, retrieval at every length, scores on every task file.

    The model itself stays as it is.
    """
    lengths = (what.lengths or needle_lengths(model)) if what.needle else ()
    spec = spec_of(model)
    if what.cache is None and spec is not None and spec.hybrid is not None:
        what = replace(what, cache=CacheConfig())  # elsewhere all rows stay wide
    sessions = _sessions(model, tokenizer, what, lengths)
    texts, held = {}, None
    needle: list[NeedleResult] = []
    with inference(model), _attached(model, what):
        for name, rows in what.windows.items():
            texts[name], held = window_perplexity(
                sessions,
                rows,
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
            held = held or reader.footprint
        tasks = {}
        with closing(Reader(sessions)) as reader:
            for name, questions in what.tasks.items():
                report = stage(progress, f"{label} {name}")
                tasks[name] = run_tasks(model, tokenizer, questions, reader=reader, progress=report)
        held = held or reader.footprint
    by_length = {result.length: result for result in needle}
    return Measured(texts=texts, needle=by_length, tasks=tasks, footprint=held)


@contextmanager
def _attached(model: Any, what: Measurement) -> Iterator[None]:
    """The maps of a measurement through transformers' cache; an engine has them by itself."""
    if what.maps is None or what.cache is not None:
        yield
        return
    take_away = attach(model, what.maps)
    try:
        yield
    finally:
        take_away()


def _sessions(model: Any, tokenizer: Any, what: Measurement, lengths: Sequence[int]) -> Sessions:
    """A maker of sessions of the cache that is asked for, long enough for all of it."""
    if what.cache is None:
        return partial(DenseSession, model, what.chunk)
    rows = [row for rows in what.tasks.values() for row in rows]
    asked = [prompt for row in rows for prompt in row.prompts(tokenizer)]
    sizes = [len(prompt.context) + prompt.room for prompt in asked]
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
    """A runner of one sequence, `longest` tokens, a question and an answer; as `build_runner`."""
    most = min(longest + QUESTION_ROOM, max_positions(model) or longest + QUESTION_ROOM)
    given = {"policy": policy, "tokenizer": tokenizer, "maps": maps}
    return build_runner(model, cache, num_slots=1, max_tokens=most, **given)


def text_windows(
    model: Any,
    tokenizer: Any,
    texts: Mapping[str, str],
    *,
    ctx: int,
    max_tokens: int | None = None,
) -> dict[str, Tensor]:
    """Windows of every text for a model, of which its config is enough. Raises ValueError naming a
    text that does not fill one, or has tokens that the model does not."""
    check_length(model, ctx)
    found = {}
    for name, text in texts.items():
        try:
            found[name] = windows(tokenizer, running(text), ctx, max_tokens)
            check_ids([int(found[name].max())], vocabulary(model))
        except SettingError as error:
            raise SettingError(f"{name}: {error.text}") from None
    return found


def needle_lengths(model: Any) -> tuple[int, ...]:
    """Those of NEEDLE_LENGTHS that a model, or a config, has positions for."""
    limit = max_positions(model) or max(NEEDLE_LENGTHS)
    lengths = tuple(length for length in NEEDLE_LENGTHS if length <= limit)
    if not lengths:
        raise SettingError(
            f"`needle`: the model has {limit} positions, the shortest context takes"
            f" {NEEDLE_LENGTHS[0]}; leave `needle` out"
        )
    return lengths


def full_numbers(model: Any) -> int:
    """That an original model of any type stores of a token."""
    stores = [x for x in attention_layers(model) if x.source == x.name]
    return sum(x.num_kv_heads * (x.head_dim + x.value_dim) for x in stores)


def storage(
    model: Any, held: Footprint | None = None, maps: Sidecar | None = None
) -> dict[str, Any]:
    """kept_fraction, and bytes per token of this cache and of the full one at 16 bits.

    Of what pages hold of a sequence after its prompt, where that was measured; else by the spec.
    """
    spec = spec_of(model) if maps is None else maps.spec
    planned = 0 if spec is None else spec.geometry.full_numbers
    folded = maps is None and spec is not None
    whole = 0 if folded else full_numbers(model) - planned  # of layers without maps
    baseline = 2 * (planned + whole)
    if held is not None and held.kept_fraction is not None:
        kept, size = held.kept_fraction, held.kept_fraction * baseline
    elif spec is not None:
        kept = (whole + spec.kept_fraction * planned) / (whole + planned)
        size = spec.bytes_per_token() + 2 * whole
    else:
        kept, size = 1.0, baseline
    return {
        "kept_fraction": kept,
        "bytes_per_token": size,
        "baseline_bytes_per_token": baseline,
    }
