"""Token ids of a suite's questions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from kvfold.evaluation.suites.base import Message, Question, Suite
from kvfold.utils.chat import around_message, encode_chat
from kvfold.utils.tokens import encode, encode_prompt, leading_tokens


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A question as token ids.

    context: the number of leading tokens that come before the question; 0 without a context.
    max_new_tokens, stop: of the answer. truncated: whether the message lost its middle.
    """

    ids: Sequence[int]
    context: int = 0
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    truncated: bool = False


def prompts_of(
    suite: Suite,
    questions: Sequence[Question],
    tokenizer: Any,
    *,
    max_new_tokens: int | None = None,
    length: int | None = None,
) -> list[Prompt]:
    """Encode every question, with the tokenizer's chat template if it has one.

    max_new_tokens: of every answer; None: the suite's. length: tokens of a prompt and its answer
    above which a suite that truncates does so (None: never).
    """
    encoder, prompts = Encoder(tokenizer), []
    for question in questions:
        message = suite.message(question, encoder.chat)
        limit = max_new_tokens or message.max_new_tokens or suite.max_new_tokens
        shorter = message
        if suite.truncates and length is not None:
            shorter = encoder.truncate(message, length - limit)
        ids, context = encoder.encode(shorter)
        stop = () if encoder.chat else suite.stop
        prompts.append(
            Prompt(
                ids=ids,
                context=context,
                max_new_tokens=limit,
                stop=stop,
                truncated=shorter != message,
            )
        )
    return prompts


class Encoder:
    """Encodes messages for one tokenizer. chat: whether it has a chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.chat = tokenizer, bool(tokenizer.chat_template)
        self._around = around_message(tokenizer) if self.chat else ("", "")
        self._leading = leading_tokens(tokenizer)

    def encode(self, message: Message) -> tuple[list[int], int]:
        """Token ids, and how many of them come before the question."""
        text, chat = message.question, self.chat and message.chat
        if not message.context and not message.reply:
            return (encode_chat if chat else encode_prompt)(self.tokenizer, text), 0
        leading, before, after = self._parts(message)
        if chat and not after:
            raise ValueError(
                "the model's chat template moves the user's message, so that a context cannot be "
                "told from its question: ask suites without long texts only"
            )
        begin = before + message.context
        ids = encode(self.tokenizer, begin + text + after)
        # The last tokens of the context may differ where the question follows.
        pairs = zip(ids, encode(self.tokenizer, begin), strict=False)
        context = len(leading) + sum(1 for _ in takewhile(lambda x: x[0] == x[1], pairs))
        return [*leading, *ids], context if message.context else 0

    def count(self, message: Message) -> int:
        """Tokens of a message as a prompt."""
        leading, before, after = self._parts(message)
        texts = before, message.context + message.question, after
        return len(leading) + sum(len(encode(self.tokenizer, text)) for text in texts if text)

    def _parts(self, message: Message) -> tuple[list[int], str, str]:
        """Special tokens and text before the user's message, and the text after it."""
        if not (self.chat and message.chat):
            return self._leading, "", message.reply
        before, after = self._around
        return [], before, after + message.reply

    def truncate(self, message: Message, most: int) -> Message:
        """Cut the middle of the user's message, so that its prompt has at most `most` tokens, as
        LongBench does (Bai et al. 2024). The question stays whole, unless it is longer than half of
        them."""
        around = self.count(replace(message, context="", question=""))
        text = message.context + message.question
        ids = encode(self.tokenizer, text)
        for size in range(most - around, 1, -2):  # joined, the halves may have a few more tokens
            if len(encode(self.tokenizer, text)) <= most - around:
                break
            halves = ids[: size // 2], ids[-(size // 2) :]
            text = "".join(self.tokenizer.decode(x, skip_special_tokens=True) for x in halves)
        if text.endswith(message.question):
            return replace(message, context=text.removesuffix(message.question))
        return replace(message, context="", question=text)
