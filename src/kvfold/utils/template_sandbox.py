"""Jinja's sandbox with a bound on what one step of a chat template makes. Nothing in Python ends
such a step, be it of gigabytes: the deadline and the bound on memory of `bounded` act between two.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import Lock
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MOST_SIZE = 2**28  # characters of a text that a step makes; 8 of them for a number in a list
MOST_BITS = 2**16  # of a whole number
NUMBER = 8
# What makes more than it is given, by its name as a filter or as a text's method.
WIDENING = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch"}
WIDENING |= {"slice", "tojson", "translate", "urlize"}
WRITING = {"join", "string", "pprint", "urlencode", "xmlattr", "sum", "escape", "e", "forceescape"}
_DIGITS = re.compile(r"\d+")
_WIDTH_GIVEN = re.compile(r"\{[^{}]*:[^{}]*\{|%[^%a-zA-Z]*\*")  # as {:{}} and %*d have it
_swapping = Lock()
_inside: list[Any] = []  # what the module's class was, for every thread that is inside


@contextmanager
def bounded_templates(module: Any) -> Iterator[None]:
    """Within, `module` makes a BoundedSandbox where it makes a sandbox of Jinja. Several threads
    may be inside: the last to leave puts Jinja's back."""
    with _swapping:
        _inside.append(_inside[0] if _inside else module.ImmutableSandboxedEnvironment)
        module.ImmutableSandboxedEnvironment = BoundedSandbox
    try:
        yield
    finally:
        with _swapping:
            before = _inside.pop()
            if not _inside:
                module.ImmutableSandboxedEnvironment = before


class TooLarge(ValueError):
    """A step that would make more than MOST_SIZE."""

    def __init__(self) -> None:
        super().__init__(f"it makes a text or list of more than {MOST_SIZE} characters")


def check_size(size: int) -> None:
    if size > MOST_SIZE:
        raise TooLarge


def size_of(value: Any, known: dict[int, int] | None = None) -> int:
    """Characters of a value, written out: what is in it twice counts twice. known: sizes by the
    identity of objects. Raises TooLarge."""
    known = {} if known is None else known
    if isinstance(value, str | bytes):
        size = len(value)
    elif isinstance(value, int):
        size = NUMBER + value.bit_length() // 3
    elif (seen := known.get(id(value))) is not None:
        size = seen
    else:
        known[id(value)] = NUMBER  # where it is in itself
        size = known[id(value)] = NUMBER + sum(size_of(x, known) for x in _items(value))
    check_size(size)
    return size


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, Namespace):
        value = value._Namespace__attrs
    if isinstance(value, dict):
        return (*value, *value.values())
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def taken(parts: Iterable[Any]) -> list[Any]:
    """Like `list`. Raises as `check_size` if the parts together are too large."""
    items, size = list[Any](), 0
    for part in parts:
        check_size(size := size + size_of(part))
        items.append(part)
    return items


def joined(parts: Iterable[str]) -> str:
    """Like "".join, with which Jinja collects the output of a template."""
    return "".join(taken(parts))


def _width(arguments: Iterable[Any]) -> int:
    """The most that one of these widens by."""
    return max((abs(int(x)) if _is_number(x) else size_of(x) for x in arguments), default=0)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    check_size(size_of(text) + str(text).count(str(old)) * size_of(new))


def _check_join(texts: Any, between: Any = "", *_: Any) -> None:
    check_size(size_of(texts) + len(texts) * len(str(between)))


def _check_format(pattern: Any, *values: Any) -> None:
    """Widths stand in the pattern, or among values where it says so; a value may come often."""
    text = str(pattern)
    check_size(max((int(x[:20]) for x in _DIGITS.findall(text)), default=0))
    check_size(len(text) + (text.count("{") + text.count("%")) * size_of(values))
    if _WIDTH_GIVEN.search(text):
        check_size(len(text) * _width(values))


def _check_grown(name: str, value: Any, *arguments: Any) -> None:
    """Before a filter or method is called."""
    if name == "replace":
        _check_replace(value, *arguments)
    elif name == "join":
        _check_join(value, *arguments[:1])
    elif name == "format":
        _check_format(value, *arguments)
    elif name in WIDENING:
        check_size(size_of(value) * (1 + _width(arguments)))
    elif name in WRITING:
        size_of(value)


def _guarded(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that checks what it makes before it does."""
    first = int(hasattr(filter, "jinja_pass_arg"))  # Jinja passes an environment before the value

    @wraps(filter)
    def guarded(*arguments: Any, **named: Any) -> Any:
        before, value, rest = arguments[:first], arguments[first], arguments[first + 1 :]
        if isinstance(value, Iterator):  # read once, to be measured
            value = taken(value)
        _check_grown(name, value, *rest, *named.values())
        return filter(*before, value, *rest, **named)

    return guarded


def _check_operator(operator: str, left: Any, right: Any) -> None:
    whole = isinstance(left, int) and isinstance(right, int)
    sequence = str | bytes | list | tuple
    if operator == "*" and whole:
        _check_bits(left.bit_length() + right.bit_length())
    elif operator == "**" and whole:
        _check_bits(left.bit_length() * max(right, 0))
    elif operator == "*":
        left, right = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(left, sequence) and isinstance(right, int):
            check_size(len(left) * right * (1 if isinstance(left, str | bytes) else NUMBER))
    elif operator == "+" and isinstance(left, sequence) and isinstance(right, sequence):
        check_size(len(left) + len(right))
    elif operator == "%" and isinstance(left, str | bytes):
        _check_format(left, *(right if isinstance(right, tuple) else (right,)))


def _check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise ValueError(f"it makes a number of more than {MOST_BITS} bits")


class _Generator(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`~`, whose texts Jinja joins without a word to the sandbox."""
        self.write("environment.texts_joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Templates raise ValueError where a step would make more than MOST_SIZE."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    code_generator_class = _Generator
    concat = staticmethod(joined)

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, finalize=self._written, **settings)
        del self.globals["lipsum"]

    def from_string(self, source: Any, *arguments: Any, **settings: Any) -> Any:
        self.filters = {name: _guarded(name, x) for name, x in self.filters.items()}
        return super().from_string(source, *arguments, **settings)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *arguments: Any, **named: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str | bytes):
            values = (*arguments, *named.values())
            if function.__name__ == "join" and values:  # the other way round than the filter
                texts = taken(values[0])
                _check_join(texts, owner)
                return super().call(context, function, texts)
            _check_grown(function.__name__, owner, *values)
        return super().call(context, function, *arguments, **named)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's own `format`, in the place of a text's."""
        write = super().wrap_str_format(value)
        if write is None:
            return None

        @wraps(write)
        def checked(*arguments: Any, **named: Any) -> str:
            mapped = arguments[0].values() if value.__name__ == "format_map" else arguments
            _check_format(value.__self__, *mapped, *named.values())
            return write(*arguments, **named)

        return checked

    @staticmethod
    def _written(value: Any) -> Any:
        """Of what a template writes."""
        size_of(value)
        return value

    @staticmethod
    def texts_joined(values: tuple[Any, ...]) -> str:
        size_of(values)
        return "".join(map(str, values))
