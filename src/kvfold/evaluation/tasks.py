"""Downstream tasks from JSONL files, answered through the cache.

Shape legend: T tokens fed, V vocabulary; every tensor holds one sequence.

A row either generates or chooses (`LEGAL_KEYS`); other keys, which many data sets carry along, are
ignored.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, DynamicLayer, PreTrainedModel

from kvfold.evaluation.perplexity import (
    Progress,
    forward_chunks,
    inference,
    max_positions,
    mean_and_se,
    token_nll,
)
from kvfold.text import encode, encode_prompt, read_text

LEGAL_KEYS = (
    '{"prompt", "answer"[, "max_new_tokens"]} or {"context"|"contexts", "choices", "label"}'
)


@dataclass(frozen=True, kw_only=True)
class GenerationTask:
    """Continue `prompt` greedily; `max_new_tokens` None means as many tokens as the answer has."""

    prompt: str
    answer: str
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class ChoiceTask:
    """Pick one of `choices`, each after its own entry of `contexts`; `label` is the right index."""

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    label: int


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Fractions of rows with standard errors; None where no row is of that kind.

    `accuracy` goes by the summed log-likelihood of a choice, `accuracy_per_byte` divides it by the
    choice's utf-8 bytes. `truncated` counts rows whose context lost tokens on its left; `outputs`
    holds the generated texts.
    """

    rows: int
    truncated: int
    outputs: tuple[str, ...]
    exact_match: float | None = None
    exact_match_se: float | None = None
    contains: float | None = None
    contains_se: float | None = None
    accuracy: float | None = None
    accuracy_se: float | None = None
    accuracy_per_byte: float | None = None
    accuracy_per_byte_se: float | None = None


def read_tasks(path: str | Path) -> list[GenerationTask | ChoiceTask]:
    """Rows of a .jsonl, .jsonl.gz or .jsonl.xz file; blank lines are skipped.

    Raises ValueError naming file, line, the keys received and the legal sets of keys.
    """
    lines = enumerate(read_text(path).split("\n"), start=1)
    return [_parse(line, f"{path} line {i}") for i, line in lines if line.strip()]


def _parse(line: str, where: str) -> GenerationTask | ChoiceTask:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        row = None
    if not isinstance(row, dict):
        raise ValueError(f"task {where}: not a JSON object; legal rows: {LEGAL_KEYS}")
    generates = {"prompt", "answer"} <= row.keys()
    chooses = {"choices", "label"} <= row.keys() and ("context" in row) != ("contexts" in row)
    if generates == chooses:
        keys = ", ".join(row) or "none"
        raise ValueError(f"task {where}: keys {keys}; legal rows: {LEGAL_KEYS}")
    return _generation(row, where) if generates else _choice(row, where)


def _generation(row: dict[str, Any], where: str) -> GenerationTask:
    prompt, answer, limit = row["prompt"], row["answer"], row.get("max_new_tokens")
    _require(isinstance(prompt, str), where, "prompt", prompt, "a string")
    filled = isinstance(answer, str) and bool(answer.strip())
    _require(filled, where, "answer", answer, "a string that is not blank")
    positive = limit is None or (type(limit) is int and limit > 0)
    _require(positive, where, "max_new_tokens", limit, "a positive integer")
    return GenerationTask(prompt=prompt, answer=answer, max_new_tokens=limit)


def _choice(row: dict[str, Any], where: str) -> ChoiceTask:
    choices, label = row["choices"], row["label"]
    several = _strings(choices) and len(choices) > 1 and all(choices)
    _require(several, where, "choices", choices, "a list of two or more strings, none empty")
    inside = type(label) is int and 0 <= label < len(choices)
    _require(inside, where, "label", label, f"an integer from 0 to {len(choices) - 1}")
    field = "contexts" if "contexts" in row else "context"
    contexts = row[field] if field == "contexts" else [row[field]] * len(choices)
    matched = _strings(contexts) and len(contexts) == len(choices)
    _require(matched, where, field, row[field], "a string (one a choice for contexts)")
    return ChoiceTask(contexts=tuple(contexts), choices=tuple(choices), label=label)


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _require(ok: bool, where: str, field: str, value: Any, legal: str) -> None:
    if not ok:
        raise ValueError(f"task {where}: {field} is {str(value)[:60]!r}; it must be {legal}")


@dataclass(frozen=True, kw_only=True)
class _Run:
    model: PreTrainedModel
    tokenizer: Any
    chunk: int
    new_cache: Callable[[], DynamicCache]


def run_tasks(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: Sequence[GenerationTask | ChoiceTask],
    *,
    chunk: int = 512,
    new_cache: Callable[[], DynamicCache] | None = None,
    progress: Progress | None = None,
) -> TaskResult:
    """Answer all `tasks` with prefill in chunks through a `DynamicCache`, of `new_cache` if given.

    A context that does not fit the model's positions loses tokens on its left, after BOS.
    `progress(done, total)` counts rows. Raises ValueError for an answer that alone does not fit.
    """
    new_cache = new_cache or partial(DynamicCache, config=model.config)
    run = _Run(model=model, tokenizer=tokenizer, chunk=chunk, new_cache=new_cache)
    scores = defaultdict[str, list[float]](list)
    outputs: list[str] = []
    truncated = 0
    with inference(model):
        for index, task in enumerate(tasks):
            if isinstance(task, GenerationTask):
                output, row, cut = _answer(run, task)
                outputs.append(output)
            else:
                row, cut = _pick(run, task)
            for name, right in row.items():
                scores[name].append(float(right))
            truncated += cut
            if progress:
                progress(index + 1, len(tasks))
    means: dict[str, float] = {}
    for name, values in scores.items():
        means[name], means[name + "_se"] = mean_and_se(values)
    return TaskResult(rows=len(tasks), truncated=truncated, outputs=tuple(outputs), **means)


