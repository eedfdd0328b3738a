"""Runs the examples of a task through a cache and averages their scores."""

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
from kvfold.evaluation.tasks.base import Prompt, Task, TaskAnswer, decode
from kvfold.utils.progress import Report
from kvfold.utils.tokens import check_ids, leading_tokens


@dataclass(frozen=True)
class Score:
    """The mean of a score over the examples that have it, and its standard error."""

    mean: float
    error: float
    num_examples: int


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """The results of a file.

    truncated: examples whose context lost tokens on its left. outputs: generated texts. scores: by
    name. main_scores: the main score of every example, in order.
    """

    num_examples: int
    truncated: int
    outputs: tuple[str, ...]
    scores: Mapping[str, Score]
    main_scores: tuple[float, ...] = ()

    def summary(self) -> dict[str, float]:
        """Plain values: `rows` (the number of examples), `truncated`, and by the name of a score
        its mean, with `_se` appended its standard error."""
        means = {name: score.mean for name, score in self.scores.items()}
        errors = {f"{name}_se": score.error for name, score in self.scores.items()}
        return {"rows": self.num_examples, "truncated": self.truncated, **means, **errors}

    def record(self) -> dict[str, Any]:
        """The summary, the outputs, and None for the scores of other tasks."""
        names = [name for score in SCORES for name in (score, f"{score}_se")]
        return {"outputs": self.outputs, **dict.fromkeys(names), **self.summary()}


def pooled(results: Sequence[TaskResult]) -> dict[str, float | None]:
    """The mean of every score over the examples of all files; None if no example has it."""
    means: dict[str, float | None] = {}
    for name in SCORES:
        scores = [result.scores[name] for result in results if name in result.scores]
        total = sum(score.mean * score.num_examples for score in scores)
        count = sum(score.num_examples for score in scores)
        means[name] = total / count if count else None
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
    """Run all examples and score the answers.

    A context is read in chunks, then compressed; question and answer follow. A context that does
    not fit the model's positions loses tokens on its left, after the tokenizer's `leading_tokens`.
    reader: of another cache than transformers'. progress: called with (examples done, all).
    Raises ValueError if an answer alone does not fit.
    """
    reader = reader or Reader(partial(DenseSession, model, chunk))
    stops, limit = _stop_ids(model, tokenizer), max_positions(model)
    size, leading = vocabulary(model), leading_tokens(tokenizer)
    values = defaultdict[str, list[float]](list)
    outputs, main_scores = list[str](), list[float]()
    truncated = 0
    with inference(model):
        for index, task in enumerate(tasks):
            full = task.prompts(tokenizer)
            for prompt in full:
                check_ids(chain(prompt.context, prompt.question, *prompt.endings), size)
            prompts = [_fit(prompt, limit, leading) for prompt in full]
            answers = [_answer(reader, prompt, stops) for prompt in prompts]
            pairs = zip(prompts, answers, strict=True)
            outputs += [decode(tokenizer, answer.tokens) for x, answer in pairs if x.num_new]
            task_scores = task.score(tokenizer, answers)
            for name, value in task_scores.items():
                values[name].append(value)
            main_scores.append(task_scores[task.scores[0]])
            truncated += prompts != full
            if progress:
                progress(index + 1, len(tasks))
    scores = {name: Score(*mean_and_se(x), len(x)) for name in SCORES if (x := values[name])}
    return TaskResult(
        num_examples=len(tasks),
        truncated=truncated,
        outputs=tuple(outputs),
        scores=scores,
        main_scores=tuple(main_scores),
    )


def _answer(reader: Reader, prompt: Prompt, stops: Collection[int | None]) -> TaskAnswer:
    reader.prefill(prompt.context)
    log_likelihoods = [reader.log_likelihood(ending) for ending in prompt.endings]
    tokens = reader.answer(prompt.question, prompt.num_new, stops) if prompt.num_new else []
    return TaskAnswer(log_likelihoods=log_likelihoods, tokens=tokens)


def _fit(prompt: Prompt, limit: int | None, leading: list[int]) -> Prompt:
    """Truncate the context of a prompt on its left, behind its `leading` tokens, so that all fits
    into `limit` positions (None: no limit)."""
    ids, following = prompt.context, prompt.num_following
    if not ids:
        raise ValueError(
            "task: empty context, and the tokenizer puts no BOS token in front; give a context"
        )
    if limit is None or len(ids) + following <= limit:
        return prompt
    available = limit - following
    prefix = leading if ids[: len(leading)] == leading else []
    if available < len(leading) + 1:
        raise ValueError(
            f"task: an answer of {following} tokens, with its question, leaves no context in"
            f" {limit}"
        )
    return replace(prompt, context=prefix + ids[len(prefix) - available :])


def _stop_ids(model: PreTrainedModel, tokenizer: Any) -> set[int | None]:
    stops = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])}
