"""Text that keeps to a schema: the engine's and the server's, in a batch beside other text."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("xgrammar", reason='needs pip install "kvfold[structured]"')

from kvfold import LLM, SamplingParams
from kvfold.engine.api.grammar import GrammarGuide, Grammars
from kvfold.engine.core import launched
from kvfold.engine.runner import sampler
from serving import Served, serving, small_llm

KINDS = ["cat", "dog"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kinds": {"type": "array", "items": {"enum": KINDS}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "kinds"],
}
LENGTH = {"max_new_tokens": 100}


def check(text: str) -> None:
    """Whether a text keeps to SCHEMA, by hand."""
    found = json.loads(text)
    assert list(found) == ["name", "age", "kinds"], text
    assert isinstance(found["name"], str) and len(found["name"]) <= 8
    assert type(found["age"]) is int and 0 <= found["age"] <= 120
    assert 1 <= len(found["kinds"]) <= 2 and set(found["kinds"]) <= set(KINDS)


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    with serving(small_llm()) as served:
        yield served


@pytest.fixture(scope="module")
def llm(small: Served) -> LLM:
    return small.llm


def test_texts_keep_to_a_schema_and_leave_those_beside_alone(llm: LLM) -> None:
    drawn = {"temperature": 1.5, **LENGTH}
    guided = [SamplingParams(json_schema=SCHEMA, **LENGTH)]
    guided += [SamplingParams(json_schema=SCHEMA, seed=i, **drawn) for i in range(6)]
    free = [SamplingParams(max_new_tokens=30), SamplingParams(seed=9, **drawn)]
    wanted = [llm.generate("The old house", x)[0].token_ids for x in free]
    found = llm.generate(["The old house"] * 9, [*guided[:3], *free, *guided[3:]])
    assert [x.token_ids for x in found[3:5]] == wanted
    for one in (*found[:3], *found[5:]):
        assert one.finish_reason == "eos"
        check(one.text)
    assert len({x.text for x in found}) > 5


def test_a_regular_expression(llm: LLM) -> None:
    sampling = SamplingParams(regex="(ab|cd){2,3}!", temperature=1.0, seed=1)
    (found,) = llm.generate("The old", sampling)
    assert found.finish_reason == "eos" and found.text.removesuffix("!").strip("abcd") == ""


def test_logprobs_are_of_the_model_as_it_is(llm: LLM) -> None:
    asked = {"max_new_tokens": 1, "logprobs": 2}
    (free,) = llm.generate("The old house", SamplingParams(**asked))
    (guided,) = llm.generate("The old house", SamplingParams(json_schema=SCHEMA, **asked))
    assert guided.text == "{" and guided.logprobs[0].top == free.logprobs[0].top
    assert guided.logprobs[0].chosen < free.logprobs[0].top[-1][1]


def test_a_grammar_goes_on_after_pre_emptions_and_steps_run_again(llm: LLM, monkeypatch) -> None:
    samplings = [
        SamplingParams(json_schema=SCHEMA, temperature=1.5, seed=i, **LENGTH) for i in (4, 5)
    ]
    wanted = [x.token_ids for x in llm.generate(["The old house"] * 2, samplings)]
    requests = [llm.request("The old house", x, None)[0] for x in samplings]
    draw, failed = sampler.sample, []

    def sample(logits, *rest):
        found = draw(logits, *rest)
        if len(logits) == 2 and len(failed) < 3:
            failed.append(len(requests[0].outputs))
            raise ValueError("lost")
        return found

    monkeypatch.setattr(launched, "sample", sample)
    outputs = []
    for request in requests:
        llm.engine.submit(request)
    for step in range(200):
        if step in (6, 12):
            llm.engine.scheduler._requeue(requests[0])
        outputs += llm.engine.step()
    found = [[t for x in outputs if x.id == r.id for t in x.token_ids] for r in requests]
    assert [tuple(x) for x in found] == wanted and len(failed) == 3


def test_a_guide_reads_every_token_once(llm: LLM) -> None:
    (wanted,) = llm.generate("A", SamplingParams(json_schema=SCHEMA, **LENGTH))
    guide = llm.request("A", SamplingParams(json_schema=SCHEMA), None)[0].guide
    for count in range(len(wanted.token_ids)):
        first, again = (guide.allowed_tokens(wanted.token_ids[:count]) for _ in range(2))
        assert (first == again).all()
        token = wanted.token_ids[count]
        assert first[token // 32] >> (token % 32) & 1
    with pytest.raises(RuntimeError, match="none that the grammar allows"):
        guide.allowed_tokens((*wanted.token_ids[:-1], 1))


def test_a_grammar_is_compiled_once(llm: LLM) -> None:
    def process_of(schema: dict) -> object:
        return llm.request("A", SamplingParams(json_schema=schema), None)[0].guide._process

    first, again, other = (process_of({"const": x}) for x in ("once", "once", "twice"))
    assert first is again is not other


CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Who?"}]}


def json_format(schema: Any) -> dict[str, Any]:
    wanted = {"name": "cat", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_the_server_answers_in_json(small: Served, temperature: float) -> None:
    asked = ASKED | {"temperature": temperature, "seed": 2, "max_tokens": 100}
    for choice in small.ask(CHAT, n=2, **asked, **json_format(SCHEMA))["choices"]:
        assert choice["finish_reason"] == "stop"
        check(choice["message"]["content"])


def test_any_object_and_a_pattern(small: Served) -> None:
    any_object = {"response_format": {"type": "json_object"}}
    first = small.ask(prompt="A", max_tokens=1, temperature=0, **any_object)["choices"][0]
    assert first["text"][0] == "{"
    plain = {"response_format": {"type": "text"}}
    assert small.ask(prompt="A", max_tokens=1, temperature=0, **plain)["choices"][0]["text"] != "{"
    pattern = {"structured_outputs": {"regex": "[0-9]{3}"}}
    assert small.ask(prompt="A", **pattern)["choices"][0]["text"].isdecimal()


DEEP: Any = {}
for _ in range(70):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (json_format({"type": "objec"}), "response_format", 'Unsupported type "objec"'),
        (json_format(False), "response_format", "cannot be followed"),
        (json_format(3), "response_format", "expected"),
        (json_format(DEEP), "response_format", "at most 64 levels"),
        (json_format({"pattern": "a" * 2000}), "response_format", "at most 1024 characters"),
        (json_format({"required": ["a" * 1000] * 70}), "response_format", "at most 65536"),
        ({"response_format": {"type": "json_schema"}}, "response_format", '"schema"'),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
        ({"structured_outputs": {"regex": "(["}}, "structured_outputs", "Unclosed"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs", "regex"),
        (json_format({}) | {"ignore_eos": True}, "response_format", "where the text ends"),
        (json_format({}) | {"min_tokens": 2}, "response_format", "where the text ends"),
        (json_format({}) | {"structured_outputs": {"regex": "a"}}, "response_format", "give one"),
    ],
)
def test_what_is_no_grammar_is_refused(small: Served, body, param, words) -> None:
    error = small.refused(400, CHAT, **ASKED, **body)
    assert error["param"] == param and words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("begun", [False, True])
def test_settings_that_leave_no_token_are_the_clients_mistake(small: Served, begun) -> None:
    """At the first token, and behind one that may come."""
    allowed = small.llm.tokenizer.convert_tokens_to_ids(["{" if begun else "b"])
    asked = {"prompt": "A", "allowed_token_ids": allowed, **json_format(SCHEMA)}
    error = small.refused(400, **asked)
    assert "leave no token" in error["message"] and f"after {int(begun)}:" in error["message"]
    assert error["param"] == "allowed_token_ids" and "response_format" in error["message"]
    assert small.ask(prompt="A", max_tokens=2)["usage"]["completion_tokens"] == 2


def test_an_engine_alone_needs_a_guide(llm: LLM) -> None:
    with pytest.raises(ValueError, match="need a `guide`"):
        llm.engine.add([1], SamplingParams(regex="a"))


def test_a_slow_schema_holds_up_nobody_else(small: Served, monkeypatch) -> None:
    """While one is compiled, others are answered; it is answered, too."""
    begun, go = threading.Event(), threading.Event()
    guide = Grammars.guide

    def slow(self: Grammars, sampling: SamplingParams, *more: Any) -> GrammarGuide:
        begun.set()
        assert go.wait(30)
        return guide(self, sampling, *more)

    monkeypatch.setattr(Grammars, "guide", slow)
    body = {"prompt": "a", "max_tokens": 9, "structured_outputs": {"regex": "[0-9]{3}"}}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(small.ask, **body)
        try:
            assert begun.wait(30)
            assert small.ask(prompt="a", max_tokens=2)["choices"]
            assert small.ask("/tokenize", prompt="a")["count"] >= 1
            assert not waiting.done()
        finally:
            go.set()
        assert waiting.result()["choices"][0]["text"].isdigit()
