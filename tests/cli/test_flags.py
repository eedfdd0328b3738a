"""Every flag of every command with values that mean nothing: one line and code 2, or the work
begins. No model is loaded before its flags are checked.

The flags are those that the command line has, so that a new one is tried as it is added.
`make test-all` tries all of them, `make test` some.
"""

import io
import os
import random
import signal
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from cyclopts import App

import kvfold.server.run
from commands import refused, without_progress
from kvfold import api, recovery
from kvfold.cli import bench_agents, bench_serve
from kvfold.cli.main import app, main
from kvfold.cli.settings import FLAGS, expanded
from kvfold.engine.api import llm
from kvfold.hub import loading

NUMBERS = ["nan", "inf", "-inf", "-1", "0", "1e400", "1" + "0" * 400, "9" * 5000, str(2**63)]
NUMBERS += ["", " ", "a", "½", "1e-400", "true", "-", "2.5"]
WORDS = ["", " ", "-", "folder", "nowhere/x", "a" * 5000, "\udc80", "é", "/dev/zero", "pipe", ".."]
WORDS += ["/", ",", "1,,2", "nan", "inf", "1e400", "-1", "0", "9" * 5000, "1" + "0" * 400]
PLACES = {"MODEL": "reference:gqa", "URLS": "http://127.0.0.1:9", "URL": "http://127.0.0.1:9"}
PLACES |= {"FOLDER": "folder", "NAME": "some/maps"}
NEEDED = {
    "pack": {"--context": "text.txt", "--output": "new"},
    "compress": {"--output": "new"},
    "recover": {"--output": "new"},
    "generate": {"--prompt": "hi"},
    "serve": {"--port": "0"},
    "route": {"--port": "0"},
    "bench serve": {"--rate": "1"},
}
SECONDS = 60


class Began(BaseException):
    """The flags are all right: what they ask for begins."""


class Hangs(BaseException):
    """Flags are checked in no time."""


