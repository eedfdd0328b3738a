"""Multiple-choice questions, answered by log-likelihood."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvfold.evaluation.tasks.base import Prompt, Task, TaskAnswer, require
from kvfold.utils.tokens import encode_start


@dataclass(frozen=True, kw_only=True)
class ChoiceTask(Task):
    """The model picks the most likely one of `choices` after `context`, or after the one of
    `contexts` with the same index. Right if that is the choice at index `label`."""

    example: ClassVar = {
        "context": "The sun rises in the",
        "choices": [" east.", " kettle."],
        "label": 0,
    }
    legal = '{"context"|"contexts", "choices", "label"}'
    scores = ("accuracy", "accuracy_per_byte")

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    label: int

    @classmethod
    def fits(cls, keys: set[str]) -> bool:
        return {"choices", "label"} <= keys and ("context" in keys) != ("contexts" in keys)

    @classmethod
    def parse(cls, example: Mapping[str, Any], where: str) -> Self:
        choices, label = example["choices"], example["label"]
        several = _strings(choices) and len(choices) > 1 and all(choices)
        require(several, where, "choices", choices, "a list of two or more strings, none empty")
        in_range = type(label) is int and 0 <= label < len(choices)
        require(in_range, where, "label", label, f"an integer from 0 to {len(choices) - 1}")
        key = "contexts" if "contexts" in example else "context"
        contexts = example[key] if key == "contexts" else [example[key]] * len(choices)
        matched = _strings(contexts) and len(contexts) == len(choices)
        require(matched, where, key, example[key], "a string (one a choice for contexts)")
        return cls(contexts=tuple(contexts), choices=tuple(choices), label=label)

    @property
    def guessed(self) -> float:
        return 1 / len(self.choices)

    def _by_context(self) -> Iterator[tuple[str, list[int]]]:
        """Each distinct context, and the indices of the choices that follow it."""
        for context in dict.fromkeys(self.contexts):
            yield context, [i for i, other in enumerate(self.contexts) if other == context]

    def prompts(self, tokenizer: Any) -> list[Prompt]:
        prompts = []
        for context, indices in self._by_context():
            choices = [self.choices[i] for i in indices]
            shared, endings = split_choices(tokenizer, context, choices)
            prompts.append(Prompt(context=shared, endings=endings))
        return prompts

    def score(self, tokenizer: Any, answers: Sequence[TaskAnswer]) -> dict[str, float]:
        """accuracy: whether the choice at `label` is the most likely one; accuracy_per_byte: the
        same with each log-likelihood divided by the UTF-8 bytes of its choice."""
        scores = [0.0] * len(self.choices)
        for (_, indices), answer in zip(self._by_context(), answers, strict=True):
            for i, value in zip(indices, answer.log_likelihoods, strict=True):
                scores[i] = value
        per_byte = [s / len(c.encode()) for s, c in zip(scores, self.choices, strict=True)]
        best, best_per_byte = (values.index(max(values)) for values in (scores, per_byte))
        return {
            "accuracy": float(best == self.label),
            "accuracy_per_byte": float(best_per_byte == self.label),
        }


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def split_choices(
    tokenizer: Any, context: str, choices: list[str]
) -> tuple[list[int], list[list[int]]]:
    """Tokenise each context + choice, and split them into the ids that all share with `context`
    and the ids that follow.

    A token that spans the border between context and choice counts as part of the choice.
    """
    wholes = [encode_start(tokenizer, context + choice) for choice in choices]
    shared = encode_start(tokenizer, context)
    for whole in wholes:
        equal = [a == b for a, b in zip(shared, whole, strict=False)]
        shared = shared[: equal.index(False) if False in equal else len(equal)]
    endings = [whole[len(shared) :] for whole in wholes]
    if not all(endings):
        raise ValueError(f"task: one of the choices {choices} adds no token to its context")
    return shared, endings
