"""Which settings of a command are flags, and `--set NAME=VALUE` for all others.

The help of a command shows the flags that most users need. All other settings are written `--set
NAME=VALUE`. Their flags from earlier versions still work, and print the new spelling.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import cleandoc
from typing import Any, ClassVar

from cyclopts import App, Parameter
from cyclopts.argument import Argument, ArgumentCollection

from kvfold.utils.errors import SettingError

DEVICE = "device dtype"
CACHE = "bits evict keep-tokens"
# Flags of a command, by the file of its function. `--set` is one more.
FLAGS: dict[str, str] = {
    "compress": f"output goal recipe factor budget fold calib calib-tokens stats {DEVICE}",
    "recover": f"output original maps text steps {DEVICE}",
    "generate": f"prompt prompt-file chat maps max-new-tokens temperature {CACHE} {DEVICE}",
    "serve": "engine maps host port api-key served-model-name max-sequences max-tokens " + CACHE,
    "route": "host port pick",
    "advise": f"gpu context max-sequences budget maps {CACHE} json",
    "inspect": f"maps recipe keep calib calib-tokens stats html {DEVICE}",
    "evaluate": f"text tasks suite needle max-tokens maps {CACHE} json device",
    "compare": "recipes keep methods baseline text tasks needle max-tokens json html device",
    "frontier": f"recipes factors text needle ctx max-tokens json html {DEVICE}",
    "pack": f"context output bits evict {DEVICE}",
    "bench_attention": "shape batch tokens variants json",
    "bench_decode": "shape batch tokens variants steps json",
    "bench_serve": "engine maps bits endpoint rate concurrency requests input-tokens output-tokens"
    " json api-key",
    "bench_agents": "engine maps bits agents longest json api-key",
}
NOTE = "--set NAME=VALUE   Any other setting of this command; --set help lists them."
LISTED = "Write these settings as --set NAME=VALUE, without the dashes, such as --set seed=1."


class VerbatimError(SettingError):
    """An error that quotes flags as the user wrote them, in the text of a method."""


class Command(App):
    """A command whose help shows its flags, and none of its other settings."""

    shows_flags: ClassVar[bool] = True

    @property  # type: ignore[misc]  # never set
    def help(self) -> str:
        """The description, in paragraphs without the line breaks of the docstring."""
        description, _, _ = cleandoc(super().help).partition("\n\nParameters\n")
        return "\n\n".join(" ".join(x.split()) for x in description.split("\n\n"))

    def assemble_argument_collection(self, **options: Any) -> ArgumentCollection:
        arguments = super().assemble_argument_collection(**options)
        for argument in arguments:
            changes: dict[str, Any] = {}
            if argument.show and _has_flag(self, argument) != self.shows_flags:
                changes["show"] = False
            if argument.parameter.help:  # without the line breaks of the docstring
                changes["help"] = " ".join(argument.parameter.help.split())
            argument.parameter = Parameter.combine(argument.parameter, Parameter(**changes))
        return arguments


class Listing(Command):
    """A command whose help shows its other settings, and none of its flags."""

    shows_flags = False


def _has_flag(command: App, argument: Argument) -> bool:
    """Whether the help of a command shows an argument: it has a flag, or is positional."""
    function: Any = command.default_command
    flags = FLAGS.get(function.__module__.rpartition(".")[2])
    names = _names(argument)
    return flags is None or not names or not set(names).isdisjoint(flags.split())


def _names(argument: Argument) -> list[str]:
    """The names of an argument's flags without dashes, such as "page"."""
    return [x[2:] for x in argument.names if x.startswith("--")]


