"""Tasks through a cache: prompts to greedy tokens and log-likelihoods, and their scores."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from transformers import PreTrainedModel

from kvfold.evaluation.dense import DenseSession, inference
from kvfold.evaluation.perplexity import max_positions, mean_and_se, vocabulary
from kvfold.evaluation.reader import Reader
from kvfold.evaluation.tasks import SCORES
from kvfold.evaluation.tasks.base import Answer, Prompt, Task, decode
from kvfold.utils.progress import Report
from kvfold.utils.tokens import check_ids, leading_tokens


@dataclass(frozen=True)
class Score:
    """Mean over the `rows` that have the score, and its standard error."""

    mean: float
    error: float
    rows: int


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Scores by name, generated `outputs`, and rows whose context lost tokens on its left."""

    rows: int
    truncated: int
    outputs: tuple[str, ...]
    scores: Mapping[str, Score]

    def flat(self) -> dict[str, float]:
        """Means by name of the score, standard errors by that name and `_se`, rows, truncated."""
        means = {name: score.mean for name, score in self.scores.items()}
        errors = {f"{name}_se": score.error for name, score in self.scores.items()}
        return {"rows": self.rows, "truncated": self.truncated, **means, **errors}

    def record(self) -> dict[str, Any]:
        """Plain values: rows, truncated, outputs and every known score, else None."""
        names = [name for score in SCORES for name in (score, f"{score}_se")]
        return {"outputs": self.outputs, **dict.fromkeys(names), **self.flat()}


def pooled(results: Sequence[TaskResult]) -> dict[str, float | None]:
    """Every known score over the rows of all results; None where no row has it."""
    means: dict[str, float | None] = {}
    for name in SCORES:
        found = [result.scores[name] for result in results if name in result.scores]
        rows = sum(score.rows for score in found)
        means[name] = sum(score.mean * score.rows for score in found) / rows if rows else None
    return means


def run_tasks(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: Sequence[Task],
    *,
    chunk: int = 512,
    reader: Reader | None = None,
    progress: Report | None = None,
) -> TaskResult:
    """Answer all `tasks`; a context is read in chunks, and compressed before its question, if it
    has one, and its answer.

    reader: another cache than transformers'. A context that does not fit the model's positions
    loses tokens on its left, after the tokenizer's `leading_tokens`. `progress(done, total)` counts
    rows. Raises ValueError for an answer that alone does not fit.
    """
    reader = reader or Reader(partial(DenseSession, model, chunk))
    stops, limit = _stop_ids(model, tokenizer), max_positions(model)
    size, leading = vocabulary(model), leading_tokens(tokenizer)
    values = defaultdict[str, list[float]](list)
    outputs: list[str] = []
    truncated = 0
    with inference(model):
        for index, task in enumerate(tasks):
            asked = task.prompts(tokenizer)
            for prompt in asked:
                check_ids(chain(prompt.context, prompt.question, *prompt.endings), size)
            prompts = [_fit(prompt, limit, leading) for prompt in asked]
            answers = [_answer(reader, prompt, stops) for prompt in prompts]
            written = zip(prompts, answers, strict=True)
            outputs += [decode(tokenizer, answer.tokens) for x, answer in written if x.num_new]
            for name, value in task.score(tokenizer, answers).items():
                values[name].append(value)
            truncated += prompts != asked
            if progress:
                progress(index + 1, len(tasks))
    scores = {name: Score(*mean_and_se(own), len(own)) for name in SCORES if (own := values[name])}
    return TaskResult(rows=len(tasks), truncated=truncated, outputs=tuple(outputs), scores=scores)


def _answer(reader: Reader, prompt: Prompt, stops: Collection[int | None]) -> Answer:
    reader.prefill(prompt.context)
    weighed = [reader.log_likelihood(ending) for ending in prompt.endings]
    tokens = reader.answer(prompt.question, prompt.num_new, stops) if prompt.num_new else []
    return Answer(log_likelihoods=weighed, tokens=tokens)


def _fit(prompt: Prompt, limit: int | None, leading: list[int]) -> Prompt:
    """The prompt with as many last tokens of its context as leave room within `limit`, after the
    `leading` tokens that it begins with."""
    ids, room = prompt.context, prompt.room
    if not ids:
        raise ValueError(
            "task: empty context, and the tokenizer puts no BOS token in front; give a context"
        )
    if limit is None or len(ids) + room <= limit:
        return prompt
    left, kept = limit - room, leading if ids[: len(leading)] == leading else []
    if left < len(leading) + 1:
        raise ValueError(
            f"task: an answer of {room} tokens, with its question, leaves no context in {limit}"
        )
    return replace(prompt, context=kept + ids[len(kept) - left :])


def _stop_ids(model: PreTrainedModel, tokenizer: Any) -> set[int | None]:
    stops = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])}
