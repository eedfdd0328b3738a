"""A question about a context that was compressed before anyone asked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvfold.evaluation.tasks.base import Prompt, require
from kvfold.evaluation.tasks.generation import WrittenTask, answer_of
from kvfold.utils.tokens import encode, leading_tokens

OTHERS = {"prompt", "choices"}  # a row with these is of another kind, whatever else it carries


@dataclass(frozen=True, kw_only=True)
class AskedTask(WrittenTask):
    """Read `context`, compress it, then read `question` and continue greedily.

    Both are plain text, tokenised apart: a chat's marks belong into them. A BOS token that a chat
    template wrote into the context is not put in front a second time.
    """

    legal = '{"context", "question", "answer"[, "max_new_tokens"]}'

    context: str
    question: str

    @classmethod
    def fits(cls, keys: set[str]) -> bool:
        return {"context", "question", "answer"} <= keys and not keys & OTHERS

    @classmethod
    def parse(cls, row: Mapping[str, Any], where: str) -> Self:
        for key in ("context", "question"):
            filled = isinstance(row[key], str) and bool(row[key].strip())
            require(filled, where, key, row[key], "a string that is not blank")
        return cls(context=row["context"], question=row["question"], **answer_of(row, where))

    def prompt_for(self, tokenizer: Any, num_new: int) -> Prompt:
        context, question = (encode(tokenizer, x) for x in (self.context, self.question))
        leading = leading_tokens(tokenizer)
        if context[: len(leading)] != leading:
            context = leading + context
        return Prompt(context=context, question=question, num_new=num_new)
