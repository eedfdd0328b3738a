"""Chat templates with mistakes in them, or that do not end, are refused in one line."""

import time
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from faults import Peak
from kvfold.calibration.documents import conversation
from kvfold.hub import loading
from kvfold.utils import text
from kvfold.utils.bounded import bounded
from kvfold.utils.text import render_chat, reply_words

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}"
ENDS = "{% endfor %}{% endfor %}"
WRONG = {
    "syntax": "{% for %}",
    "division": "{{ 1 / 0 }}",
    "types": "{{ 'a' + 1 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "range": "{{ range(10 ** 9) }}",
    "file": "{% include '/etc/passwd' %}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "changes": "{{ messages.append(1) }}",
    "memory": "{{ 'a' * 10 ** 18 }}",
    "padding": "{{ '{:>1000000000000}'.format(1) }}",
    "nesting": "{% if 1 %}" * 150 + "{% endif %}" * 150,
    "parentheses": "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
}
ENDLESS = {
    "loop": LOOPS + ENDS,
    "text": LOOPS + "{{ 'x' * 1000 }}" + ENDS,
    "doubled": "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}",
}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def tokenizer() -> AutoTokenizer:
    return loading.load_tokenizer("reference:gqa")


@pytest.mark.parametrize("name", WRONG)
def test_whatever_a_template_raises_is_one_value_error(name, tokenizer) -> None:
    tokenizer.chat_template = WRONG[name]
    for write in (render_chat, reply_words, lambda x, *_: conversation(HELLO, x)):
        arguments = (HELLO,) if write is render_chat else ()
        with pytest.raises(ValueError, match="the model's chat template refuses them") as raised:
            write(tokenizer, *arguments)
        assert len(str(raised.value)) < 400 and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_ends_within_its_bounds(name, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(text, "TEMPLATE_SECONDS", 1.0)
    monkeypatch.setattr(text, "TEMPLATE_BYTES", 2**27)
    tokenizer.chat_template, begin = ENDLESS[name], time.monotonic()
    with (
        Peak() as peak,
        pytest.raises(ValueError, match=r"it takes more than (1 second|\d+ bytes)"),
    ):
        render_chat(tokenizer, HELLO)
    assert time.monotonic() - begin < 20 and peak.bytes < 2**30


def test_what_ends_at_its_deadline_ends_once() -> None:
    """A call that is done as its time is up: nothing is raised behind it."""
    seen = SimpleNamespace(done=0, late=0)
    for i in range(60):
        end = time.monotonic() + 0.01 + i % 7 * 1e-4

        def wait(end: float = end) -> None:
            while time.monotonic() < end:
                pass

        try:
            bounded(0.01, 2**40, wait)
            seen.done += 1
        except TimeoutError:
            seen.late += 1
        for _ in range(100):
            pass
    assert seen.done + seen.late == 60


def test_what_a_call_returns_and_raises_comes_out() -> None:
    assert bounded(5, 2**40, lambda: 3) == 3
    with pytest.raises(KeyError):
        bounded(5, 2**40, lambda: {}[1])