def commands(above: App, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    for name in (x for x in above if not x.startswith("-")):
        below = above[name]
        if any(not x.startswith("-") for x in below):
            yield from commands(below, (*path, name))
        else:
            yield (*path, name), below


def cases(path: tuple[str, ...], command: App, step: int = 1) -> Iterator[list[str]]:
    """Command lines with one value that means nothing. step: of each flag, every so many values,
    and others than of the next flag."""
    arguments = [x for x in command.assemble_argument_collection() if "*" not in x.names]
    places = {x.names[0]: PLACES[x.names[0]] for x in arguments if x.names[0] in PLACES}
    needed = NEEDED.get(" ".join(path), {})
    for number, argument in enumerate(arguments):
        name, kind = argument.names[0], str(argument.hint)
        if argument.hint is bool:
            values = ["1"]
        else:
            numeric = ("int" in kind or "float" in kind) and "Literal" not in kind
            values = NUMBERS if numeric else WORDS
        for value in values[number % min(step, len(values)) :: step]:
            rest = {x: y for x, y in needed.items() if x != name}
            changed = places | ({} if name.startswith("-") else {name: value})
            words = [*path, *changed.values(), *(x for pair in rest.items() for x in pair)]
            yield [*words, name, value] if name.startswith("-") else words


def of_all(step: int = 1) -> dict[str, list[list[str]]]:
    return {" ".join(path): list(cases(path, command, step)) for path, command in commands(app)}


ALL, FOURTH = of_all(), of_all(4)
SOME = random.Random(3).sample([words for own in ALL.values() for words in own], 100)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder, in which nothing is loaded, measured or served."""

    def begin(*_: object, **__: object) -> None:
        raise Began

    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").write_text("The ship went out to sea. " * 3000)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for module in (loading, api, llm, recovery):  # all that have it by name, before any is patched
        monkeypatch.setattr(module, "load", begin)
    monkeypatch.setattr(kvfold.server.run, "run", begin)
    monkeypatch.setattr(bench_serve.LoadTest, "measure", begin)
    monkeypatch.setattr(bench_agents, "measure", begin)
    return tmp_path


def wrong(words: list[str], monkeypatch) -> str | None:
    """What is wrong with what a command line is told; None where nothing is."""

    def stop(*_: object) -> None:
        raise Hangs

    def begin() -> None:
        raise Began

    said = io.StringIO()  # which takes any character, as stderr does
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with monkeypatch.context() as patch, redirect_stderr(said):
            if words[0] == "bench":  # which asks for it when its flags are checked
                patch.setattr(loading, "default_device", begin)
            code = main(words)
    except Began:
        return None
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    text = "\n".join(without_progress(said.getvalue())) + "\n"  # beside hints at old flags
    whole = text.startswith("kvfold: error: ") and text.count("\n") == 1 and len(text) < 3000
    return None if code == 0 or (code == 2 and whole) else f"{code}: {text[:300]}"


PARTS = [pytest.param(x, id=f"{y}, 1/4", marks=pytest.mark.slow) for y, x in FOURTH.items()]
WHOLE = [pytest.param(x, id=name, marks=pytest.mark.soak) for name, x in ALL.items()]


@pytest.mark.parametrize("tried", [pytest.param(SOME, id="some"), *PARTS, *WHOLE])
def test_nonsense_in_any_flag_is_told_in_one_line(tried, place, monkeypatch) -> None:
    found = {}
    for words in tried:
        if said := wrong(words, monkeypatch):
            found[ascii(words)[:200]] = said
    assert not found, "\n".join(f"{x}\n    {y}" for x, y in found.items())
    half = [x.name for x in place.rglob(".*")]
    assert not half, half


def shown(command: App) -> set[str]:
    """The flags that a command's help shows; one argument's first name counts."""
    arguments = command.assemble_argument_collection()
    names = [[n for n in x.names if n.startswith("--")] for x in arguments if x.show]
    return {x[0] for x in names if x} | {"--set"}


def test_there_are_few_flags() -> None:
    flags = {" ".join(path): shown(command) for path, command in commands(app)}
    for name in ("compress", "generate", "serve", "eval", "compare"):
        assert len(flags[name]) <= 12, (name, flags[name])
    assert len(set().union(*flags.values())) <= 60


def test_every_flag_of_the_table_exists() -> None:
    for path, command in commands(app):
        if listed := FLAGS.get(command.default_command.__module__.rpartition(".")[2]):
            assert {f"--{x}" for x in listed.split()} <= {
                name for x in App.assemble_argument_collection(command) for name in x.names
            }, path


def test_a_setting_is_the_flag_that_it_replaces(capsys) -> None:
    words = ["generate", "m", "--set", "page=16", "--set", "max_cache_tokens=9", "--set=repair"]
    expected = ["generate", "m", "--page=16", "--max-cache-tokens=9", "--repair"]
    assert expanded(app, words)[1] == expected
    assert expanded(app, ["bench", "decode", "--set", "prefill=no"])[1] == ["bench", "decode"]
    assert expanded(app, ["generate", "m", "--", "--set"])[1] == ["generate", "m", "--", "--set"]
    assert capsys.readouterr().err == ""
    old = ["generate", "m", "--page", "16", "--bits", "4", "--page=8", "--repair"]
    assert expanded(app, old)[1] == old
    assert capsys.readouterr().err == (
        "kvfold: --page is now written --set page=VALUE\n"
        "kvfold: --repair is now written --set repair\n"
    )


def test_help_of_settings_lists_those_without_a_flag(capsys) -> None:
    assert main(["generate", "--set", "help"]) == 0
    listed = capsys.readouterr().out
    assert "--page" in listed and "--residual" in listed and "--prompt" not in listed
    assert main(["generate", "--help"]) == 0
    listed = capsys.readouterr().out
    assert "--page" not in listed and "--prompt" in listed and "--set NAME=VALUE" in listed


@pytest.mark.parametrize(
    ("setting", "answer"),
    [
        ("pages=4", "has no setting 'pages'; did you mean page?"),
        ("page", "--set page needs a value, as in --set page=VALUE"),
        ("repair=perhaps", "--set repair is true or false; got 'perhaps'"),
        ("page=x", "Invalid value for --set page: must be a whole number, got x"),
        ("", "--set takes NAME=VALUE"),
    ],
)
def test_what_is_no_setting_is_refused(setting, answer, capsys) -> None:
    assert answer in refused(capsys, "generate", "m", "--prompt", "hi", "--set", setting)
