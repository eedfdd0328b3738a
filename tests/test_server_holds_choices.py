"""What a request's choices share is read and checked once, however many there are, and texts that
are long, or many, keep no other text waiting."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvfold import SamplingParams
from kvfold.engine.edits import edits_of
from kvfold.engine.llm import LLM
from serving import Served, serving, small_llm


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
    read = counted(LLM, "encode_behind")
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
    from kvfold.engine.grammar import GrammarProcess

    asked = counted(GrammarProcess, "ask")
    form = {"structured_outputs": {"regex": "[0-9]{3}"}}
    found = small.ask(prompt="a", n=8, max_tokens=1, temperature=1.0, **form)["choices"]
    assert all(x["text"].isdigit() for x in found) and len(asked) == 1


def test_a_bad_word_without_tokens_forbids_nothing(small: Served, monkeypatch) -> None:
    monkeypatch.setattr("kvfold.engine.llm.encode_all", lambda _, texts: [[] for _ in texts])
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
    edits = edits_of([request], {2})
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
