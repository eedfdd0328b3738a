"""Questions that come after their context was compressed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvfold.evaluation.tasks.base import Prompt, require
from kvfold.evaluation.tasks.generation import GreedyTask, parse_answer
from kvfold.utils.tokens import encode, leading_tokens

OTHER_KINDS = {"prompt", "choices"}  # an example with one of these keys is of another kind


@dataclass(frozen=True, kw_only=True)
class LateQuestionTask(GreedyTask):
    """The model reads `context`, the cache compresses it, and only then the model reads `question`
    and answers greedily. Scored as examples with a `prompt` are. A chat's special tokens must be
    part of both texts."""

    # The two are tokenised separately. A BOS token that a chat template wrote into the context is
    # not added a second time.

    legal = '{"context", "question", "answer"[, "max_new_tokens"]}'
    example: ClassVar = {
        "context": "The magic number is: 48213. The ship sails at noon.",
        "question": " The magic number is:",
        "answer": "48213",
    }

    context: str
    question: str

    @classmethod
    def fits(cls, keys: set[str]) -> bool:
        return {"context", "question", "answer"} <= keys and not keys & OTHER_KINDS

    @classmethod
    def parse(cls, example: Mapping[str, Any], where: str) -> Self:
        for key in ("context", "question"):
            filled = isinstance(example[key], str) and bool(example[key].strip())
            require(filled, where, key, example[key], "a string that is not blank")
        return cls(
            context=example["context"], question=example["question"], **parse_answer(example, where)
        )

    def prompt_for(self, tokenizer: Any, num_new: int) -> Prompt:
        context, question = (encode(tokenizer, x) for x in (self.context, self.question))
        leading = leading_tokens(tokenizer)
        if context[: len(leading)] != leading:
            context = leading + context
        return Prompt(context=context, question=question, num_new=num_new)