def _answer(run: _Run, task: GenerationTask) -> tuple[str, dict[str, bool], bool]:
    """Generated text, its scores, and whether the prompt was truncated."""
    lengths = _answer_lengths(run.tokenizer, task)
    prompt, cut = _fit(run, encode_prompt(run.tokenizer, task.prompt), max(lengths))
    tokens = _greedy(run, prompt, max(lengths))
    wanted = task.answer.strip()
    exact = any(_decode(run.tokenizer, tokens[:length]) == wanted for length in lengths)
    text = _decode(run.tokenizer, tokens)
    return text, {"exact_match": exact, "contains": wanted in text}, cut


def _answer_lengths(tokenizer: Any, task: GenerationTask) -> set[int]:
    """Numbers of new tokens after which the text may equal the answer."""
    if task.max_new_tokens is not None:
        return {task.max_new_tokens}
    # A model that writes " 42" after "is:" needs the space's tokens even if the answer is "42".
    texts = (task.answer, " " + task.answer.strip())
    return {len(encode(tokenizer, text)) for text in texts}


def _decode(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True).strip()


def _fit(run: _Run, ids: list[int], reserve: int) -> tuple[list[int], bool]:
    """Last tokens of `ids` that leave room for `reserve` more, BOS kept; and whether any went."""
    if not ids:
        raise ValueError("task: empty context and no BOS token to start from; give a context")
    limit = max_positions(run.model)
    if limit is None or len(ids) + reserve <= limit:
        return ids, False
    room = limit - reserve
    if room < 2:
        raise ValueError(f"task: an answer of {reserve} tokens leaves no context in {limit}")
    has_bos = ids[0] == run.tokenizer.bos_token_id
    return (ids[:1] + ids[1 - room :] if has_bos else ids[-room:]), True


def _prefill(run: _Run, ids: list[int]) -> tuple[DynamicCache, Tensor]:
    """Cache of `ids` and the logits [1, 1, V] of its last position."""
    cache = run.new_cache()
    for _, logits in forward_chunks(run.model, torch.tensor([ids]), cache, run.chunk):
        last = logits[:, -1:]
    return cache, last


def _greedy(run: _Run, prompt: list[int], num_new: int) -> list[int]:
    """Up to `num_new` most likely tokens after `prompt`; stops before an end-of-text token."""
    stops = _stop_ids(run)
    cache, logits = _prefill(run, prompt)
    tokens: list[int] = []
    while (token := int(logits[0, -1].argmax())) not in stops:
        tokens.append(token)
        if len(tokens) == num_new:
            break
        _, logits = next(forward_chunks(run.model, torch.tensor([[token]]), cache, 1))
    return tokens


def _stop_ids(run: _Run) -> set[int | None]:
    stops = run.model.generation_config.eos_token_id
    return {run.tokenizer.eos_token_id, *(stops if isinstance(stops, list) else [stops])}


def _pick(run: _Run, task: ChoiceTask) -> tuple[dict[str, bool], bool]:
    """Whether the likeliest choice is the label, and whether a context was truncated."""
    scores = [0.0] * len(task.choices)
    truncated = False
    for context in dict.fromkeys(task.contexts):
        members = [i for i, own in enumerate(task.contexts) if own == context]
        values, cut = _choice_scores(run, context, [task.choices[i] for i in members])
        truncated |= cut
        for i, value in zip(members, values, strict=True):
            scores[i] = value
    per_byte = [s / len(c.encode()) for s, c in zip(scores, task.choices, strict=True)]
    best, best_per_byte = (values.index(max(values)) for values in (scores, per_byte))
    row = {"accuracy": best == task.label, "accuracy_per_byte": best_per_byte == task.label}
    return row, truncated


def _choice_scores(run: _Run, context: str, choices: list[str]) -> tuple[list[float], bool]:
    """Summed log-likelihood in nats of each choice after one shared prefill of `context`."""
    shared, endings = split_choices(run.tokenizer, context, choices)
    prefix, cut = _fit(run, shared, max(map(len, endings)))
    cache, first = _prefill(run, prefix)
    scores = []
    for ending, branch in zip(endings, _branches(cache, endings), strict=True):
        fed = torch.tensor([ending[:-1]], dtype=torch.long)
        rest = [logits for _, logits in forward_chunks(run.model, fed, branch, run.chunk)]
        nll = token_nll(torch.cat([first, *rest], dim=1), torch.tensor([ending]))
        scores.append(-float(nll.sum()))
    return scores, cut


def _branches(cache: DynamicCache, endings: list[list[int]]) -> Iterator[DynamicCache]:
    """The prefilled cache once per ending, without what the ending before it appended."""
    if all(type(layer) is DynamicLayer for layer in cache.layers):
        for ending in endings:
            yield cache
            cache.crop(1 - len(ending))
    else:  # a sliding window has dropped tokens that a crop would need back
        yield from (copy.deepcopy(cache) for _ in endings)


def split_choices(
    tokenizer: Any, context: str, choices: list[str]
) -> tuple[list[int], list[list[int]]]:
    """Ids that `context` shares with every context + choice, and the ids that follow in each.

    The joint texts are tokenised; a token that spans the border counts with the choices.
    """
    wholes = [encode_prompt(tokenizer, context + choice) for choice in choices]
    shared = encode_prompt(tokenizer, context)
    for whole in wholes:
        same = [a == b for a, b in zip(shared, whole, strict=False)]
        shared = shared[: same.index(False) if False in same else len(same)]
    endings = [whole[len(shared) :] for whole in wholes]
    if not all(endings):
        raise ValueError(f"task: one of the choices {choices} adds no token to its context")
    return shared, endings
