"""Read tool calls in the text that a model writes, as it comes.

A text is content with calls in it. A call names a function and has arguments, a JSON object. What
begins like a call but is none (it is not JSON, its function is unknown, or it is cut) stays
content, as in vLLM.
"""

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from kvfold.server.tools.base import ToolFormat

MAX_HEAD = 512  # characters of a function's name and what is around it, before the arguments
# All that JSON has outside of strings: brackets, numbers, true, false and null.
JSON_CHARACTERS = frozenset(" \t\r\n{}[]:,0123456789+-.eEtrufalsn")


@dataclass(frozen=True)
class Content:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True)
class Begun:
    """A call of a known function begins. The calls of a text are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """The next part of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class Ended:
    """A call is complete, and its arguments are a JSON object."""

    index: int


@dataclass(frozen=True)
class Broken:
    """A call that had begun is none. All of its text follows as content."""

    index: int


Event = Content | Begun | Arguments | Ended | Broken


class _NoCall(Exception):
    """The text that was read is not a call."""


class JsonDepth:
    """How many objects and lists are open, in JSON that comes in parts."""

    def __init__(self) -> None:
        self.depth, self.in_string, self._escaped = 0, False, False

    def add(self, character: str) -> None:
        """Raises _NoCall for a character that no JSON has there."""
        if self._escaped:
            self._escaped = False
        elif self.in_string:
            self._escaped = character == "\\"
            self.in_string = character != '"'
        elif character == '"':
            self.in_string = True
        elif character not in JSON_CHARACTERS:
            raise _NoCall
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1


