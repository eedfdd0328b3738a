"""The reasoning of models that think before they answer: <think>...</think>, then the answer.

Qwen 3 writes both tags, unless its chat template has closed them in the prompt. Chat templates of
DeepSeek-R1 end the prompt with the first tag.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from kvfold.engine.requests.request import SamplingParams
from kvfold.server.tools.base import Json, overlap, regex_format, schema_format

OPEN, CLOSE = "<think>", "</think>"
TAIL_TOKENS = 16  # last tokens of a prompt, which hold a tag that the chat template wrote
# Where an answer begins: inside the reasoning, after it, or where the model may begin to reason.
Phase = Literal["inside", "after", "before"]
ANY_REASONING: Json = {"type": "any_text"}


def can_reason(template: str, tokenizer: Any) -> bool:
    """Whether a model thinks in tags, by its chat template or its tokenizer's added tokens."""
    if CLOSE in template:
        return True
    added = added_tokens(tokenizer)
    return OPEN in added and CLOSE in added


def added_tokens(tokenizer: Any) -> Mapping[str, int]:
    """Ids of the tokens that were added to a vocabulary, such as tags, by their text."""
    added: Mapping[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return added


def phase_of(tail: str, continued: str | None) -> Phase:
    """Where an answer begins.

    tail: the end of the prompt, with its special tokens. continued: the text of the last message,
        if the answer continues it.
    """
    if continued is not None:
        opened, closed = continued.rfind(OPEN), continued.rfind(CLOSE)
        return "before" if opened == closed else "inside" if opened > closed else "after"
    end = tail.rstrip()
    return "inside" if end.endswith(OPEN) else "after" if end.endswith(CLOSE) else "before"


class ReasoningReader:
    """Splits an answer into its reasoning and its content, as it comes.

    White space around the reasoning, and before content that follows it, is left out.

    has_reasoned: whether the answer had reasoning so far, if only its tags.
    """

    def __init__(self, phase: Phase) -> None:
        self._phase: Phase = phase
        self._buffer = ""  # text that was not read yet
        self._may_open = phase != "after"  # nothing but white space came, or part of the tag
        self._strips = False  # whether white space is left out before the next text
        self.has_reasoned = phase == "inside"

    def feed(self, text: str, *, last: bool) -> tuple[str, str]:
        """What the next part of the text adds to the reasoning and to the content. last: the text
        ends here."""
        self._buffer += text
        if self._may_open:
            begun = self._buffer.lstrip()
            if not last and len(begun) < len(OPEN) and OPEN.startswith(begun):
                return "", ""
            self._open(begun)
        reasoning = self._read_reasoning(last) if self._phase == "inside" else ""
        return reasoning, self._read_content() if self._phase == "after" else ""

    def _open(self, begun: str) -> None:
        self._may_open = False
        if begun.startswith(OPEN):  # also after a prompt that has the tag
            self._phase, self._buffer, self.has_reasoned = "inside", begun[len(OPEN) :], True
        elif self._phase == "before":
            self._phase = "after"
        self._strips = self._phase == "inside"

    def _read_reasoning(self, last: bool) -> str:
        text, tag, rest = self._buffer.partition(CLOSE)
        if not tag:
            held = 0 if last else overlap(text, CLOSE)
            text = text[: len(text) - held].rstrip()  # white space before the tag is left out
            rest = self._buffer[len(text) :]
        self._buffer, text = rest, self._stripped(text.rstrip())
        if tag:
            self._phase, self._strips = "after", True
        return text

    def _read_content(self) -> str:
        text, self._buffer = self._stripped(self._buffer), ""
        return text

    def _stripped(self, text: str) -> str:
        """The text without white space before it, if only white space came before."""
        text = text.lstrip() if self._strips else text
        self._strips = self._strips and not text
        return text


def guide_content(sampling: Sequence[SamplingParams], phase: Phase) -> list[SamplingParams]:
    """The parameters of a request's choices, with a grammar that lets the model reason first.
    Without a grammar they are the same."""
    first = sampling[0]
    if phase == "after" or not first.guided:
        return list(sampling)
    tag = {"type": "structural_tag", "format": after_reasoning(_format_of(first), phase)}
    guided = replace(first, json_schema=None, regex=None, structural_tag=json.dumps(tag))
    return [guided.changed(seed=x.seed) for x in sampling]


def after_reasoning(content: Json, phase: Phase) -> Json:
    """A format of xgrammar: `content` after reasoning, which the model may leave out if the prompt
    does not begin it."""
    begin = "" if phase == "inside" else OPEN
    tag = {"type": "tag", "begin": begin, "content": ANY_REASONING, "end": CLOSE}
    reasoning: Json = {"type": "sequence", "elements": [tag, regex_format(r"\n{0,2}")]}
    if phase == "before":
        reasoning = {"type": "optional", "content": reasoning}
    return {"type": "sequence", "elements": [reasoning, content]}


def _format_of(sampling: SamplingParams) -> Json:
    """The grammar of a request as a format of xgrammar's structural tags."""
    if sampling.structural_tag is not None:
        form: Json = json.loads(sampling.structural_tag)["format"]
        return form
    if sampling.regex is not None:
        return regex_format(sampling.regex)
    assert sampling.json_schema is not None
    return schema_format(json.loads(sampling.json_schema))
