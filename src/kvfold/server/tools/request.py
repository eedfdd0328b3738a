"""The tools of a chat: which functions the model may call, and how."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from kvfold.server.errors import APIError, at_most, invalid
from kvfold.server.schemas import check_schema
from kvfold.server.tools import FORMATS, format_of, has_tools
from kvfold.server.tools.base import ToolFormat

Json = dict[str, Any]
MAX_TOOLS = 128  # as in OpenAI's API
MAX_TOOLS_BYTES = 2**18  # of all tools as JSON
FunctionName = Annotated[
    str, Meta(min_length=1, max_length=256, pattern=r"^[^\s\x00-\x1f\"\\\\]+$")
]


class FunctionChoice(Struct, forbid_unknown_fields=True):
    name: FunctionName


class ToolChoice(Struct, forbid_unknown_fields=True):
    """A function that must be called."""

    type: Literal["function"]
    function: FunctionChoice


class Function(Struct):
    """Part of a tool that the server reads. The chat template gets all of it."""

    name: FunctionName
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Struct):
    type: Literal["function"]
    function: Function


Choice = Literal["none", "auto", "required"] | ToolChoice


@dataclass(frozen=True)
class ToolUse:
    """The tools of one chat, which a model may or must call.

    functions: by name. form: how the model writes calls. required: whether the answer must be a
        call. callable: names of the functions that may be called. parallel: whether one answer may
        have several calls. text: xgrammar's format of an answer without calls; None: any text.
    """

    functions: Mapping[str, Function]
    form: ToolFormat
    required: bool
    callable: Sequence[str]
    parallel: bool
    text: Json | None = None

    @property
    def strict(self) -> bool:
        """Whether a grammar constrains what the model writes."""
        return self.forced or any(x.strict for x in self.functions.values())

    @property
    def forced(self) -> bool:
        """Whether all of the answer follows a grammar, so that each call follows its schema."""
        return self.required or self.text is not None

    @property
    def structural_tag(self) -> Json | None:
        """What the text must follow, for xgrammar; None: nothing. Arguments follow their schema if
        their function is strict, or the call is required, or other text has a format. Raises
        APIError."""
        if not self.strict:
            return None
        if find_spec("xgrammar") is None:
            raise APIError(
                400,
                'tool_choice: only "auto" and "none", with functions that are not strict and no '
                'response_format, work without xgrammar: pip install "kvfold[structured]" where '
                "the server runs",
                param="tool_choice",
            )
        functions = {name: self.functions[name] for name in self.callable}
        schemas = {
            name: x.parameters if self.forced or x.strict else None for name, x in functions.items()
        }
        for schema in schemas.values():
            check_schema("tools", schema)
        return self.form.structural_tag(
            schemas, required=self.required, parallel=self.parallel, text=self.text
        )


def read_tools(tools: Sequence[Json]) -> dict[str, Function]:
    """The functions by name. Raises APIError for tools that are none."""
    at_most("tools", len(tools), MAX_TOOLS, "functions")
    try:
        functions = [x.function for x in msgspec.convert(tools, list[Tool])]
    except msgspec.ValidationError as error:
        raise invalid(error, param="tools") from None
    by_name = {x.name: x for x in functions}
    if len(by_name) < len(functions):
        names = [x.name for x in functions]
        twice = next(x for x in names if names.count(x) > 1)
        raise APIError(400, f"tools: two functions are called {twice!r:.100}", param="tools")
    return by_name


def tools_for_template(tools: Sequence[Json]) -> list[Json]:
    """The tools without `strict`, which says nothing to the model."""
    return [
        tool | {"function": {k: x for k, x in tool["function"].items() if k != "strict"}}
        for tool in tools
    ]


def tool_use(
    tools: Sequence[Json],
    choice: Choice | None,
    parallel: bool | None,
    template: Any,
    text: Json | None = None,
) -> ToolUse | None:
    """How a chat uses its tools; None if it has none, or may not call them. Raises APIError.

    template: the tokenizer's chat template, or several by name. text: xgrammar's format of an
        answer without calls.
    """
    if not tools:
        if isinstance(choice, ToolChoice) or choice == "required":
            raise APIError(
                400, "tool_choice: there are no tools to choose from", param="tool_choice"
            )
        return None
    functions = read_tools(tools)
    forced = choice.function.name if isinstance(choice, ToolChoice) else None
    if forced is not None and forced not in functions:
        raise APIError(
            400,
            f"tool_choice: no function is called {forced!r:.100}; tools has "
            f"{', '.join(functions):.300}",
            param="tool_choice",
        )
    if choice == "none":
        return None
    written = template_text(template)
    form = format_of(written)
    if form is None:
        raise _no_format(written)
    return ToolUse(
        functions,
        form,
        required=forced is not None or choice == "required",
        callable=list(functions) if forced is None else [forced],
        parallel=parallel is not False and forced is None,
        text=text,
    )


def template_text(template: Any) -> str:
    """The chat template for chats with tools, of one or several by name."""
    if isinstance(template, Mapping):
        template = template.get("tool_use", template.get("default"))
    return template or ""


def check_template(template: Any, messages: Sequence[Json], tools: Sequence[Json] | None) -> None:
    """Raises APIError for tools, or calls in messages, that the chat template would leave out."""
    text = template_text(template)
    if tools and not has_tools(text):
        raise _no_format(text)
    if "tool_calls" not in text and any("tool_calls" in message for message in messages):
        raise APIError(
            400,
            "messages: the chat template of this model has no tool_calls; leave them out",
            param="messages",
        )


def _no_format(template: str) -> APIError:
    """The refusal for a model that cannot call tools."""
    if not has_tools(template):
        why = "the chat template of this model has no tools"
    else:
        known = ", ".join(x.name for x in FORMATS)
        why = f"the chat template of this model writes calls in a format that is none of {known}"
    return APIError(
        400, f'tools: {why}; leave tools out, or send tool_choice "none"', param="tools"
    )
