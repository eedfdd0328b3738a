"""Formats in which models write tool calls."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from uuid import uuid4

Json = dict[str, Any]
_ANY_OBJECT: Json = {"type": "object"}
# A call in a JSON object: {"name": "f", "arguments": {...}}
OBJECT_HEAD = r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"%s"\s*:\s*'


class ToolFormat:
    """How a model writes tool calls, read from its chat template.

    name: for people.
    marker: text that begins a call, or a list of calls.
    other_markers: what models write instead of it.
    bare: whether a call may be without a marker, at the beginning of the text.
    ends: texts that may follow a call, and belong to it.
    separator: text between two calls after one marker; empty if each call has a marker.
    lists_calls: whether calls may be in [], after the marker.
    wraps: whether a call is a JSON object with a name and arguments. Otherwise the arguments follow
        the name.
    arguments_key: key of the arguments in that object.
    head: matches what is written before the arguments, from the object or the name on; it has a
        group `name`.
    special: whether the marker is a special token, which text usually leaves out.
    one_call: whether the chat template has room for one call per message only.
    """

    name: ClassVar[str]
    marker: ClassVar[str]
    other_markers: ClassVar[tuple[str, ...]] = ()
    bare: ClassVar[bool] = False
    ends: ClassVar[tuple[str, ...]] = ()
    separator: ClassVar[str] = ""
    lists_calls: ClassVar[bool] = False
    wraps: ClassVar[bool] = True
    arguments_key: ClassVar[str] = "arguments"
    head: ClassVar[re.Pattern[str]] = re.compile(OBJECT_HEAD % "arguments")
    special: ClassVar[bool] = False
    one_call: ClassVar[bool] = False

    @classmethod
    def writes(cls, template: str) -> bool:
        """Whether a chat template that has tools writes calls in this format."""
        raise NotImplementedError

    def find(
        self, text: str, *, is_start: bool, last: bool, strict: bool = False
    ) -> tuple[int, int | None]:
        """Where a call begins in a part of the text: the end of the content before it, and the
        position after its marker. Without a call: the end of what is surely content, and None.

        is_start: nothing but white space came before. last: the text ends here. strict: calls have
            the marker of the chat template.
        """
        begun = text.lstrip()
        if is_start and self.bare and not strict and begun.startswith("{"):
            return 0, len(text) - len(begun)
        markers = (self.marker,) if strict else (self.marker, *self.other_markers)
        places = [(x, marker) for marker in markers if (x := text.find(marker)) >= 0]
        if places:
            position, marker = min(places)
            return len(text[:position].rstrip()), position + len(marker)
        held = 0 if last else max(overlap(text, marker) for marker in markers)
        return len(text[: len(text) - held].rstrip()), None

    def new_id(self) -> str:
        """An id for a call."""
        return f"call_{uuid4().hex[:24]}"

    def structural_tag(
        self,
        schemas: Mapping[str, Json | None],
        *,
        required: bool,
        parallel: bool,
        text: Json | None = None,
    ) -> Json:
        """xgrammar's structural tag of an answer that may have calls of some functions.

        schemas: of each function's arguments, by name; None: any object. required: the answer has
            calls, and nothing else. parallel: it may have more than one. text: the format of an
            answer without calls; None: any text, which calls may follow.
        """
        calls = [self._call(name, schema) for name, schema in schemas.items()]
        single = self.one_call or not parallel
        if required:
            form = self._required(calls, single)
        elif text is not None:
            form = {"type": "or", "elements": [text, self._required(calls, single)]}
        else:
            form = self._offered(calls, single)
        return {"type": "structural_tag", "format": form}

    def begin(self, name: str) -> str:
        """What is written before a call's arguments."""
        raise NotImplementedError

    end: ClassVar[str] = "}"  # what is written after them

    def _call(self, name: str, schema: Json | None) -> Json:
        content = schema_format(_ANY_OBJECT if schema is None else schema)
        return {"type": "tag", "begin": self.begin(name), "content": content, "end": self.end}

    def _required(self, calls: Sequence[Json], single: bool) -> Json:
        return separated(calls, "\n", single)

    def _offered(self, calls: Sequence[Json], single: bool) -> Json:
        return {
            "type": "triggered_tags",
            "triggers": [self.marker],
            "tags": list(calls),
            "stop_after_first": single,
        }


def schema_format(schema: Json | bool) -> Json:
    """xgrammar's format of JSON that follows a schema."""
    # A small model may never leave the white space.
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def regex_format(pattern: str) -> Json:
    """xgrammar's format of text that matches a regular expression."""
    return {"type": "regex", "pattern": pattern}


def separated(calls: Sequence[Json], separator: str, single: bool) -> Json:
    return {
        "type": "tags_with_separator",
        "tags": list(calls),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": single,
    }


def overlap(text: str, marker: str) -> int:
    """Length of the longest beginning of `marker` that `text` ends with."""
    sizes = range(min(len(text), len(marker) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)


def json_begin(name: str, key: str = "arguments") -> str:
    """What is before the arguments in a call that is a JSON object."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
