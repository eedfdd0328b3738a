"""A prompt that is continued greedily."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvfold.evaluation.tasks.base import Answer, Prompt, Task, decode, require
from kvfold.utils.tokens import encode, encode_prompt


@dataclass(frozen=True, kw_only=True)
class WrittenTask(Task):
    """A row whose answer is written greedily; `max_new_tokens` None means as many tokens as the
    answer has. Of several answers all are wanted, in any order (RULER's values and variables)."""

    scores = ("exact_match", "contains")

    answer: str | tuple[str, ...]
    max_new_tokens: int | None = None

    @abstractmethod
    def prompt_for(self, tokenizer: Any, num_new: int) -> Prompt:
        """The row's prompt, of which `num_new` tokens are wanted."""

    def prompts(self, tokenizer: Any) -> list[Prompt]:
        return [self.prompt_for(tokenizer, max(self._lengths(tokenizer)))]

    def score(self, tokenizer: Any, answers: Sequence[Answer]) -> dict[str, float]:
        """exact_match: the text equals the answer, or several with commas between them; contains:
        the share of answers that are in it."""
        (answer,) = answers
        texts = (decode(tokenizer, answer.tokens[:n]) for n in self._lengths(tokenizer))
        exact, text = self._written.strip() in texts, decode(tokenizer, answer.tokens)
        found = [wanted.strip() in text for wanted in self._answers]
        return {"exact_match": float(exact), "contains": sum(found) / len(found)}

    @property
    def _answers(self) -> tuple[str, ...]:
        return (self.answer,) if isinstance(self.answer, str) else self.answer

    @property
    def _written(self) -> str:
        return ", ".join(self._answers)

    def _lengths(self, tokenizer: Any) -> set[int]:
        """Numbers of new tokens after which the text may equal the answer."""
        if self.max_new_tokens is not None:
            return {self.max_new_tokens}
        # A model that writes " 42" after "is:" needs the space's tokens even if the answer is "42".
        texts = (self._written, " " + self._written.strip())
        return {len(encode(tokenizer, text)) for text in texts}


def answer_of(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A row's `answer` and `max_new_tokens`. Raises ValueError as `Task.parse`."""
    answer, limit = row["answer"], row.get("max_new_tokens")
    each = answer if isinstance(answer, list) and answer else [answer]
    filled = all(isinstance(x, str) and x.strip() for x in each)
    require(filled, where, "answer", answer, "a string that is not blank, or a list of such")
    positive = limit is None or (type(limit) is int and limit > 0)
    require(positive, where, "max_new_tokens", limit, "a positive integer")
    return {"answer": answer if isinstance(answer, str) else tuple(each), "max_new_tokens": limit}


@dataclass(frozen=True, kw_only=True)
class GenerationTask(WrittenTask):
    """Continue `prompt` greedily."""

    legal = '{"prompt", "answer"[, "max_new_tokens"]}'

    prompt: str

    @classmethod
    def fits(cls, keys: set[str]) -> bool:
        return {"prompt", "answer"} <= keys

    @classmethod
    def parse(cls, row: Mapping[str, Any], where: str) -> Self:
        require(isinstance(row["prompt"], str), where, "prompt", row["prompt"], "a string")
        return cls(prompt=row["prompt"], **answer_of(row, where))

    def prompt_for(self, tokenizer: Any, num_new: int) -> Prompt:
        return Prompt(context=encode_prompt(tokenizer, self.prompt), num_new=num_new)
