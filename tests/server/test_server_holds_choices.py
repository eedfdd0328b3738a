"""What a request's choices share is read and checked once, however many there are, and texts that
are long, or many, keep no other text waiting."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvfold import SamplingParams
from kvfold.engine.api.llm import LLM
from kvfold.engine.runner.edits import logit_edits
from kvfold.server.limits import Limits
from serving import Served, httpx, serving, small_llm

LONG = "a b " * 2**14


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    with serving(small_llm(max_tokens=1024, kv_bytes=2**24)) as served:
        yield served


@pytest.fixture
def counted(monkeypatch) -> Callable[[Any, str], list[Any]]:
    """Arguments of all calls of a method from now on."""

    def count(owner: Any, name: str) -> list[Any]:
        calls: list[Any] = []
        function = getattr(owner, name)

        def call(*arguments: Any, **more: Any) -> Any:
            calls.append(arguments)
            return function(*arguments, **more)

        monkeypatch.setattr(owner, name, call)
        return calls

    return count


MANY = {
    "bad words": {"bad_words": [f"w{i}xy" for i in range(1024)]},
    "allowed ids": {"allowed_token_ids": [i % 4096 for i in range(2**18)]},
    "stops": {"stop": [chr(97 + i) * 1024 for i in range(16)]},
    "biases": {"logit_bias": {str(i): 1.5 for i in range(1024)}},
    "stop ids": {"min_tokens": 2, "stop_token_ids": list(range(1024))},
}


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("prompt", ["x", ["x"] * 16])
def test_settings_are_read_once(small: Served, counted, name: str, prompt: Any) -> None:
    shared, checked = counted(LLM, "shared"), counted(SamplingParams, "__post_init__")
    read = counted(LLM, "encode_after")
    asked = {"prompt": prompt, "max_tokens": 2, "seed": 1, **MANY[name]}
    found = small.ask(n=16 if prompt == "x" else 1, **asked)
    assert len(found["choices"]) == 16
    assert len(shared) == len(read) == 1 and len(checked) <= 3


def test_choices_are_as_alone(small: Served) -> None:
    asked = {"max_tokens": 12, "temperature": 1.0, "bad_words": ["the", "old house"]}
    asked |= {"stop": ["zz", "and"], "logit_bias": {"5": 2, "90": -3}, "presence_penalty": 0.5}
    found = small.ask(prompt=["The old", "A day"], n=2, seed=7, **asked)["choices"]
    alone = [
        small.ask(prompt=prompt, seed=seed, **asked)["choices"][0]
        for prompt in ("The old", "A day")
        for seed in (7, 8)
    ]
    assert [x["text"] for x in found] == [x["text"] for x in alone]


def test_a_grammar_is_asked_once_what_may_come_first(small: Served, counted) -> None:
    pytest.importorskip("xgrammar", reason='needs pip install "kvfold[structured]"')
    from kvfold.engine.api.grammar import GrammarProcess

    asked = counted(GrammarProcess, "prepare")
    form = {"structured_outputs": {"regex": "[0-9]{3}"}}
    found = small.ask(prompt="a", n=8, max_tokens=1, temperature=1.0, **form)["choices"]
    assert all(x["text"].isdigit() for x in found) and len(asked) == 1


def test_a_bad_word_without_tokens_forbids_nothing(small: Served, monkeypatch) -> None:
    monkeypatch.setattr("kvfold.engine.api.llm.encode_all", lambda _, texts: [[] for _ in texts])
    assert small.ask(prompt="a", bad_words=["x"], max_tokens=2)["choices"]


def test_edits_are_of_every_setting(small: Served) -> None:
    """By hand, of a token that several settings name."""
    words = ((3,), (5, 6), (7, 5, 8), (9, 9))
    wanted = SamplingParams(
        logit_bias=((4, 1.0), (4, 2.0), (3, 9.0), (11, -1.0)),
        bad_words=words,
        min_tokens=9,
        stop_token_ids=(12, 12),
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        allowed_token_ids=(40, 4, 6),
    )
    request, _ = small.llm.request([4, 30], wanted, None)
    request.token_ids += [7, 5, 7, 5]
    edits = logit_edits([request], {2})
    assert edits is not None and list(edits.masked) == [0] and not edits.refused
    told = {
        token: (bias, repetition, penalty)
        for token, bias, repetition, penalty in zip(
            edits.tokens.tolist(), edits.bias, edits.repetition, edits.penalty, strict=True
        )
    }
    ends = dict.fromkeys((2, 3, 6, 8, 12), (-np.inf, 1.0, 0.0))
    said = {5: (0.0, 2.0, 1.25), 7: (0.0, 2.0, 1.25), 30: (0.0, 2.0, 0.0), 4: (2.0, 2.0, 0.0)}
    assert told == ends | said | {11: (-1.0, 1.0, 0.0)}
    bits = np.unpackbits(edits.bits.astype("<i4").view(np.uint8), axis=1, bitorder="little")
    assert np.flatnonzero(bits).tolist() == [4, 6, 40]


class Held:
    """Holds every long text in the tokenizer until it is let go."""

    def __init__(self, monkeypatch) -> None:
        self.begun, self.go, self.texts = threading.Semaphore(0), threading.Event(), list[str]()
        from kvfold.server import service

        function = service.encode_prompt

        def hold(tokenizer: Any, text: str) -> list[int]:
            if len(text) >= len(LONG):
                self.texts.append(text)
                self.begun.release()
                assert self.go.wait(60)
            return function(tokenizer, text)

        monkeypatch.setattr(service, "encode_prompt", hold)


def test_a_long_text_keeps_no_short_one_waiting(small: Served, monkeypatch) -> None:
    held = Held(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(small.ask, "/tokenize", prompt=LONG)
        try:
            assert held.begun.acquire(timeout=60)
            assert small.ask(prompt="The old house", max_tokens=1)["choices"]
            assert small.ask("/detokenize", tokens=[5, 6])["prompt"]
        finally:
            held.go.set()
        assert long.result()["count"] == len(long.result()["tokens"]) > 2**14


def test_who_left_is_not_tokenised_for(small: Served, monkeypatch) -> None:
    held = Held(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(small.ask, "/tokenize", prompt=LONG)
        try:
            assert held.begun.acquire(timeout=60)
            with pytest.raises(httpx.TimeoutException):
                left = {"prompt": "b" + LONG}
                httpx.post(f"{small.url}/tokenize", json=left, timeout=1)
            time.sleep(0.5)
            last = pool.submit(small.ask, "/tokenize", prompt="c" + LONG)
        finally:
            held.go.set()
        assert first.result() and last.result()
    assert [text[0] for text in held.texts] == ["a", "c"]


def test_as_many_texts_wait_as_choices_may(monkeypatch) -> None:
    held = Held(monkeypatch)

    def asked(small: Served) -> int:
        while (answer := small.post("/tokenize", prompt=LONG)).status_code == 429:
            time.sleep(0.05)  # a short one had the last place
        return answer.json()["count"]

    with (
        serving(small_llm(), limits=Limits(max_queue=0)) as small,
        ThreadPoolExecutor(4) as pool,
    ):
        waiting = [pool.submit(asked, small) for _ in range(4)]
        try:
            assert held.begun.acquire(timeout=60)
            deadline = time.monotonic() + 60
            while (answer := small.post("/tokenize", prompt="a")).status_code == 200:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            held.go.set()
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "queue_full"
        assert all(x.result() for x in waiting) and small.ask("/tokenize", prompt="a")


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_characters_are_bounded_whatever_their_tokens(small: Served, path: str) -> None:
    begun = time.process_time()
    error = small.refused(400, path, prompt=" " * (2**22))
    assert "characters" in error["message"] and time.process_time() - begun < 1


@pytest.mark.parametrize("penalty", [1e-40, 1e-300, 1e308, 0])
def test_a_penalty_that_no_logit_bears_is_refused(small: Served, penalty: float) -> None:
    error = small.refused(400, prompt="a", repetition_penalty=penalty)
    assert error["param"] == "repetition_penalty" and "[0.01, 100]" in error["message"]


def test_a_grammar_keeps_to_the_limit_of_memory_that_a_server_has() -> None:
    pytest.importorskip("xgrammar", reason='needs pip install "kvfold[structured]"')
    code = f"""
import resource
from kvfold.engine.api import grammar, grammar_process
most = {2**40}
resource.setrlimit(resource.RLIMIT_AS, (most, most))
grammar_process.MEMORY = 2**41
grammar_process._limit_memory()
assert resource.getrlimit(resource.RLIMIT_AS) == (most, most)
print(grammar.too_slow("regex", "takes long"))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"ulimit -v allows it {2**40} bytes" in said.stdout


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("truncate_prompt_tokens", 3, None),
        ("include_stop_str_in_output", True, False),
        ("prompt_embeds", "AAAA", None),
        ("logits_processors", ["x.y"], []),
        ("guided_decoding", {"regex": "a"}, None),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused(
    small: Served, name: str, value: Any, neutral: Any
) -> None:
    assert small.refused(400, prompt="a", **{name: value})["param"] == name
    assert small.ask(prompt="a", max_tokens=1, **{name: neutral})["choices"]
