"""Fields that kvfold does not have: none changes an answer elsewhere and is dropped here."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason='needs pip install "kvfold[server]"')
from kvfold.server import unsupported_fields
from kvfold.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from kvfold.utils.tokens import encode
from serving import Served, serving, small_llm

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Who went to sea?"}]
GREEDY = {"temperature": 0, "max_tokens": 3}
BODIES: dict[str, tuple[type, dict[str, Any]]] = {
    COMPLETIONS: (CompletionBody, {"prompt": "The old house"} | GREEDY),
    CHAT: (ChatBody, {"messages": ASKED} | GREEDY),
    "/tokenize": (TokenizeBody, {"prompt": "The old house"}),
    "/detokenize": (DetokenizeBody, {"tokens": [5, 6]}),
}
NAMED = "{% for m in messages %}{{ m.name }} as {{ m.role }}: {{ m.content }}\n{% endfor %}"
# What callers send beside the prompt, as their code has it.
CALLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": (
        CHAT,
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
        | {"safety_identifier": "x", "prompt_cache_key": "y", "parallel_tool_calls": True}
        | {"modalities": ["text"], "prediction": {"type": "content", "content": "x"}}
        | {"tool_choice": "none", "logit_bias": {}, "logprobs": False},
    ),
    "langchain": (
        CHAT,
        {"n": 1, "stream": False, "max_completion_tokens": 3, "seed": 1, "stop": None}
        | {"presence_penalty": 0, "frequency_penalty": 0, "top_p": 1, "tool_choice": None},
    ),
    "langchain completions": (
        COMPLETIONS,
        {"top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "n": 1, "best_of": 1}
        | {"logit_bias": {}, "seed": None, "logprobs": None},
    ),
    "litellm": (CHAT, {"stream_options": {"include_usage": True}, "stream": True, "user": "me"}),
    "vllm bench": (
        COMPLETIONS,
        {"repetition_penalty": 1.0, "logprobs": None, "stream": True, "ignore_eos": True}
        | {"stream_options": {"include_usage": True}, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
    ),
    "sglang bench": (
        COMPLETIONS,
        {"best_of": 1, "stream": True, "ignore_eos": True}
        | {"stream_options": {"include_usage": True}},
    ),
    "guidellm": (
        COMPLETIONS,
        {"max_tokens": 3, "max_completion_tokens": 3, "stop": None, "ignore_eos": True}
        | {"stream": True}
        | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "lm-eval": (
        COMPLETIONS,
        {"prompt": [[5, 6], [7, 8]], "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True},
    ),
    "lm-eval until": (COMPLETIONS, {"stop": ["\n\n"], "seed": 1234, "skip_special_tokens": False}),
    "vllm defaults": (
        COMPLETIONS,
        {"use_beam_search": False, "length_penalty": 1.0, "include_stop_str_in_output": False}
        | {"spaces_between_special_tokens": True, "truncate_prompt_tokens": None, "suffix": ""}
        | {"add_special_tokens": True, "priority": 0, "bad_words": [], "stop_token_ids": []},
    ),
    "an answer sent back": (
        CHAT,
        {
            "messages": [
                *ASKED,
                {"role": "assistant", "content": "He.", "refusal": None, "annotations": []}
                | {"audio": None, "function_call": None, "tool_calls": None},
                *ASKED,
            ]
        },
    ),
}


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    with serving(small_llm()) as served:
        yield served


def told(answer: dict[str, Any]) -> Any:
    return answer.get("choices", answer)


@pytest.mark.parametrize("path", BODIES)
def test_a_misspelt_field_is_refused_with_its_neighbour(small: Served, path: str) -> None:
    kind, body = BODIES[path]
    for name in kind.__struct_fields__:
        error = small.refused(400, path, **body, **{name + "x": 1})
        assert (error["param"], error["code"]) == (name + "x", "unknown_parameter")
        assert error["message"] == f"{name}x: no such field; did you mean {name}?"
    error = small.refused(400, path, **body, **{"q\n`" * 90: None})
    assert "/docs lists" in error["message"] and len(error["message"]) < 140


def test_the_misspellings_of_a_stranger(small: Served) -> None:
    for name, meant in {"max_token": "max_tokens", "temprature": "temperature"}.items():
        assert f"did you mean {meant}?" in small.refused(400, prompt="a", **{name: 1})["message"]
    for part in (
        {"stream_options": {"include_usag": True}},
        {"response_format": {"type": "json_object", "schema": {}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strickt": 1}}},
    ):
        error = small.refused(400, prompt="a", **part)
        assert error["param"] == next(iter(part)) and "unknown field" in error["message"]
    error = small.refused(400, CHAT, messages=[{"role": "user", "contents": "a"}])
    assert error["param"] == "messages" and "unknown field `contents`" in error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_what_would_change_an_answer_is_refused_unless_neutral(small: Served, path: str) -> None:
    kind, body = BODIES[path]
    plain = told(small.ask(path, **body))
    neutral = {x: json.loads(values[-1]) for x, values in kind.unsupported.items()}
    ignored = {name: {"a": ["b"]} for name in unsupported_fields.IGNORED}
    assert told(small.ask(path, **body, **neutral, **ignored)) == plain
    nothing = dict.fromkeys((*neutral, *ignored))
    assert told(small.ask(path, **body, **nothing)) == plain
    for name in kind.unsupported:
        for value in ("x", 2.0):
            error = small.refused(400, path, **body, **{name: value})
            assert error["param"] == name and "not supported" in error["message"]
    for name in {"add_special_tokens", "include_reasoning"} & kind.unsupported.keys():
        opposite = not neutral[name]
        assert small.refused(400, path, **body, **{name: opposite})["param"] == name


def test_zero_is_no_neutral_length_penalty(small: Served) -> None:
    assert small.refused(400, prompt="a", length_penalty=0)["param"] == "length_penalty"


@pytest.mark.parametrize("name", CALLERS)
def test_what_callers_send_is_answered(small: Served, name: str) -> None:
    path, more = CALLERS[name]
    answer = small.post(path, **(BODIES[path][1] | more))
    assert answer.status_code == 200, answer.text
    assert "[DONE]" in answer.text if more.get("stream") else answer.json()["choices"]


def test_a_new_name_for_the_number_of_tokens(small: Served) -> None:
    """OpenAI's `max_completion_tokens` goes before `max_tokens`, in completions too."""
    for more, count in (({}, 16), ({"max_completion_tokens": 2}, 2)):
        found = small.ask(prompt="The old house", temperature=0, **more)
        assert found["usage"]["completion_tokens"] == count
    found = small.ask(prompt="The old house", max_tokens=5, max_completion_tokens=2)
    assert found["usage"]["completion_tokens"] == 2


