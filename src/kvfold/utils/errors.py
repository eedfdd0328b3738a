"""User errors that name settings, which Python shows as parameters and the command line as flags.

Imports nothing from kvfold, so that every layer can use it.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_NAMED = re.compile(r"`([a-z_]+)(?:=([^`]*))?`")


class SettingError(ValueError):
    """A setting that cannot work. `text` has names of settings in backquotes, alone or with a value
    (`name=value`); str(error) shows it without backquotes."""

    def __init__(self, text: str) -> None:
        super().__init__(_NAMED.sub(lambda match: match[0][1:-1], text))
        self.text = text

    def with_names(self, spell: Callable[[str, str | None], str]) -> str:
        """The text with each setting replaced by spell(name, value or None)."""
        return _NAMED.sub(lambda match: spell(match[1], match[2]), self.text)


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Context manager: rename settings in SettingErrors, for callers that know them by another
    name: old="new"."""
    try:
        yield
    except SettingError as error:

        def rename(name: str, value: str | None) -> str:
            return f"`{names.get(name, name)}{'' if value is None else f'={value}'}`"

        raise SettingError(error.with_names(rename)) from None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, with the second if the first ends in a colon; its type
    if there is no message."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines or isinstance(error, KeyError):  # which is only the key
        lines = [" ".join([type(error).__name__, *lines])]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
