"""Tool calls: formats in which models write them, and how they are read."""

import re

from kvfold.server.tools.base import ToolFormat
from kvfold.server.tools.hermes import Hermes
from kvfold.server.tools.llama import Llama3
from kvfold.server.tools.mistral import MistralList, MistralNames

FORMATS: tuple[type[ToolFormat], ...] = (Hermes, MistralNames, MistralList, Llama3)


def format_of(template: str) -> ToolFormat | None:
    """The format in which a chat template writes tool calls; None if it has no tools, or writes
    them in a format that is not in FORMATS."""
    if not has_tools(template):
        return None
    return next((form() for form in FORMATS if form.writes(template)), None)


def has_tools(template: str) -> bool:
    """Whether a chat template shows tools to the model."""
    return re.search(r"\btools\b", template) is not None
