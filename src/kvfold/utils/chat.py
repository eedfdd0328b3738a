"""Write conversations by a tokenizer's chat template, bounded in time and memory."""

from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

from kvfold.utils.bounded import bounded
from kvfold.utils.tokens import check_text, encode

ROLES = ("system", "user", "assistant", "tool")
TEMPLATE_SECONDS, TEMPLATE_BYTES = 10.0, 2**30  # bounds for writing a conversation
# Before a chat template, so that it is none of those that transformers has compiled for others.
COMMENT = "{# kvfold +#}"


def encode_chat(
    tokenizer: Any, messages: str | Sequence[Mapping[str, Any]], /, **variables: Any
) -> list[int]:
    """Token ids of a conversation as `render_chat` writes it."""
    return encode(tokenizer, render_chat(tokenizer, messages, **variables))


def render_chat(
    tokenizer: Any,
    messages: str | Sequence[Mapping[str, Any]],
    /,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Write a conversation by the tokenizer's chat template, up to where the answer begins.

    messages: {"role": one of ROLES, "content": text} each, or the text of one user message. Other
        keys, such as `tool_calls`, are the template's.
    add_generation_prompt: end where the answer begins.
    continue_final_message: end inside the last message instead.
    tools: functions that the model may call, as OpenAI's API has them.
    variables: of the template, such as `enable_thinking`; not parameters of `apply_chat_template`.

    Raises ValueError for other arguments, a tokenizer without a chat template, and messages that
    the template refuses; SettingError for text that is not valid (variables are called
    `chat_template_kwargs` there).
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: this model continues text only")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    _check_messages(messages)
    for text in _texts(variables):
        check_text("chat_template_kwargs", text)
    for text in _texts(tools or ()):
        check_text("tools", text)
    known = signature(tokenizer.apply_chat_template).parameters.keys() | {"messages", "self"}
    if taken := variables.keys() & known:
        raise ValueError(f"{min(taken)} is no variable of a chat template; leave it out")
    how: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt and not continue_final_message,
        "continue_final_message": continue_final_message,
    }
    if tools:
        how["tools"] = [dict(x) for x in tools]
    return apply_template(tokenizer, [dict(x) for x in messages], **how, **variables)


def apply_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], /, **how: Any) -> str:
    """What a tokenizer's chat template writes. Raises ValueError for whatever it raises, which of a
    template with a mistake in it is any class of error, and for one that does not end."""
    try:
        from transformers.utils import chat_template_utils  # with jinja2, which texts do without

        from kvfold.utils.template_sandbox import bounded_templates

        def write() -> str:
            template = COMMENT + tokenizer.get_chat_template(tools=how.get("tools"))
            settings = {"chat_template": template, "tokenize": False} | how
            return str(tokenizer.apply_chat_template(messages, **settings))

        with bounded_templates(chat_template_utils):  # outside of what may end at any step
            return bounded(TEMPLATE_SECONDS, TEMPLATE_BYTES, write)
    except Exception as error:
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"messages: the model's chat template refuses them: {why}") from error


def around_message(tokenizer: Any) -> tuple[str, str]:
    """The texts that the tokenizer's chat template writes before a user's message, and between it
    and the answer. The second is empty if the template moves the message."""
    mark = "\x00"
    messages = [{"role": "user", "content": mark}]
    before, _, after = apply_template(tokenizer, messages, add_generation_prompt=True).partition(
        mark
    )
    return before, after


def reply_words(tokenizer: Any) -> str:
    """The text between a user's message and the answer in the tokenizer's chat template; a newline
    if there is no template, or if it moves the message."""
    return (around_message(tokenizer)[1] if tokenizer.chat_template else "") or "\n"


def _check_messages(messages: Any) -> None:
    legal = f'{{"role": {" or ".join(ROLES)}, "content": text}}'
    if not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a text or a list of {legal}; got {messages!r}")
    for number, message in enumerate(messages):
        if (
            not isinstance(message, Mapping)
            or message.get("role") not in ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise ValueError(f"messages[{number}] must be {legal}; got {message!r}")
        for text in _texts(message):
            check_text("content", text)


def _texts(root: Any) -> Iterator[str]:
    """All strings in nested mappings and lists."""
    remaining = [root]
    while remaining:
        value = remaining.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            remaining += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            remaining += value
