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
    max_new_tokens, stop: of the answer. truncated: whether the context lost its middle.
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
    chat = bool(tokenizer.chat_template)
    length = length if suite.truncates else None
    messages = [suite.message(question, chat) for question in questions]
    return [
        _encode(
            tokenizer,
            message,
            chat and message.chat,
            length,
            max_new_tokens=max_new_tokens or message.max_new_tokens or suite.max_new_tokens,
            stop=() if chat else suite.stop,
        )
        for message in messages
    ]


def count_around(tokenizer: Any, message: Message) -> int:
    """Tokens that a chat template and the begun reply add to the user's message."""
    chat = tokenizer.chat_template and message.chat
    before, after = around_message(tokenizer) if chat else ("", "")
    leading = [] if chat else leading_tokens(tokenizer)
    texts = before, after + message.reply
    return len(leading) + sum(len(encode(tokenizer, text)) for text in texts)


def _encode(
    tokenizer: Any, message: Message, chat: bool, length: int | None, **answer: Any
) -> Prompt:
    if not message.context and not message.reply:
        text = message.question
        ids = encode_chat(tokenizer, text) if chat else encode_prompt(tokenizer, text)
        return Prompt(ids=ids, **answer)
    truncated = False
    if length is not None:
        room = length - answer["max_new_tokens"] - count_around(tokenizer, message)
        shorter = _truncate(tokenizer, message, room)
        truncated, message = shorter != message, shorter
    before, after = around_message(tokenizer) if chat else ("", "")
    if chat and not after:
        raise ValueError(
            "the model's chat template moves the user's message, so that a context cannot be told "
            "from its question: ask suites without contexts only"
        )
    leading = [] if chat else leading_tokens(tokenizer)
    begin = before + message.context
    ids = encode(tokenizer, begin + message.question + after + message.reply)
    # Tokens at the end of the context may differ where the question follows.
    pairs = zip(ids, encode(tokenizer, begin), strict=False)
    context = sum(1 for _ in takewhile(lambda x: x[0] == x[1], pairs)) if message.context else 0
    context += len(leading) if context else 0
    return Prompt(ids=[*leading, *ids], context=context, truncated=truncated, **answer)


def _truncate(tokenizer: Any, message: Message, room: int) -> Message:
    """Cut the middle of the user's message, so that it has at most `room` tokens, as LongBench does
    (Bai et al. 2024). The question stays whole, unless it is longer than half of them."""
    text = message.context + message.question
    ids = encode(tokenizer, text)
    for most in range(room, 1, -2):  # the halves may have a few more tokens once they are joined
        if len(encode(tokenizer, text)) <= room:
            break
        halves = ids[: most // 2], ids[-(most // 2) :]
        text = "".join(tokenizer.decode(half, skip_special_tokens=True) for half in halves)
    if text.endswith(message.question):
        return replace(message, context=text.removesuffix(message.question))
    return replace(message, context="", question=text)