@dataclass(frozen=True)
class Settings:
    """The settings of a command. line: its words, such as "bench serve". arguments: by every name,
    without dashes. hidden: those without a flag in the help."""

    command: App
    line: str
    arguments: dict[str, Argument]
    hidden: dict[str, Argument]

    @classmethod
    def of(cls, command: App, line: str, **options: Any) -> "Settings":
        """The settings of a command. options: of `App.assemble_argument_collection`."""
        arguments = [
            (name, argument)
            for argument in App.assemble_argument_collection(command, **options)
            if not argument.children
            for name in _names(argument)
        ]
        hidden = {name: x for name, x in arguments if not _has_flag(command, x)}
        return cls(command, line, dict(arguments), hidden)

    def flag(self, text: str, program: App) -> list[str]:
        """The flag of NAME=VALUE. NAME alone turns a switch on; a switch that is off has no flag.
        Raises ValueError for an unknown setting, and names commands of `program` that have it."""
        name, equals, value = text.partition("=")
        name = name.strip().replace("_", "-")
        if name not in self.arguments:
            if others := commands_with(program, name):
                raise ValueError(
                    f"`kvfold {self.line}` has no setting {name!r}: it belongs to kvfold"
                    f" {', '.join(others)}; leave it out here, and set it there; got {text!r}"
                )
            near = get_close_matches(name, self.arguments, 1)
            advice = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"--set takes NAME=VALUE, and `kvfold {self.line}` has no setting {name!r}"
                f"{advice}: `kvfold {self.line} --set help` lists all; got {text!r}"
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
        """A hidden setting as it is written: page, 16 -> --set page=16; paged -> --set paged."""
        switch = value is None or self.hidden[name].hint is bool
        return f"--set {name}" if switch else f"--set {name}={value}"


def settings_for(app: App, words: Sequence[str]) -> tuple[Settings | None, list[str]]:
    """The settings of the command that a command line begins with, None if it has none, and the
    words after the command."""
    path: list[str] = []
    for word in words:
        if word.startswith("-") or word not in list(app):
            break
        app, path = app[word], [*path, word]
    rest = list(words[len(path) :])
    if not path or app.default_command is None:
        return None, rest
    return Settings.of(app, " ".join(path)), rest


def commands_with(app: App, name: str) -> list[str]:
    """The commands of a program that have a setting of this name."""
    commands = [x for x in app if not x.startswith("-") and app[x].default_command is not None]
    return [x for x in commands if name in Settings.of(app[x], x).arguments]


def expanded(app: App, words: Sequence[str]) -> tuple[App, list[str]]:
    """Replace every `--set NAME=VALUE` of a command line by its flag.

    Returns the app that reads the command line, and its words. For `--set help` that app lists
    settings. Prints to stderr how an old flag is written now. Raises ValueError for an unknown
    setting.
    """
    settings, rest = settings_for(app, words)
    if settings is None:
        return app, list(words)
    out, hinted, remaining = settings.line.split(), set(), iter(rest)
    for word in remaining:
        if word == "--":
            return app, [*out, word, *remaining]
        flag, equals, value = word.partition("=")
        if flag == "--set":
            text = value if equals else next(remaining, "")
            if text == "help":
                function = settings.command.default_command
                listing = Listing(
                    name=f"kvfold {settings.line}", help_format="plaintext", help_epilogue=LISTED
                )
                listing.default(function)
                return listing, ["--help"]
            out += settings.flag(text, app)
            continue
        name = flag.removeprefix("--")
        if name != flag and name in settings.hidden and name not in hinted:
            hinted.add(name)
            spelling = settings.spelled(name, "VALUE")
            print(f"kvfold: {flag} is now written {spelling}", file=sys.stderr)
        out.append(word)
    return app, out


def with_settings(message: str, app: App, words: Sequence[str]) -> str:
    """A message of a command line with hidden flags replaced by `--set NAME=VALUE`."""
    settings, _ = settings_for(app, words)
    if settings is None:
        return message

    def replace(flag: re.Match[str]) -> str:
        if flag[1] not in settings.hidden:
            return flag[0]
        is_switch = settings.hidden[flag[1]].hint is bool
        return settings.spelled(flag[1], flag[3]) + (flag[2] or "" if is_switch else "")

    return re.sub(r"--([a-z][a-z0-9-]*)( (-?\.?\d[\w.]*)(?=\W|$))?", replace, message)
