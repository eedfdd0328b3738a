"""Which settings have a flag, and `--set NAME=VALUE` for all others.

A command shows the flags that most users need. A setting that few users change has no flag in
`--help`: it is written `--set NAME=VALUE`. Its old flag still works and says the new spelling.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar

from cyclopts import App, Parameter
from cyclopts.argument import Argument, ArgumentCollection

DEVICE = "device dtype"
CACHE = "bits evict keep-tokens"
# Flags of a command, by the file of its function. `--set` comes on top, and counts.
FLAGS: dict[str, str] = {
    "compress": f"output goal recipe factor budget fold calib calib-tokens stats {DEVICE}",
    "recover": f"output original maps text steps {DEVICE}",
    "generate": f"prompt prompt-file chat maps max-new-tokens temperature {CACHE} {DEVICE}",
    "serve": "engine maps host port api-key served-model-name max-sequences max-tokens " + CACHE,
    "route": "host port pick",
    "capacity": f"gpu context {CACHE} json",
    "inspect": f"maps recipe keep calib calib-tokens stats html {DEVICE}",
    "evaluate": f"text tasks suite suite-data needle ctx max-tokens maps engine {CACHE} json "
    f"{DEVICE}",
    "compare": f"recipes methods keep baseline {CACHE} text tasks needle ctx max-tokens json html "
    f"{DEVICE}",
    "frontier": f"recipes factors text needle ctx max-tokens json html {DEVICE}",
    "pack": f"context output bits evict {DEVICE}",
    "bench_attention": "shape batch tokens variants json",
    "bench_decode": "shape batch tokens variants steps json",
    "bench_serve": "endpoint rate concurrency requests input-tokens output-tokens json api-key",
}
NOTE = "--set NAME=VALUE   Any other setting of this command; --set help lists them."


class Command(App):
    """A command whose help shows its flags, and none of its other settings."""

    shows_flags: ClassVar[bool] = True

    def assemble_argument_collection(self, **options: Any) -> ArgumentCollection:
        arguments = super().assemble_argument_collection(**options)
        for argument in arguments:
            if argument.show and _has_flag(self, argument) != self.shows_flags:
                argument.parameter = Parameter.combine(argument.parameter, Parameter(show=False))
        return arguments


class Listing(Command):
    """A command whose help shows its other settings, and none of its flags."""

    shows_flags = False


def _has_flag(command: App, argument: Argument) -> bool:
    """Whether the help of a command shows an argument, as its flag or its place."""
    function: Any = command.default_command
    flags = FLAGS.get(function.__module__.rpartition(".")[2])
    names = _names(argument)
    return flags is None or not names or not set(names).isdisjoint(flags.split())


def _names(argument: Argument) -> list[str]:
    """The names of an argument's flags without dashes, such as "page"."""
    return [x[2:] for x in argument.names if x.startswith("--")]


@dataclass(frozen=True)
class Settings:
    """What a command takes. line: how it is called, such as "bench serve"; arguments: by every name
    without dashes; hidden: those without a flag in the help."""

    command: App
    line: str
    arguments: dict[str, Argument]
    hidden: dict[str, Argument]

    @classmethod
    def of(cls, command: App, line: str, **options: Any) -> "Settings":
        """options: of `App.assemble_argument_collection`."""
        arguments = [
            (name, argument)
            for argument in App.assemble_argument_collection(command, **options)
            if not argument.children
            for name in _names(argument)
        ]
        hidden = {name: x for name, x in arguments if not _has_flag(command, x)}
        return cls(command, line, dict(arguments), hidden)

    def flag(self, text: str) -> list[str]:
        """The flag of NAME=VALUE, or of NAME for what is on or off; none for what is off. Raises
        ValueError for what is no setting."""
        name, equals, value = text.partition("=")
        name = name.strip().replace("_", "-")
        if name not in self.arguments:
            near = get_close_matches(name, self.arguments, 1)
            advice = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"--set takes NAME=VALUE, of the settings that `kvfold {self.line} --set help`"
                f" lists; got {text!r}{advice}"
            )
        if self.arguments[name].hint is not bool:
            if not equals:
                raise ValueError(f"--set {name} needs a value, as in --set {name}=VALUE")
            return [f"--{name}={value}"]
        if value.lower() in ("", "true", "yes", "1"):
            return [f"--{name}"]
        if value.lower() not in ("false", "no", "0"):
            raise ValueError(f"--set {name} is true or false; got {value!r}")
        return []

    def spelled(self, name: str, value: str | None) -> str:
        """How a hidden setting is written: page, 16 -> --set page=16; paged -> --set paged."""
        switch = value is None or self.hidden[name].hint is bool
        return f"--set {name}" if switch else f"--set {name}={value}"


def settings_for(app: App, words: Sequence[str]) -> tuple[Settings | None, list[str]]:
    """The settings of the command that a command line begins with, None where it has none, and the
    words behind the command."""
    path: list[str] = []
    for word in words:
        if word.startswith("-") or word not in list(app):
            break
        app, path = app[word], [*path, word]
    rest = list(words[len(path) :])
    if not path or app.default_command is None:
        return None, rest
    return Settings.of(app, " ".join(path)), rest


def expanded(app: App, words: Sequence[str]) -> tuple[App, list[str]]:
    """A command line in which every `--set NAME=VALUE` is the flag that it stands for, and the app
    that reads it, which for `--set help` lists settings. Says on stderr how an old flag is written
    now. Raises ValueError for what is no setting."""
    settings, rest = settings_for(app, words)
    if settings is None:
        return app, list(words)
    out, said, left = settings.line.split(), set(), iter(rest)
    for word in left:
        if word == "--":
            return app, [*out, word, *left]
        flag, equals, value = word.partition("=")
        if flag == "--set":
            text = value if equals else next(left, "")
            if text == "help":
                function = settings.command.default_command
                listing = Listing(name=f"kvfold {settings.line}", help_format="plaintext")
                listing.default(function)
                return listing, ["--help"]
            out += settings.flag(text)
            continue
        name = flag.removeprefix("--")
        if name != flag and name in settings.hidden and name not in said:
            said.add(name)
            now = settings.spelled(name, "VALUE")
            print(f"kvfold: {flag} is now written {now}", file=sys.stderr)
        out.append(word)
    return app, out


def with_settings(message: str, app: App, words: Sequence[str]) -> str:
    """A message in which hidden flags are written as the settings that they are."""
    settings, _ = settings_for(app, words)
    if settings is None:
        return message

    def replace(flag: re.Match[str]) -> str:
        if flag[1] not in settings.hidden:
            return flag[0]
        is_switch = settings.hidden[flag[1]].hint is bool
        return settings.spelled(flag[1], flag[3]) + (flag[2] or "" if is_switch else "")

    return re.sub(r"--([a-z][a-z0-9-]*)( (-?\.?\d[\w.]*)(?=\W|$))?", replace, message)
