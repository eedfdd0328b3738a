"""Tool calls of Hermes, Qwen 2.5 and Qwen 3.

<tool_call>
{"name": ..., "arguments": {...}}
</tool_call>
"""

import re

from kvfold.server.tools.base import ToolFormat, json_begin


class Hermes(ToolFormat):
    name = "Hermes"
    marker = "<tool_call>"
    # Qwen2.5-Coder writes its calls in blocks of JSON, and in the tag that lists the functions.
    other_markers = ("```json\n", "```\n", "<tools>")
    bare = True
    ends = ("</tool_call>", "```", "</tools>")
    end = "}\n</tool_call>"

    @classmethod
    def writes(cls, template: str) -> bool:
        """Qwen3-Coder, Qwen 3.5 and GLM have the same marker before another format."""
        has_json = re.search(r'arguments\\?["\']\s*:', template) is not None
        others = ("<function=", "<arg_key>")
        return cls.marker in template and has_json and not any(x in template for x in others)

    def begin(self, name: str) -> str:
        return f"{self.marker}\n{json_begin(name)}"
