"""Reasoning before an answer: read whole and in every split, and what a grammar allows after it."""

import json

import pytest

pytest.importorskip("msgspec", reason='needs pip install "kvfold[server]"')
from kvfold.engine.requests.request import SamplingParams
from kvfold.server import reasoning
from kvfold.server.reasoning import Phase, ReasoningReader, can_reason, guide_content, phase_of
from kvfold.server.tools.hermes import Hermes
from kvfold.server.tools.message import MessageReader
from kvfold.server.tools.request import Function, ToolUse
from serving import serving, small_llm

# Phase, text, reasoning, content.
READ: list[tuple[Phase, str, str, str]] = [
    ("before", "<think>\nSo. </b>\n\nYes\n</think>\n\nHi \n", "So. </b>\n\nYes", "Hi \n"),
    ("before", "<think>\n\n</think>\n\nHi", "", "Hi"),
    ("before", " Hi <think>a</think>", "", " Hi <think>a</think>"),
    ("before", "<thin ice", "", "<thin ice"),
    ("before", "<th", "", "<th"),
    ("before", "<think>cut </thi", "cut </thi", ""),
    ("inside", "\nSo.\n</think>\n\nHi", "So.", "Hi"),
    ("inside", "<think>So.</think>Hi", "So.", "Hi"),
    ("inside", "cut \n", "cut", ""),
    ("inside", "a</think>b</think>", "a", "b</think>"),
    ("after", "<think>Hi</think> ", "", "<think>Hi</think> "),
]


@pytest.mark.parametrize(("phase", "text", "thought", "content"), READ)
def test_reasoning_is_read_in_every_split(
    phase: Phase, text: str, thought: str, content: str
) -> None:
    assert ReasoningReader(phase).feed(text, last=True) == (thought, content)
    for size in range(1, len(text)):
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        reader = ReasoningReader(phase)
        read = [reader.feed(x, last=i == len(parts)) for i, x in enumerate(parts, 1)]
        assert ("".join(x for x, _ in read), "".join(x for _, x in read)) == (thought, content)


def test_calls_follow_reasoning() -> None:
    use = ToolUse({"f": Function("f")}, Hermes(), required=False, callable=["f"], parallel=True)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    message = MessageReader(use, "inside").message(f"Not {call} yet.\n</think>\n\n{call}")
    assert message["reasoning"] == f"Not {call} yet."
    assert message["content"] is None and len(message["tool_calls"]) == 1


def test_where_an_answer_begins() -> None:
    assert phase_of("<|im_start|>assistant\n<think>\n", None) == "inside"
    assert phase_of("assistant\n<think>\n\n</think>\n\n", None) == "after"
    assert phase_of("user: <think>\nassistant\n", None) == "before"
    assert phase_of("", "<think>I am") == "inside"
    assert phase_of("", "<think>a</think>I am") == "after"
    assert can_reason("{{ x.split('</think>') }}", None) and not can_reason("{{ x }}", None)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def accepts(params: SamplingParams, phase: Phase, text: str) -> bool:
    xgrammar = pytest.importorskip("xgrammar", reason='needs pip install "kvfold[structured]"')
    known = xgrammar.TokenizerInfo([*map(chr, range(128)), "<end>"], stop_token_ids=128)
    (guided,) = guide_content([params], phase)
    compiler = xgrammar.GrammarCompiler(known, max_threads=1)
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(guided.structural_tag))
    return matcher.accept_string(text) and matcher.accept_token(128)


def test_a_grammar_applies_after_the_reasoning() -> None:
    params = SamplingParams(json_schema=SCHEMA)
    assert accepts(params, "inside", '{"b"} </thin </think>\n\n{"a": 1}')
    assert not accepts(params, "inside", '{"a": 1}')
    assert not accepts(params, "inside", "So.</think>So.")
    assert accepts(params, "before", '<think>So.</think>\n\n{"a": 1}')
    assert accepts(params, "before", '{"a": 1}')
    assert accepts(SamplingParams(regex="[0-9]"), "inside", "So.</think>7")
    assert guide_content([params], "after") == [params]
    assert guide_content([SamplingParams()], "inside") == [SamplingParams()]


def test_an_answer_is_a_call_or_text_of_a_schema() -> None:
    text = reasoning.schema_format({"type": "object", "properties": {}, "maxProperties": 0})
    functions = {"f": Function("f", parameters=SCHEMA)}
    use = ToolUse(functions, Hermes(), False, ["f"], parallel=True, text=text)
    params = SamplingParams(structural_tag=use.structural_tag)
    for answer, right in {
        "{}": True,
        CALL: True,
        f"{CALL}\n{CALL}": True,
        f"So.{CALL}": False,
        "{}" + CALL: False,
        CALL.replace('"a"', '"b"'): False,
    }.items():
        assert accepts(params, "inside", f"So.</think>{answer}") == right, answer
    assert MessageReader(use).message("{}")["content"] == "{}"


def test_a_server_separates_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xgrammar", reason='needs pip install "kvfold[structured]"')
    says = {"type": "const_string", "value": "Hm, so."}
    monkeypatch.setattr(reasoning, "ANY_REASONING", says)
    llm = small_llm()
    llm.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}{{ m.reasoning_content }}{{ m.content }}\n{% endfor %}"
        "{{ '<think>\n' if think is not defined else '<think>\n\n</think>\n\n' }}"
    )
    asked = {
        "messages": [{"role": "user", "content": "Who?"}],
        "structured_outputs": {"regex": "[0-9]{3}"},
        "temperature": 0,
        "max_tokens": 60,
    }
    with serving(llm) as small:
        whole = small.ask("/v1/chat/completions", **asked)
        message = whole["choices"][0]["message"]
        assert message["reasoning"] == "Hm, so." and "reasoning_content" not in message
        assert message["content"].isdigit() and whole["choices"][0]["finish_reason"] == "stop"
        stream = small.post("/v1/chat/completions", **asked, stream=True).text
        lines = [x[6:] for x in stream.split("\n\n") if x.startswith("data: {")]
        deltas = [json.loads(x)["choices"][0]["delta"] for x in lines]
        for name in ("reasoning", "content"):
            assert "".join(x.get(name, "") for x in deltas) == message[name]
        plain = {"role": "assistant", "content": message["content"]}
        counts = [
            small.ask("/tokenize", messages=[*asked["messages"], x])["count"]
            for x in (plain, message, plain | {"reasoning_content": "Hm, so."})
        ]
        assert counts[0] < counts[1] == counts[2]  # the template shows earlier reasoning
        closed = small.ask("/v1/chat/completions", **asked, chat_template_kwargs={"think": False})
        assert closed["choices"][0]["message"].keys() == {"role", "content"}
        bad = asked | {"structured_outputs": {"regex": "("}}
        assert small.refused(400, "/v1/chat/completions", **bad)["param"] == "structured_outputs"
