"""Check a value against a type annotation, and describe the annotation to users."""

from collections.abc import Callable
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}
_WORDS[None.__class__] = "None"


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type. A bool is not a number."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(value, option) for option in inside)
    if origin is Literal:
        return value in inside
    if origin in (list, tuple):  # one serves as the other
        return isinstance(value, list | tuple) and _all_fit(value, inside[0])
    if Callable in (kind, origin):
        return callable(value)
    if kind in (int, float):
        number = Integral if kind is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, kind)


def _all_fit(values: list | tuple, kind: Any) -> bool:
    """Whether all values are of a type. For plain classes one value per type is checked, since
    there may be 100,000s."""
    plain = get_origin(kind) is None
    return all(
        fits(item, kind) for item in ({type(x): x for x in values}.values() if plain else values)
    )


def describe(kind: Any) -> str:
    """Describe a type: "a whole number"."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(describe(option) for option in inside if option is not None.__class__)
    if origin is Literal:
        return f"one of {', '.join(map(str, inside))}"
    if origin in (list, tuple):
        item = describe(inside[0]).replace("a ", "").replace(" or ", "s or ")
        return f"a {origin.__name__} of {item}s"
    return _WORDS.get(kind) or f"a {getattr(kind, '__name__', kind)}"
