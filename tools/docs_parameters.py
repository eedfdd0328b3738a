"""Lists of parameters in the docs site: a docstring's `name: what it is.` becomes an item each.

Docstrings of kvfold name parameters and fields in running text, which reads well in an editor and
poorly on a page.
"""

import re
from typing import Any

import griffe


class Parameters(griffe.Extension):
    """Give every parameter or field that a docstring explains a line of its own."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        _list(func, {x.name for x in func.parameters})

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        names = set(cls.attributes)
        if isinstance(init := cls.members.get("__init__"), griffe.Function):
            names |= {x.name for x in init.parameters}
        _list(cls, names)


def _list(thing: griffe.Object, names: set[str]) -> None:
    if thing.docstring is not None:
        thing.docstring.value = listed(thing.docstring.value, names)


def listed(text: str, names: set[str]) -> str:
    """A docstring whose sentences that begin with `name:` or `name, name:` are items of a list."""
    if not names:
        return text
    one = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    begin = re.compile(rf"(?:(?<=[.;)\"])\s+|^)((?:{one})(?:, (?:{one}))*): ")
    return "\n\n".join(_items(paragraph, begin) for paragraph in text.split("\n\n"))


def _items(paragraph: str, begin: re.Pattern[str]) -> str:
    """A paragraph's text before its first item, then its items."""
    before, *rest = begin.split(" ".join(paragraph.split()))
    if not rest:
        return paragraph
    *whats, last = rest[1::2]
    last, *after = re.split(r"(?<=\.) (?=Raises |Returns )", last, maxsplit=1)
    items = [f"- **{x}**: {what}" for x, what in zip(rest[::2], [*whats, last], strict=True)]
    return "\n\n".join([*([before] if before else []), "\n".join(items), *after])