def test_who_speaks_reaches_the_template(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small.llm.tokenizer, "chat_template", NAMED)
    named = [ASKED[0] | {"name": "Ann"}]
    ids = small.ask("/tokenize", messages=named)["tokens"]
    assert ids == encode(small.llm.tokenizer, "Ann as user: Who went to sea?\n")
    error = small.refused(400, CHAT, messages=[ASKED[0] | {"name": "a" * 257}])
    assert error["param"] == "messages"


def test_variables_make_no_template_large(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        small.llm.tokenizer, "chat_template", "{{ ' ' * pad }}{{ messages[0].role }}"
    )
    for pad, status in ((3 * 10**9, 400), (2, 200)):
        answer = small.post(CHAT, messages=ASKED, chat_template_kwargs={"pad": pad}, **GREEDY)
        assert answer.status_code == status, answer.text
        assert status == 200 or "more than 268435456 characters" in answer.text


@pytest.mark.parametrize("name", ["tokenizer", "how"])
def test_variables_may_have_any_name(small: Served, monkeypatch, name: str) -> None:
    monkeypatch.setattr(small.llm.tokenizer, "chat_template", "{{ NAME }}".replace("NAME", name))
    ids = small.ask("/tokenize", messages=ASKED, chat_template_kwargs={name: "Ann"})["tokens"]
    assert ids == encode(small.llm.tokenizer, "Ann")


def test_messages_with_more_than_text_are_refused_by_field(small: Served) -> None:
    for name, words in {
        "refusal": "is not supported by this server; leave it out",
        "reasoning_content": "belongs to messages of role assistant; got 'user'",
    }.items():
        error = small.refused(400, CHAT, messages=[*ASKED, ASKED[0] | {name: "hm"}])
        assert error["param"] == "messages"
        assert error["message"] == f"messages: {name} {words}"


def test_special_tokens_of_a_conversation_are_its_templates(small: Served) -> None:
    assert small.ask("/tokenize", messages=ASKED, add_special_tokens=False)
    error = small.refused(400, "/tokenize", messages=ASKED, add_special_tokens=True)
    assert error["param"] == "add_special_tokens"


def test_fields_that_are_not_read_are_let_go() -> None:
    """Each is a view of the whole body, which would stay as long as the request."""
    from kvfold.server.protocol import decode

    body = decode(CompletionBody, b'{"prompt": "a", "metadata": {"a": 1}, "tools": []}')
    assert body.metadata is body.tools is unsupported_fields.EMPTY
