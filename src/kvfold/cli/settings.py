"""Which settings have a flag, and `--set NAME=VALUE` for all others.

A command shows the flags that most users need. A setting that few users change has no flag in
`--help`: it is written `--set NAME=VALUE`. Its old flag still works and says the new spelling.
"""

import re
import sys
from collections.abc import Iterator, Sequence
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
    """A command whose help shows its flags, or with `listing` its other settings."""

    listing: ClassVar[bool] = False

    def assemble_argument_collection(self, **options: Any) -> ArgumentCollection:
        arguments = super().assemble_argument_collection(**options)
        for argument in arguments:
            if argument.show and _hidden(self, argument) != self.listing:
                argument.parameter = Parameter.combine(argument.parameter, Parameter(show=False))
        return arguments


def _hidden(command: App, argument: Argument) -> bool:
    """Whether an argument of a command has no flag in its help."""
    function: Any = command.default_command
    flags = FLAGS.get(function.__module__.rpartition(".")[2])
    names = [x[2:] for x in argument.names if x.startswith("--")]
    return flags is not None and bool(names) and set(names).isdisjoint(flags.split())


def hidden_settings(command: App, **options: Any) -> dict[str, Argument]:
    """The arguments without a shown flag, by every name without dashes, such as "page". options:
    of `App.assemble_argument_collection`."""
    arguments = App.assemble_argument_collection(command, **options)
    hidden = [x for x in arguments if not x.children and _hidden(command, x)]
    return {name[2:]: x for x in hidden for name in x.names if name.startswith("--")}


def command_of(app: App, words: Sequence[str]) -> tuple[App, list[str]]:
    """The command that a command line begins with, and its path, such as ["bench", "serve"]."""
    path: list[str] = []
    for word in words:
        if word.startswith("-") or word not in list(app):
            break
        app, path = app[word], [*path, word]
    return app, path


def expanded(app: App, words: Sequence[str]) -> list[str]:
    """A command line in which every `--set NAME=VALUE` is the flag that it stands for. Says on
    stderr how an old flag is written now. Raises ValueError for what is no setting."""
    Command.listing = False
    command, path = command_of(app, words)
    if command.default_command is None or not path:
        return list(words)
    hidden, rest = hidden_settings(command), iter(words[len(path) :])
    out, said = list(path), set()
    for word in rest:
        if word == "--":
            return [*out, word, *rest]
        name, _, _ = word.partition("=")
        if name == "--set":
            text = word[len("--set=") :] if "=" in word else next(rest, "")
            if text == "help":
                Command.listing = True
                return [*path, "--help"]
            out += _flag(path, text, command)
            continue
        if name[2:] in hidden and name.startswith("--") and name not in said:
            said.add(name)
            print(
                f"kvfold: {name} is now written {spelled(name[2:], hidden, 'VALUE')}",
                file=sys.stderr,
            )
        out.append(word)
    return out


def _flag(path: list[str], text: str, command: App) -> Iterator[str]:
    """The flag of NAME=VALUE, or of NAME for what is on or off."""
    name, equals, value = text.partition("=")
    name, line = name.strip().replace("_", "-"), " ".join(path)
    arguments = App.assemble_argument_collection(command)
    known = {x[2:]: a for a in arguments if not a.children for x in a.names if x[:2] == "--"}
    if name not in known:
        near = get_close_matches(name, known, 1)
        advice = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"--set takes NAME=VALUE, of the settings that `kvfold {line} --set help` lists; got"
            f" {text!r}{advice}"
        )
    if known[name].hint is not bool:
        if not equals:
            raise ValueError(f"--set {name} needs a value, as in --set {name}=VALUE")
        yield f"--{name}={value}"
    elif value.lower() in ("", "true", "yes", "1"):
        yield f"--{name}"
    elif value.lower() not in ("false", "no", "0"):
        raise ValueError(f"--set {name} is true or false; got {value!r}")


def spelled(name: str, hidden: dict[str, Argument], value: str | None) -> str:
    """How a hidden setting is written: page, 16 -> --set page=16; paged -> --set paged."""
    return (
        f"--set {name}" if value is None or hidden[name].hint is bool else f"--set {name}={value}"
    )


def with_settings(message: str, app: App, words: Sequence[str]) -> str:
    """A message in which hidden flags are written as the settings that they are."""
    command, path = command_of(app, words)
    if command.default_command is None or not path:
        return message
    hidden = hidden_settings(command)

    def replace(flag: re.Match[str]) -> str:
        if flag[1] not in hidden:
            return flag[0]
        is_switch = hidden[flag[1]].hint is bool
        return spelled(flag[1], hidden, flag[3]) + (flag[2] or "" if is_switch else "")

    return re.sub(r"--([a-z][a-z0-9-]*)( (-?\.?\d[\w.]*)(?=\W|$))?", replace, message)
