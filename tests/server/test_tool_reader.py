"""Tool calls in the text that a model writes, whole and in parts of every size."""

import json
from typing import Any

import pytest

pytest.importorskip("msgspec", reason='needs pip install "kvfold[server]"')
from kvfold.server.tools import format_of, has_tools
from kvfold.server.tools.base import ToolFormat
from kvfold.server.tools.hermes import Hermes
from kvfold.server.tools.llama import Llama3
from kvfold.server.tools.message import MessageReader
from kvfold.server.tools.mistral import MistralList, MistralNames
from kvfold.server.tools.request import Function, ToolUse

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
OBJECT = '{"name": "f", "arguments": {"a": 1}}'
F = ("f", '{"a": 1}')
# Format, text, content, calls.
READ: dict[str, tuple[type[ToolFormat], str, str | None, list[tuple[str, str]]]] = {
    "text": (Hermes, "Hi <tool\n", "Hi <tool\n", []),
    "one call": (Hermes, CALL, None, [F]),
    "text before": (Hermes, f"Let me see.\n{CALL}", "Let me see.", [F]),
    "two calls": (Hermes, f"{CALL}\n{CALL}\n", None, [F, F]),
    "text after": (Hermes, f"{CALL} So.", " So.", [F]),
    "brackets in strings": (
        Hermes,
        '<tool_call>{"name": "g", "arguments": {"a": "}{\\"", "b": [{"c": null}]}}</tool_call>',
        None,
        [("g", '{"a": "}{\\"", "b": [{"c": null}]}')],
    ),
    "name last": (Hermes, '<tool_call>{"arguments": {"a": 1}, "name": "f"}', None, [F]),
    "text of arguments": (
        Hermes,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        None,
        [F],
    ),
    "no arguments": (Hermes, '<tool_call>{"name": "f"}</tool_call>', None, [("f", "{}")]),
    "block of JSON": (
        Hermes,
        '```json\n{\n  "name": "f",\n  "arguments": {"a": 1}\n}\n```',
        None,
        [F],
    ),
    "bare JSON": (Hermes, OBJECT, None, [F]),
    "bare JSON twice": (Hermes, f"{OBJECT}\n{OBJECT}", None, [F, F]),
    "tag of functions": (Hermes, f"So.\n<tools>\n{OBJECT}\n</tools>", "So.", [F]),
    "two calls in a tag": (Hermes, f"<tools>\n{OBJECT}\n{OBJECT}\n</tools>", None, [F, F]),
    "an object after a call": (Hermes, f'{OBJECT}\n{{"a": 1}}', '\n{"a": 1}', [F]),
    "llama": (Llama3, '{"name": "f", "parameters": {"a": 1}}', None, [F]),
    "llama with a type": (
        Llama3,
        '{"type": "function", "name": "f", "parameters": {"a": 1}}',
        None,
        [F],
    ),
    "llama's tag": (
        Llama3,
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        None,
        [F, ("g", "{}")],
    ),
    "mistral": (
        MistralList,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        None,
        [F, ("g", "{}")],
    ),
    "mistral's names": (
        MistralNames,
        'Hm.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}',
        "Hm.",
        [F, ("g", "{}")],
    ),
}
# Text that stays content, in each format.
CONTENT: list[tuple[type[ToolFormat], str]] = [
    (Hermes, '<tool_call>\n{"name": "h", "arguments": {"a": 1}}\n</tool_call>'),
    (Hermes, '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>'),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>'),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    (Hermes, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (Hermes, '<tool_call>{"name": "f", "arguments": {"a": 1'),
    (Hermes, "<tool_call>"),
    (Hermes, '<tool_call>f {"name": "f", "arguments": {}}'),
    (Hermes, '```json\n{"x": {"name": "f", "arguments": {}}}\n```'),
    (Hermes, '{"name": "Bob", "age": 3}'),
    (
        Hermes,
        '<tools>\n{"type": "function", "function": {"name": "f", "parameters": {}}}\n</tools>',
    ),
    (Hermes, "Between <tools> and </tools>"),
    (Hermes, 'Like {"name": "f", "arguments": {}}'),
    (Llama3, '<|python_tag|>brave.call(x="1")'),
    (Llama3, 'Hello {"name": "f", "parameters": {"a": 1}}'),
    (Llama3, "<|py"),
    (MistralList, "[TOOL_CALLS] [x]"),
    (MistralNames, "[TOOL_CALLS]f and g"),
    (MistralNames, '[TOOL_CALLS]h[ARGS]{"a": 1}'),
    (MistralNames, "[TOOL_CALLS]" + "f" * 600),
]


def reader(form: type[ToolFormat], parallel: bool = True, strict: bool = False) -> MessageReader:
    functions = {name: Function(name, strict=strict) for name in ("f", "g")}
    use = ToolUse(functions, form(), required=False, callable=["f", "g"], parallel=parallel)
    return MessageReader(use)


def streamed(form: type[ToolFormat], text: str, size: int) -> tuple[dict[str, Any], bool]:
    """The message that a client puts together of deltas, and whether it ends with tool_calls."""
    reading, parts = reader(form), [text[i : i + size] for i in range(0, len(text), size)]
    content, calls = "", dict[int, dict[str, Any]]()
    for number, part in enumerate(parts, 1):
        delta = reading.delta(part, last=number == len(parts))
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] not in calls:
                assert call["id"] and call["type"] == "function" and call["function"]["name"]
                calls[call["index"]] = call
            else:
                assert call.keys() == {"index", "function"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"content": content or None, "tool_calls": list(calls.values())}, reading.has_calls


def called(message: dict[str, Any]) -> list[tuple[str, str]]:
    functions = [x["function"] for x in message.get("tool_calls", ())]
    return [(x["name"], x["arguments"]) for x in functions]


@pytest.mark.parametrize("name", READ)
def test_calls_are_read_whole_and_in_parts(name: str) -> None:
    form, text, content, calls = READ[name]
    reading = reader(form)
    message = reading.message(text)
    assert (message["content"], called(message)) == (content, calls)
    assert reading.has_calls == bool(calls)
    ids = [x["id"] for x in message.get("tool_calls", ())]
    assert len(set(ids)) == len(calls)
    for size in (1, 2, 3, 7):
        message, has_calls = streamed(form, text, size)
        assert (message["content"], called(message)) == (content, calls), size
        assert has_calls == bool(calls)


@pytest.mark.parametrize(("form", "text"), CONTENT)
def test_what_is_no_call_stays_content(form: type[ToolFormat], text: str) -> None:
    """A stream may have begun the call. It then does not end with tool_calls."""
    reading = reader(form)
    assert reading.message(text) == {"role": "assistant", "content": text}
    assert not reading.has_calls
    for size in (1, 2, 3, 7):
        message, has_calls = streamed(form, text, size)
        assert message["content"] == text and not has_calls


def test_a_good_call_beside_a_bad_one() -> None:
    bad = CALL.replace("}}", "}")
    message = reader(Hermes).message(f"{bad}\n{CALL}")
    assert message["content"] == bad and called(message) == [F]
    assert streamed(Hermes, f"{bad}\n{CALL}", 4)[1] is False  # a part of the bad one was sent


def test_one_call_if_they_may_not_be_parallel() -> None:
    assert called(reader(Hermes, parallel=False).message(f"{CALL}\n{CALL}")) == [F]
    bad = CALL.replace('"f"', '"h"')
    assert called(reader(Hermes, parallel=False).message(f"{bad}\n{CALL}\n{CALL}")) == [F]


def test_strict_functions_have_the_templates_marker() -> None:
    block = '```json\n{"name": "f", "arguments": {"a": 1}}\n```'
    assert reader(Hermes, strict=True).message(block)["content"] == block
    assert called(reader(Hermes, strict=True).message(CALL)) == [F]


TEMPLATES: dict[str, type[ToolFormat] | None] = {
    '{% if tools %}<tool_call>\n{{"name": x, "arguments": y}}{% endif %}': Hermes,
    '{% if tools %}<tool_call>\\n{\\"name\\": x, \\"arguments\\": y}{% endif %}': Hermes,
    "{% if tools %}<tool_call>\n<function=x>{{ arguments }}</tool_call>{% endif %}": None,
    "{% if tools %}[TOOL_CALLS][{% endif %}": MistralList,
    "{% if tools %}[TOOL_CALLS]name[ARGS]{% endif %}": MistralNames,
    "{% if tools %}<|start_header_id|>{{ '\"parameters\": ' }}{% endif %}": Llama3,
    "{% for m in messages %}{{ m.content }}<tool_call>{% endfor %}": None,
    "": None,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_chat_template_says_how_calls_are_written(template: str) -> None:
    form, wanted = format_of(template), TEMPLATES[template]
    assert (form and type(form)) == wanted
    assert has_tools(template) == ("tools" in template)


def test_mistrals_ids_have_the_length_that_its_templates_want() -> None:
    assert {len(MistralList().new_id()) for _ in range(5)} == {9}


GUIDED: list[tuple[type[ToolFormat], str, str]] = [  # one call, and two
    (Hermes, CALL, f"{CALL}\n{CALL}"),
    (Llama3, READ["llama"][1], ""),
    (MistralList, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', READ["mistral"][1]),
    (
        MistralNames,
        '[TOOL_CALLS]f[ARGS]{"a": 1}',
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
    ),
]


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize(("form", "one", "two"), GUIDED)
def test_grammars_allow_the_calls_that_are_read(form, one: str, two: str, required: bool) -> None:
    xgrammar = pytest.importorskip("xgrammar", reason='needs pip install "kvfold[structured]"')
    characters = [chr(x) for x in range(128)]
    known = xgrammar.TokenizerInfo([*characters, "<end>"], stop_token_ids=128)
    compiler = xgrammar.GrammarCompiler(known, max_threads=1)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    def accepts(text: str, parallel: bool = True) -> bool:
        tag = form().structural_tag({"f": schema, "g": None}, required=required, parallel=parallel)
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(json.dumps(tag)))
        return matcher.accept_string(text) and matcher.accept_token(128)

    assert accepts(one)
    assert not accepts(one.replace('"a": 1', '"a": "x"'))
    assert not accepts(one.replace('"a": 1', '"b": 1'))
    assert not accepts(one.replace("f", "h"))
    assert accepts("So.") == (not required)
    if two:
        assert accepts(two)
        assert not accepts(two, parallel=False)
