"""The message of a chat's answer: reasoning, text and tool calls, whole or as it comes."""

from typing import Any

from kvfold.server.reasoning import Phase, ReasoningReader
from kvfold.server.tools.reader import (
    Arguments,
    Begun,
    Broken,
    Content,
    Ended,
    Event,
    ToolCallReader,
)
from kvfold.server.tools.request import ToolUse

Json = dict[str, Any]


class MessageReader:
    """Reads one answer of a model.

    tools: None if the answer has no calls. phase: where the answer begins.
    has_calls: whether the answer has complete calls so far, and no part of another one was sent.
    """

    def __init__(self, tools: ToolUse | None, phase: Phase = "after") -> None:
        self._tools = tools
        self._reasoning = ReasoningReader(phase)
        self._calls: ToolCallReader | None = None
        if tools is not None:
            self._calls = ToolCallReader(tools.form, tools.callable, strict=tools.strict)
        self._num_ended, self._is_broken = 0, False

    @property
    def has_reasoned(self) -> bool:
        """Whether the answer has had reasoning so far."""
        return self._reasoning.has_reasoned

    @property
    def has_calls(self) -> bool:
        return self._num_ended > 0 and not self._is_broken

    def message(self, text: str) -> Json:
        """The message of a whole text, as OpenAI's API has it."""
        contents, calls = [], dict[int, Json]()
        reasoning, text = self._reasoning.feed(text, last=True)
        for event in self._feed(text, last=True):
            if isinstance(event, Content):
                contents.append(event.text)
            elif isinstance(event, Begun):
                calls[event.index] = self._call(event)
            elif isinstance(event, Arguments):
                calls[event.index]["function"]["arguments"] += event.text
            elif isinstance(event, Broken):
                del calls[event.index]
        self._is_broken = False  # nothing of broken calls is left
        content = "".join(contents)
        message: Json = {"role": "assistant", "content": content}
        if calls or reasoning:
            message["content"] = content or None
        return message | _reasoning(reasoning) | _tool_calls(calls)

    def delta(self, text: str, *, last: bool) -> Json:
        """What the next part of the text adds to a streamed message; empty if that is not known
        yet."""
        content, calls = "", dict[int, Json]()
        reasoning, text = self._reasoning.feed(text, last=last)
        for event in self._feed(text, last=last):
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, Begun):
                calls[event.index] = {"index": event.index, **self._call(event)}
            elif isinstance(event, Arguments):
                empty = {"index": event.index, "function": {"arguments": ""}}
                call = calls.setdefault(event.index, empty)
                call["function"]["arguments"] += event.text
        delta: Json = {"content": content} if content else {}
        return _reasoning(reasoning) | delta | _tool_calls(calls)

    def _feed(self, text: str, *, last: bool) -> list[Event]:
        """The events, without those of calls after a complete one if there may be one only."""
        if self._calls is None or self._tools is None:
            return [Content(text)]
        events: list[Event] = []
        for event in self._calls.feed(text, last=last):
            if self._num_ended and not self._tools.parallel and not isinstance(event, Content):
                continue
            events.append(event)
            self._num_ended += isinstance(event, Ended)
            self._is_broken = self._is_broken or isinstance(event, Broken)
        return events

    def _call(self, event: Begun) -> Json:
        assert self._tools is not None
        function = {"name": event.name, "arguments": ""}
        return {"id": self._tools.form.new_id(), "type": "function", "function": function}


def _reasoning(text: str) -> Json:
    """Under vLLM's name alone: openai-agents shows a stream's reasoning twice if it has two."""
    return {"reasoning": text} if text else {}


def _tool_calls(calls: dict[int, Json]) -> Json:
    return {"tool_calls": list(calls.values())} if calls else {}
