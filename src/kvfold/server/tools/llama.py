"""Tool calls of Llama 3.1 to 3.3: the answer is {"name": ..., "parameters": ...}."""

import re
from collections.abc import Sequence

from kvfold.server.tools.base import OBJECT_HEAD, Json, ToolFormat, json_begin, separated


class Llama3(ToolFormat):
    name = "Llama 3 JSON"
    marker = "<|python_tag|>"  # not always written
    bare = True
    separator = ";"
    arguments_key = "parameters"
    head = re.compile(OBJECT_HEAD % "parameters")
    special = True
    one_call = True

    @classmethod
    def writes(cls, template: str) -> bool:
        return "<|start_header_id|>" in template and '"parameters": ' in template

    def begin(self, name: str) -> str:
        return json_begin(name, self.arguments_key)

    def _required(self, calls: Sequence[Json], single: bool) -> Json:
        return separated(calls, "; ", single)

    def _offered(self, calls: Sequence[Json], single: bool) -> Json:
        form = super()._offered(calls, single)
        return form | {"triggers": ['{"name": ']}
