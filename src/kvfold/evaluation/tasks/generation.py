"""A prompt that is continued greedily."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from kvfold.evaluation.tasks.base import Answer, Prompt, Task, decode, require
from kvfold.text import encode, encode_prompt


@dataclass(frozen=True, kw_only=True)
class GenerationTask(Task):
    """Continue `prompt` greedily; `max_new_tokens` None means as many tokens as the answer has."""

    legal = '{"prompt", "answer"[, "max_new_tokens"]}'
    scores = ("exact_match", "contains")

    prompt: str
    answer: str
    max_new_tokens: int | None = None

    @classmethod
    def fits(cls, keys: set[str]) -> bool:
        return {"prompt", "answer"} <= keys

    @classmethod
    def parse(cls, row: Mapping[str, Any], where: str) -> Self:
        prompt, answer, limit = row["prompt"], row["answer"], row.get("max_new_tokens")
        require(isinstance(prompt, str), where, "prompt", prompt, "a string")
        filled = isinstance(answer, str) and bool(answer.strip())
        require(filled, where, "answer", answer, "a string that is not blank")
        positive = limit is None or (type(limit) is int and limit > 0)
        require(positive, where, "max_new_tokens", limit, "a positive integer")
        return cls(prompt=prompt, answer=answer, max_new_tokens=limit)

    def prompts(self, tokenizer: Any) -> list[Prompt]:
        context = encode_prompt(tokenizer, self.prompt)
        return [Prompt(context=context, num_new=max(self._lengths(tokenizer)))]

    def score(self, tokenizer: Any, answers: Sequence[Answer]) -> dict[str, float]:
        """exact_match: the text equals the answer; contains: the answer is in it."""
        (answer,), wanted = answers, self.answer.strip()
        texts = (decode(tokenizer, answer.tokens[:n]) for n in self._lengths(tokenizer))
        exact, text = wanted in texts, decode(tokenizer, answer.tokens)
        return {"exact_match": float(exact), "contains": float(wanted in text)}

    def _lengths(self, tokenizer: Any) -> set[int]:
        """Numbers of new tokens after which the text may equal the answer."""
        if self.max_new_tokens is not None:
            return {self.max_new_tokens}
        # A model that writes " 42" after "is:" needs the space's tokens even if the answer is "42".
        texts = (self.answer, " " + self.answer.strip())
        return {len(encode(tokenizer, text)) for text in texts}
