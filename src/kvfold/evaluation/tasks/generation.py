"""Prompts that the model continues greedily."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvfold.evaluation.tasks.base import Prompt, Task, TaskAnswer, decode, require
from kvfold.utils.tokens import encode, encode_prompt


@dataclass(frozen=True, kw_only=True)
class GreedyTask(Task):
    """A task whose answer is generated greedily.

    answer: the expected text, or several texts, which must all be generated, in any order (RULER's
    values and variables). max_new_tokens: None: as many tokens as the answer has.
    """

    scores = ("exact_match", "contains")

    answer: str | tuple[str, ...]
    max_new_tokens: int | None = None

    @abstractmethod
    def prompt_for(self, tokenizer: Any, num_new: int) -> Prompt:
        """The prompt after which `num_new` tokens are generated."""

    def prompts(self, tokenizer: Any) -> list[Prompt]:
        return [self.prompt_for(tokenizer, max(self._lengths(tokenizer)))]

    def score(self, tokenizer: Any, answers: Sequence[TaskAnswer]) -> dict[str, float]:
        """exact_match: the generated text equals the answer, or all answers joined by commas;
        contains: the share of answers that it contains."""
        (answer,) = answers
        texts = (decode(tokenizer, answer.tokens[:n]) for n in self._lengths(tokenizer))
        exact, text = self._joined.strip() in texts, decode(tokenizer, answer.tokens)
        contained = [expected.strip() in text for expected in self._answers]
        return {"exact_match": float(exact), "contains": sum(contained) / len(contained)}

    @property
    def _answers(self) -> tuple[str, ...]:
        return (self.answer,) if isinstance(self.answer, str) else self.answer

    @property
    def _joined(self) -> str:
        return ", ".join(self._answers)

    def _lengths(self, tokenizer: Any) -> set[int]:
        """The numbers of new tokens after which the text may equal the answer."""
        if self.max_new_tokens is not None:
            return {self.max_new_tokens}
        # A model that writes " 42" after "is:" needs the space's tokens even if the answer is "42".
        texts = (self._joined, " " + self._joined.strip())
        return {len(encode(tokenizer, text)) for text in texts}


def parse_answer(example: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check an example's `answer` and `max_new_tokens`. Raises ValueError as `Task.parse`."""
    answer, limit = example["answer"], example.get("max_new_tokens")
    answers = answer if isinstance(answer, list) and answer else [answer]
    filled = all(isinstance(x, str) and x.strip() for x in answers)
    require(filled, where, "answer", answer, "a string that is not blank, or a list of such")
    positive = limit is None or (type(limit) is int and limit > 0)
    require(positive, where, "max_new_tokens", limit, "a positive integer")
    expected = answer if isinstance(answer, str) else tuple(answers)
    return {"answer": expected, "max_new_tokens": limit}


@dataclass(frozen=True, kw_only=True)
class GenerationTask(GreedyTask):
    """The model continues `prompt` greedily, for as many tokens as the answer has, or
    `max_new_tokens`. Right if the text equals `answer` (`exact_match`), or contains it
    (`contains`)."""

    legal = '{"prompt", "answer"[, "max_new_tokens"]}'
    example: ClassVar = {"prompt": "One, two, three,", "answer": "four"}

    prompt: str

    @classmethod
    def fits(cls, keys: set[str]) -> bool:
        return {"prompt", "answer"} <= keys

    @classmethod
    def parse(cls, example: Mapping[str, Any], where: str) -> Self:
        prompt = example["prompt"]
        require(isinstance(prompt, str), where, "prompt", prompt, "a string")
        return cls(prompt=prompt, **parse_answer(example, where))

    def prompt_for(self, tokenizer: Any, num_new: int) -> Prompt:
        return Prompt(context=encode_prompt(tokenizer, self.prompt), num_new=num_new)