class ToolCallReader:
    """Reads one text. Each character is looked at once, except before a call.

    names: functions that may be called. strict: calls have the marker of the chat template.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], *, strict: bool = False) -> None:
        self.form, self.names, self.strict = form, names, strict
        self.num_calls = 0  # calls that have begun
        self._buffer = ""  # text that was not read yet
        self._state: Callable[[bool], bool] = self._read_content
        self._events: list[Event] = []
        self._is_start, self._in_list, self._begun = True, False, False
        self._call = ""  # text of the current call so far, with what is around it
        self._object = ""  # the same, from the JSON object on
        self._arguments = ""
        self._json, self._is_call = JsonDepth(), False  # whether the object may be one

    def feed(self, text: str, *, last: bool = False) -> list[Event]:
        """What the next part of the text adds. last: the text ends here."""
        self._buffer += text
        self._events = []
        while self._proceed(last):
            pass
        return self._events

    def _proceed(self, last: bool) -> bool:
        """Read until the state changes. Returns whether there may be more to read."""
        try:
            if self._state(last):
                return True
            if last and self._state != self._read_content:
                raise _NoCall
            return False
        except _NoCall:
            self._give_up()
            return True

    def _read_content(self, last: bool) -> bool:
        end, call = self.form.find(
            self._buffer, is_start=self._is_start, last=last, strict=self.strict
        )
        if call is None and last and self.num_calls and not self._buffer[end:].strip():
            self._buffer = self._buffer[:end]  # white space after the last call
        elif call is None and last:
            end = len(self._buffer)
        self._show(self._buffer[:end])
        if call is None:
            self._buffer = self._buffer[end:]
            return False
        self._call = self._buffer[end:call]
        self._buffer = self._buffer[call:]
        self._in_list = False
        return self._to_call()

    def _show(self, text: str) -> None:
        if text:
            self._events.append(Content(text))
        self._is_start = self._is_start and not text.strip()

    def _to_call(self) -> bool:
        self._object, self._arguments = "", ""
        self._json, self._is_call, self._begun = JsonDepth(), False, False
        self._state = self._read_head
        return True

    def _read_head(self, _: bool) -> bool:
        """Read up to the arguments, or all of an object that has them elsewhere."""
        if not self._object:
            self._skip_space()
            if self.form.lists_calls and self._buffer[:1] == "[" and not self._in_list:
                self._in_list = True
                self._take(1)
                self._skip_space()
        if not self.form.wraps:
            return self._read_name()
        for position, character in enumerate(self._buffer):
            if not self._object and position == 0 and character != "{":
                raise _NoCall
            if character in ":{" and self._json.depth == 1 and not self._json.in_string:
                before = self._object + self._buffer[:position]
                if character == "{" and (head := self.form.head.fullmatch(before)):
                    self._take(position)
                    return self._begin(head["name"])
                if character == ":" and not self._is_call:
                    self._check_first_key(before, position)
            self._add(position, character)
            if self._json.depth == 0:
                self._object += self._take(position + 1)
                return self._read_whole()
        self._object += self._take(len(self._buffer))
        return False

    def _check_first_key(self, before: str, position: int) -> None:
        """Raises _NoCall for an object that is none of a call, long before it ends."""
        key = before.lstrip("{ \t\r\n").rstrip()
        self._is_call = key in ('"name"', '"type"', f'"{self.form.arguments_key}"')
        if not self._is_call:
            self._take(position)
            raise _NoCall

    def _read_name(self) -> bool:
        """Read a function's name in front of its arguments."""
        position = self._buffer.find("{")
        if position < 0 and len(self._buffer) <= MAX_HEAD:
            return False
        head = self.form.head.fullmatch(self._buffer[: max(position, 0)])
        if not head:
            raise _NoCall
        self._take(position)
        return self._begin(head["name"])

    def _begin(self, name: str) -> bool:
        if name not in self.names:
            raise _NoCall
        self._begun = True
        self._events.append(Begun(self.num_calls, name))
        self.num_calls += 1
        self._state = self._read_arguments
        return True

    def _read_arguments(self, _: bool) -> bool:
        outside = 1 if self.form.wraps else 0
        for position, character in enumerate(self._buffer):
            self._add(position, character)
            if self._json.depth <= outside:
                self._add_arguments(self._take(position + 1))
                _load_object(self._arguments)
                self._state = self._read_rest
                return True
        self._add_arguments(self._take(len(self._buffer)))
        return False

    def _add_arguments(self, text: str) -> None:
        if text:
            self._arguments += text
            self._events.append(Arguments(self.num_calls - 1, text))

    def _read_rest(self, _: bool) -> bool:
        """Read what follows the arguments in the object."""
        position = 0
        while self._json.depth and position < len(self._buffer):
            self._add(position, self._buffer[position])
            position += 1
        self._take(position)
        return not self._json.depth and self._end()

    def _read_whole(self) -> bool:
        """Read a call whose arguments do not follow its name."""
        call = _load_object(self._object)
        name, arguments = call.get("name"), call.get(self.form.arguments_key)
        if isinstance(arguments, str):
            arguments = _load_object(arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict | None):
            raise _NoCall
        self._begin(name)
        self._add_arguments(json.dumps(arguments or {}, ensure_ascii=False))
        return self._end()

    def _end(self) -> bool:
        self._events.append(Ended(self.num_calls - 1))
        self._call, self._begun, self._is_start = "", False, False
        self._state = self._read_after
        return True

    def _read_after(self, last: bool) -> bool:
        """Read what follows a call: its end marker, or what separates it from the next one."""
        text, ends = self._buffer.lstrip(), ("]",) if self._in_list else self.form.ends
        if end := next((x for x in ends if text.startswith(x)), None):
            self._buffer = text[len(end) :]
        elif self.form.separator and text.startswith(self.form.separator):
            self._take(len(self._buffer) - len(text) + len(self.form.separator))
            return self._to_call()
        elif self.form.bare and not self.strict and text.startswith("{"):
            self._skip_space()  # Qwen2.5-Coder writes calls below each other
            return self._to_call()
        elif not last and (not text or any(x.startswith(text) for x in ends)):
            return False
        self._state = self._read_content
        return True

    def _skip_space(self) -> None:
        self._take(len(self._buffer) - len(self._buffer.lstrip()))

    def _take(self, size: int) -> str:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        self._call += text
        return text

    def _add(self, position: int, character: str) -> None:
        """Follow the JSON. At a wrong character, take what is before it and raise _NoCall."""
        try:
            self._json.add(character)
        except _NoCall:
            self._take(position)
            raise

    def _give_up(self) -> None:
        """Show the current call's text as content."""
        if self._begun:
            self._events.append(Broken(self.num_calls - 1))
        self._show(self._call)
        self._call, self._begun, self._is_start = "", False, False
        self._state = self._read_content


def _load_object(text: str) -> dict[str, Any]:
    """Raises _NoCall for anything but a JSON object."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise _NoCall from None
    if not isinstance(value, dict):
        raise _NoCall
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
