"""Chat templates with mistakes in them, or that do not end, are refused in one line."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from faults import Peak
from kvfold.calibration.documents import conversation
from kvfold.hub import loading
from kvfold.utils import chat, template_sandbox
from kvfold.utils.bounded import bounded
from kvfold.utils.chat import render_chat, reply_words

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
HUGE = 3 * 10**9
LONG = "{% set ns = namespace(x='a' * 2**20) %}"
DOUBLING = (
    "{% set ns = namespace(x=[1]) %}"
    "{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
)
# Each makes gigabytes in one step, which nothing in Python ends.
LARGE = {
    "repeated": f"{{{{ 'a' * {HUGE} }}}}",
    "repeated by a variable": "{{ 'a' * huge }}",
    "repeated list": "{{ [1] * huge }}",
    "repeated twice": LONG + "{{ [ns.x] * 2**20 }}",
    "power": "{{ 10 ** huge }}",
    "product": "{% set ns = namespace(x=2**60000) %}{{ ns.x * ns.x }}",
    "centred": "{{ 'a'.center(huge) }}",
    "filled": "{{ 'a'.zfill(huge) }}",
    "tabs": "{{ '\t'.expandtabs(huge) }}",
    "filter": "{{ 'a'|center(huge) }}",
    "filter of a constant": f"{{{{ 'a'|center({HUGE}) }}}}",
    "indent": "{{ 'a\na'|indent(huge) }}",
    "named": "{{ 'a\na'|indent(width=huge) }}",
    "json": "{{ [1]|tojson(indent=huge) }}",
    "batch": "{{ [1]|batch(huge, 'a')|list }}",
    "format": f"{{{{ '{{:>{HUGE}}}'.format(1) }}}}",
    "format by a value": "{{ '{:>{}}'.format(1, huge) }}",
    "format by a mapping": "{{ '{x:>{y}}'.format_map({'x': 1, 'y': huge}) }}",
    "format often": LONG + "{{ ('{0}' * 1000).format(ns.x) }}",
    "percent": f"{{{{ '%{HUGE}d' % 1 }}}}",
    "percent by a value": "{{ '%*d' % (huge, 1) }}",
    "percent filter": f"{{{{ '%{HUGE}d'|format(1) }}}}",
    "replace": LONG + "{{ ns.x.replace('a', 'b' * 1000) }}",
    "replace of nothing": LONG + "{{ ns.x|replace('', 'b' * 1000) }}",
    "translate": LONG + "{{ ns.x.translate({97: 'b' * 1000}) }}",
    "join": LONG + "{{ ns.x|join('b' * 1000) }}",
    "join of one text": LONG + "{{ ''.join([ns.x] * 1000) }}",
    "join of a generator": LONG + "{{ ([ns.x] * 1000)|map('upper')|join }}",
    "joined": LONG + "{{ " + " ~ ".join(["ns.x"] * 300) + " }}",
    "written": LONG + "{{ ns.x }}" * 300,
    "block": LONG + "{% set y %}" + "{{ ns.x }}" * 300 + "{% endset %}",
    "macro": LONG + "{% macro f() %}" + "{{ ns.x }}" * 300 + "{% endmacro %}{{ f() }}",
    "nested": DOUBLING + "{{ ns.x }}",
    "nested string": DOUBLING + "{{ ns.x|string }}",
    "nested json": DOUBLING + "{{ ns.x|tojson }}",
    "nested in a namespace": DOUBLING + "{{ ns }}",
    "nested join": DOUBLING + "{{ ns.x ~ '' }}",
    "sum": LONG + "{{ ([[ns.x] * 2**10] * 2**10)|sum(start=[]) }}",
    "words": "{{ lipsum(huge) }}",
}
ALIKE = [
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "\n{%- for m in messages %}\n  {{- m['role'] + ': ' ~ m['content'] | trim }}\n{%- endfor %}\n",
    "{{ bos_token }}{{ messages | tojson(indent=2) }}{{ messages|length }}",
    "{{ messages|map(attribute='content')|join(', ') }}{{ '%s-%05d' % (messages[0].role, 12) }}",
    "{{ '{:>8}|{}'.format('ab', 1700000000) }}{{ 'a b'.split(' ') }}{{ None }}{{ 1.5 * 2 }}",
    "{{ 'x' * 3 }}{{ [1] * 2 }}{{ 7 * 6 }}{{ 2 ** 10 }}{{ 'a'|center(5) }}{{ 'a\nb'|indent }}",
    "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}"
    "{{ ns.a }}{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('y') }}"
    "{% if add_generation_prompt %}A{% endif %}",
    "{% generation %}{{ messages[-1].content }}{% endgeneration %}"
    "{% if nothing is defined %}x{% endif %}",
    "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}"
    "{{ m.content|replace('o', '0') }}{% endfor %}",
    "{{ messages[0].content.replace('h', 'jj').upper()|list }}{{ big|default(100000) }}"
    "{{ strftime_now('%%') }}",
]
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


@pytest.mark.parametrize("name", LARGE)
def test_no_step_of_a_template_makes_gigabytes(name, tokenizer) -> None:
    tokenizer.chat_template = LARGE[name]
    with Peak() as peak, pytest.raises(ValueError, match="the model's chat template refuses them"):
        render_chat(tokenizer, HELLO, huge=HUGE)
    assert peak.bytes < 700 * 2**20


@pytest.mark.parametrize("template", ALIKE)
@pytest.mark.parametrize("more", [True, False])
def test_a_bounded_template_writes_what_transformers_does(template, more, tokenizer) -> None:
    tokenizer.chat_template = template
    messages = [*HELLO, {"role": "assistant", "content": "well, hello\n"}, *HELLO]
    wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=more)
    assert render_chat(tokenizer, messages, add_generation_prompt=more) == wanted


def test_a_last_message_is_continued_as_transformers_does(tokenizer) -> None:
    tokenizer.chat_template = ALIKE[0]
    how = {"continue_final_message": True}
    wanted = tokenizer.apply_chat_template(HELLO, tokenize=False, **how)
    assert render_chat(tokenizer, HELLO, **how) == wanted == "user: hello"


def test_templates_of_others_are_compiled_as_before(tokenizer, monkeypatch) -> None:
    from transformers.utils import chat_template_utils

    before = chat_template_utils.ImmutableSandboxedEnvironment
    monkeypatch.setattr(template_sandbox, "MOST_SIZE", 1000)
    tokenizer.chat_template = "{{ 'a' * 1001 }}"
    for _ in range(2):
        with pytest.raises(ValueError, match="a text or list of more than 1000 characters"):
            render_chat(tokenizer, HELLO)
        assert chat_template_utils.ImmutableSandboxedEnvironment is before
        assert len(tokenizer.apply_chat_template(HELLO, tokenize=False)) == 1001
    tokenizer.chat_template = "{{ 'a' * 1000 }}"
    assert len(render_chat(tokenizer, HELLO)) == 1000


def test_a_slow_template_holds_no_other_back(tokenizer) -> None:
    from transformers.utils import chat_template_utils

    before = chat_template_utils.ImmutableSandboxedEnvironment
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    bounded_by_another = template_sandbox.bounded_templates(chat_template_utils)  # for long
    with ThreadPoolExecutor(1) as pool, bounded_by_another:
        quick = pool.submit(render_chat, tokenizer, HELLO)
        assert quick.result(60) == HELLO[0]["content"]
        assert chat_template_utils.ImmutableSandboxedEnvironment is not before
    assert chat_template_utils.ImmutableSandboxedEnvironment is before


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_ends_within_its_bounds(name, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(chat, "TEMPLATE_SECONDS", 1.0)
    monkeypatch.setattr(chat, "TEMPLATE_BYTES", 2**27)
    tokenizer.chat_template, begin = ENDLESS[name], time.monotonic()
    with (
        Peak() as peak,
        pytest.raises(
            ValueError,
            match=r"it takes more than (1 second|\d+ bytes)|a text or list of more than",
        ),
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
