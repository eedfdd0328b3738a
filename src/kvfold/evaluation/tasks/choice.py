"""Multiple choice by log-likelihood."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvfold.evaluation.tasks.base import Answer, Prompt, Task, require
from kvfold.utils.tokens import encode_start


@dataclass(frozen=True, kw_only=True)
class ChoiceTask(Task):
    """Pick one of `choices`, each after its own entry of `contexts`; `label` is the right index."""

    legal = '{"context"|"contexts", "choices", "label"}'
    scores = ("accuracy", "accuracy_per_byte")

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    label: int

    @classmethod
    def fits(cls, keys: set[str]) -> bool:
        return {"choices", "label"} <= keys and ("context" in keys) != ("contexts" in keys)

    @classmethod
    def parse(cls, row: Mapping[str, Any], where: str) -> Self:
        choices, label = row["choices"], row["label"]
        several = _strings(choices) and len(choices) > 1 and all(choices)
        require(several, where, "choices", choices, "a list of two or more strings, none empty")
        inside = type(label) is int and 0 <= label < len(choices)
        require(inside, where, "label", label, f"an integer from 0 to {len(choices) - 1}")
        key = "contexts" if "contexts" in row else "context"
        contexts = row[key] if key == "contexts" else [row[key]] * len(choices)
        matched = _strings(contexts) and len(contexts) == len(choices)
        require(matched, where, key, row[key], "a string (one a choice for contexts)")
        return cls(contexts=tuple(contexts), choices=tuple(choices), label=label)

    def _shared(self) -> Iterator[tuple[str, list[int]]]:
        """Every context, and the indices of the choices that follow it."""
        for context in dict.fromkeys(self.contexts):
            yield context, [i for i, own in enumerate(self.contexts) if own == context]

    def prompts(self, tokenizer: Any) -> list[Prompt]:
        found = []
        for context, members in self._shared():
            choices = [self.choices[i] for i in members]
            shared, endings = split_choices(tokenizer, context, choices)
            found.append(Prompt(context=shared, endings=endings))
        return found

    def score(self, tokenizer: Any, answers: Sequence[Answer]) -> dict[str, float]:
        """accuracy: the likeliest choice is the label's; accuracy_per_byte: by utf-8 byte."""
        scores = [0.0] * len(self.choices)
        for (_, members), answer in zip(self._shared(), answers, strict=True):
            for i, value in zip(members, answer.log_likelihoods, strict=True):
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
    """Ids that `context` shares with every context + choice, and the ids that follow in each.

    The joint texts are tokenised; a token that spans the border counts with the choices.
    """
    wholes = [encode_start(tokenizer, context + choice) for choice in choices]
    shared = encode_start(tokenizer, context)
    for whole in wholes:
        same = [a == b for a, b in zip(shared, whole, strict=False)]
        shared = shared[: same.index(False) if False in same else len(same)]
    endings = [whole[len(shared) :] for whole in wholes]
    if not all(endings):
        raise ValueError(f"task: one of the choices {choices} adds no token to its context")
    return shared, endings
