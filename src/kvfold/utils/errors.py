"""A user's mistake, in the words of whoever made it: parameters in Python, flags on a command line.

Imports nothing, so that every layer can say what is wrong with a setting.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_NAMED = re.compile(r"`([a-z_]+)(?:=([^`]*))?`")


class SettingError(ValueError):
    """A setting that cannot work. `text` has names of settings in backquotes, alone or with a value
    as in Python; as a string the error is without them."""

    def __init__(self, text: str) -> None:
        super().__init__(_NAMED.sub(lambda found: found[0][1:-1], text))
        self.text = text

    def with_names(self, spell: Callable[[str, str | None], str]) -> str:
        """The text with every setting as `spell` writes its name and value."""
        return _NAMED.sub(lambda found: spell(found[1], found[2]), self.text)


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Errors from within, of settings that the caller knows by another name: old="new"."""
    try:
        yield
    except SettingError as error:

        def rename(name: str, value: str | None) -> str:
            return f"`{names.get(name, name)}{'' if value is None else f'={value}'}`"

        raise SettingError(error.with_names(rename)) from None
