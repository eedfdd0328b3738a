"""Tool calls of Mistral's models: objects in a list, or names with arguments."""

import re
from collections.abc import Sequence
from secrets import choice
from string import ascii_letters, digits

from kvfold.server.tools.base import Json, ToolFormat, json_begin, separated


class _Mistral(ToolFormat):
    marker = "[TOOL_CALLS]"
    special = True

    def new_id(self) -> str:
        """Mistral's chat templates refuse ids of another length."""
        return "".join(choice(ascii_letters + digits) for _ in range(9))


class MistralList(_Mistral):
    """Up to Mistral Small 3.1: [TOOL_CALLS] [{"name": ..., "arguments": ...}, ...]."""

    name = "Mistral list"
    separator = ","
    lists_calls = True

    @classmethod
    def writes(cls, template: str) -> bool:
        return cls.marker in template and "[ARGS]" not in template

    def begin(self, name: str) -> str:
        return json_begin(name)

    def _required(self, calls: Sequence[Json], single: bool) -> Json:
        return self._list(calls, single)

    def _offered(self, calls: Sequence[Json], single: bool) -> Json:
        return super()._offered([self._list(calls, single)], True)

    def _list(self, calls: Sequence[Json], single: bool) -> Json:
        content = separated(calls, ", ", single)
        return {"type": "tag", "begin": f"{self.marker} [", "content": content, "end": "]"}


class MistralNames(_Mistral):
    """Since Mistral Small 3.2: [TOOL_CALLS]name[ARGS]{...}, once per call."""

    name = "Mistral names"
    wraps = False
    head = re.compile(r"\s*(?P<name>[^\s\[\]{}]+)(\[CALL_ID\]\w+)?\s*(\[ARGS\])?\s*")
    end = ""

    @classmethod
    def writes(cls, template: str) -> bool:
        return cls.marker in template and "[ARGS]" in template

    def begin(self, name: str) -> str:
        return f"{self.marker}{name}[ARGS]"

    def _required(self, calls: Sequence[Json], single: bool) -> Json:
        return separated(calls, "", single)
