"""Tool calls over HTTP. A structural tag makes the small model write what the tests need."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("xgrammar", reason='needs pip install "kvfold[structured]"')
openai = pytest.importorskip("openai", reason="the openai package is not installed")
from kvfold.server.tools import request  # noqa: E402
from kvfold.utils.tokens import encode  # noqa: E402
from serving import TEMPLATE, Served, serving, small_llm  # noqa: E402

CHAT = "/v1/chat/completions"
# As in Hermes' and Qwen's templates.
TOOLS_TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    'Write <tool_call>{"name": name, "arguments": object}</tool_call>\n{% endif %}'
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments.a }}</tool_call>{% endfor %}{{ '\n' }}{% endfor %}"
)
ASKED = [{"role": "user", "content": "Who?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
}
F = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
G = {"type": "function", "function": {"name": "g"}}
NAMED = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
LENGTH = {"temperature": 0, "max_tokens": 90}  # ends with the call
SHORT = {"temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    llm = small_llm(max_tokens=512)
    llm.tokenizer.chat_template = TOOLS_TEMPLATE
    with serving(llm) as served:
        yield served


@pytest.fixture(scope="module")
def client(small: Served) -> Iterator["openai.OpenAI"]:
    with openai.OpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch):
    """Makes the model write a text, though it chooses freely."""

    def write(text: str) -> None:
        tag = {"type": "structural_tag", "format": {"type": "const_string", "value": text}}
        monkeypatch.setattr(request.ToolUse, "structural_tag", tag)

    return write


def check(call: Any) -> None:
    """A call of f with arguments that keep to the schema."""
    assert call.function.name == "f" and call.type == "function" and call.id
    assert 0 <= json.loads(call.function.arguments)["a"] <= 99


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_is_required(client, choice: Any) -> None:
    asked = {"model": "small", "messages": ASKED, "tools": [F], "tool_choice": choice, **LENGTH}
    answer = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (call,) = answer.message.tool_calls
    check(call)
    with client.chat.completions.stream(**asked, parallel_tool_calls=False) as stream:
        final = stream.get_final_completion().choices[0]  # put together by OpenAI's client
    assert final.finish_reason == "tool_calls" and not final.message.content
    (streamed,) = final.message.tool_calls
    check(streamed)
    assert streamed.function.arguments == call.function.arguments


def test_a_stream_has_the_name_first_and_then_the_arguments(client, writes) -> None:
    writes(f"So.\n{CALL}")
    asked = {"model": "small", "messages": ASKED, "tools": [F, G], **LENGTH}
    whole = client.chat.completions.create(**asked, logprobs=True)
    choice = whole.choices[0]
    assert choice.message.content == "So." and choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'
    assert len(choice.logprobs.content) == whole.usage.completion_tokens  # also of calls
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**asked, **options)
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    deltas = [x.choices[0].delta for x in chunks]
    assert "".join(x.content or "" for x in deltas) == "So."
    first, *others = (call for x in deltas for call in x.tool_calls or ())
    assert first.id and first.type == "function" and first.function.name == "f"
    assert others and all(x.id is x.type is x.function.name is None for x in others)
    parts = [x.function.arguments for x in (first, *others)]
    assert len(parts) > 2 and "".join(parts) == '{"a": 1}'
    assert {x.index for x in (first, *others)} == {0}
    assert [x.choices[0].finish_reason for x in chunks if x.choices[0].finish_reason] == [
        "tool_calls"
    ]
    every = client.chat.completions.create(**asked, stream=True, logprobs=True)
    logprobs = [x.choices[0].logprobs for x in every if x.choices[0].logprobs]
    assert sum(len(x.content) for x in logprobs) == whole.usage.completion_tokens


def test_what_is_no_call_stays_content(small: Served, writes) -> None:
    writes(bad := CALL.replace('"f"', '"h"'))
    choice = small.ask(CHAT, messages=ASKED, tools=[F], **LENGTH)["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": bad}
    assert choice["finish_reason"] == "stop"
    cut = small.ask(CHAT, messages=ASKED, tools=[F], **SHORT)["choices"][0]
    assert cut["finish_reason"] == "length" and bad.startswith(cut["message"]["content"])


def test_an_answer_is_a_call_or_text_of_a_schema(small: Served) -> None:
    asked = {"messages": ASKED, "tools": [F], "response_format": {"type": "json_object"}}
    schema = {"type": "object", "properties": {"x": {"const": 5}}, "required": ["x"]}
    asked["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    (free,) = small.ask(CHAT, **asked, **LENGTH)["choices"]
    calls = free["message"].get("tool_calls")
    assert calls or json.loads(free["message"]["content"]) == {"x": 5}
    (forced,) = small.ask(CHAT, **asked, **LENGTH, tool_choice=NAMED)["choices"]
    assert forced["finish_reason"] == "tool_calls" and not forced["message"]["content"]
    (text,) = small.ask(CHAT, **asked, **LENGTH, tool_choice="none")["choices"]
    assert json.loads(text["message"]["content"]) == {"x": 5}


def test_choices_have_calls_of_their_own(small: Served) -> None:
    asked = {"messages": ASKED, "tools": [F], "tool_choice": NAMED, "max_tokens": 90}
    found = small.ask(CHAT, **asked, n=3, seed=1, temperature=1.5)["choices"]
    calls = [x["message"]["tool_calls"][0] for x in found]
    assert len({x["id"] for x in calls}) == 3
    assert all(0 <= json.loads(x["function"]["arguments"])["a"] <= 99 for x in calls)


def test_strict_functions_keep_to_their_schema(small: Served, monkeypatch) -> None:
    """The model may write text; a call that it begins follows the schema."""
    strict = F | {"function": F["function"] | {"strict": True}}
    found = small.ask(CHAT, messages=ASKED, tools=[strict], temperature=0, max_tokens=8)
    assert found["choices"][0]["message"]["content"]
    asked = small.ask("/tokenize", messages=ASKED, tools=[strict])["tokens"]
    assert asked == small.ask("/tokenize", messages=ASKED, tools=[F])["tokens"]
    monkeypatch.setattr(request, "find_spec", lambda _: None)
    for more in ({"tools": [strict]}, {"tools": [F], "tool_choice": "required"}):
        error = small.refused(400, CHAT, messages=ASKED, **more)
        assert error["param"] == "tool_choice" and "kvfold[structured]" in error["message"]


def test_the_template_gets_tools_calls_and_results(small: Served) -> None:
    function = {"name": "f", "arguments": '{"a": 5}'}
    call = {"id": "1", "type": "function", "function": function}
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "Ann"}]},
    ]
    found = small.ask("/tokenize", messages=messages, tools=[G])["tokens"]
    text = (
        f"{json.dumps(G)}\n"
        'Write <tool_call>{"name": name, "arguments": object}</tool_call>\n'
        "user: Who?\nassistant: <tool_call>f5</tool_call>\ntool: Ann\n"
    )
    assert found == encode(small.llm.tokenizer, text)
    usage = small.ask(CHAT, messages=messages, tools=[G], **SHORT)["usage"]
    assert usage["prompt_tokens"] == len(found)


def test_tools_that_may_not_be_called_are_not_shown(small: Served) -> None:
    plain = small.ask(CHAT, messages=ASKED, **SHORT)
    for more in ({"tools": [F], "tool_choice": "none"}, {"tools": []}, {"tool_choice": "auto"}):
        found = small.ask(CHAT, messages=ASKED, **SHORT, **more)
        assert found["choices"] == plain["choices"] and found["usage"] == plain["usage"]


def called(arguments: str, role: str = "assistant") -> list[dict[str, Any]]:
    call = {"function": {"name": "f", "arguments": arguments}}
    return [*ASKED, {"role": role, "tool_calls": [call]}]


LONG = {"type": "function", "function": {"name": "f", "description": "a" * 2**18}}
DEEP = {"function": F["function"] | {"parameters": {"pattern": "a" * 2000}}, "type": "function"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
    ({"tools": [{"type": "function"}]}, "tools", "required field `function`"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "length >= 1"),
    ({"tools": 5}, "tools", "expected `array | null`"),
    ({"tools": [F, F]}, "tools", "two functions are called 'f'"),
    ({"tools": [F] * 129}, "tools", "at most 128 functions; got 129"),
    ({"tools": [LONG]}, "tools", "at most 262144 bytes"),
    ({"tools": [DEEP], "tool_choice": "required"}, "tools", "1024 characters of a schema's"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": [G], "tool_choice": NAMED}, "tool_choice", "no function is called 'f'; tools has g"),
    ({"tools": [F], "tool_choice": "any"}, "tool_choice", '"none", "auto", "required"'),
    (
        {
            "tools": [F],
            "response_format": {"type": "json_object"},
            "structured_outputs": {"regex": "a"},
        },
        "response_format",
        "both say what the text is",
    ),
    ({"tools": [F], "structured_outputs": {"regex": "("}}, "structured_outputs", "or tools"),
    ({"tools": [F], "tool_choice": "required", "ignore_eos": True}, "tools", "ignore_eos"),
    ({"messages": called("{a}")}, "messages", "arguments of a call of 'f' are no JSON object"),
    ({"messages": called("[]")}, "messages", "are no JSON object"),
    ({"messages": called("{}", "user")}, "messages", "belongs to messages of role assistant"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages", "field `function`"),
    ({"messages": [ASKED[0] | {"tool_call_id": "a"}]}, "messages", "messages of role tool"),
    ({"chat_template_kwargs": {"tools": [F]}}, "chat_template_kwargs", "as a field"),
]


@pytest.mark.parametrize(("more", "param", "words"), REFUSED)
def test_mistakes_are_named(small: Served, more: dict[str, Any], param: str, words: str) -> None:
    error = small.refused(400, CHAT, **({"messages": ASKED} | SHORT | more))
    assert error["param"] == param and words in error["message"], error
    assert len(error["message"]) < 500


def test_a_model_without_tools_says_so(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = "{{ tools }}<tool_call><function=f>" + TEMPLATE
    for template, words in (
        (TEMPLATE, "the chat template of this model has no tools; leave tools out"),
        (unknown, "a format that is none of Hermes, Mistral names, Mistral list, Llama 3 JSON"),
    ):
        monkeypatch.setattr(small.llm.tokenizer, "chat_template", template)
        error = small.refused(400, CHAT, messages=ASKED, tools=[F])
        assert error["param"] == "tools" and words in error["message"]
        assert small.ask(CHAT, messages=ASKED, tools=[F], tool_choice="none", **SHORT)
        error = small.refused(400, CHAT, messages=called("{}"))
        assert "the chat template of this model has no tool_calls" in error["message"]
    monkeypatch.setattr(small.llm.tokenizer, "chat_template", TEMPLATE)
    assert small.refused(400, "/tokenize", messages=ASKED, tools=[F])["param"] == "tools"
