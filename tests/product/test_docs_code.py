"""The blocks of code in README and docs/: commands are parsed by the real parsers, Python compiles
and imports what exists, and every page runs.

A page runs from top to bottom in a folder of its own, which holds what `NEEDS` names. Pages name
real models, which are not here or slow: `NAMED` puts a tiny random model in their place, with the
tokenizer of reference:gqa and a chat template.
What cannot run has a comment before its block, and is parsed only:

    <!-- not run: why the block cannot run -->
    <!-- not run "vllm serve": why lines with these words cannot run -->

Lab notes and papers are parsed only: their commands take hours, mostly on a GPU.
"""

import argparse
import ast
import contextlib
import importlib
import itertools
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
import torch
import transformers

from answered_questions import answered, write
from kvfold.bench.server_process import free_ports
from kvfold.cli.main import app
from kvfold.cli.settings import expanded

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELL = {"", "sh", "console"}
LANGUAGES = {*SHELL, "python", "json", "yaml", "text"}

MARK = re.compile(r'<!-- not run(?: "([^"]+)")?: ([^>]+) -->')
MARKS = re.compile(rf"((?:^ *{MARK.pattern}\n)+)\Z", re.MULTILINE)

ONLY_PARSED = ("docs/lab/", "docs/papers/")
FAST = {
    "README.md",
    "docs/start.md",
    "docs/eviction.md",
    "docs/eviction-policies.md",
    "docs/http.md",
    "docs/llm.md",
}
NEEDS = {  # what pages take as given beside a model, made by `prepare`
    "README.md": ["maps"],
    "docs/start.md": ["maps"],
    "docs/comparing.md": ["questions.jsonl"],
    "docs/folding.md": ["answered.jsonl"],
    "docs/http.md": ["planned"],
    "docs/llm.md": ["planned"],
    "docs/models.md": ["folded"],
    "docs/paged-cache.md": ["folded", "questions.jsonl"],
    "docs/planned-bits.md": ["folded", "questions.jsonl"],
    "docs/prefixes.md": ["planned"],
    "docs/tasks.md": ["folded"],
}
# Pages that compare methods, and `inspect`, which has no --goal. Other pages say --goal.
RECIPES = {f"docs/{x}.md" for x in ("errors", "models", "performance", "quality", "recipes")}
NAMED = {
    "reference:gqa": "model",
    'kvfold.reference("gqa")': 'kvfold.load("model")',
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": "model",
    "Qwen/Qwen3-30B-A3B": "model",
    "meta-llama/Llama-3.1-8B-Instruct": "model",
    "reference:smollm2": "model",
}
QUESTIONS = """{"prompt": "One, two, three,", "answer": "four"}
{"context": "The sun rises in the", "choices": [" east.", " kettle."], "label": 0}
"""
TORCHRUN = "-m torch.distributed.run"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


class Block(NamedTuple):
    """A block of code: its page below the repository, its language, text and line there, and the
    words of lines that do not run (None: no line of it) with the reasons."""

    page: str
    language: str
    text: str
    line: int
    marks: list[tuple[str | None, str]]

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
            [(y[1], y[2]) for y in MARK.finditer(_marks(text[: x.start()]))],
        )
        for x in FENCE.finditer(text)
    ]


def _marks(before: str) -> str:
    """The comments that end the text before a block."""
    found = MARKS.search(before)
    return found[1] if found else ""


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


@pytest.mark.parametrize("page", PAGES, ids=lambda x: str(x.relative_to(ROOT)))
def test_pages_for_users_name_goals(page: Path) -> None:
    """And no recipe that a goal stands for."""
    name = page.relative_to(ROOT).as_posix()
    if name not in RECIPES and not name.startswith(ONLY_PARSED):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"--recipe (?:swift|lean|small)\b.*", text)


@pytest.mark.parametrize("block", [x for x in BLOCKS if x.language == "python"], ids=str)
def test_python_imports_what_exists(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvfold"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


@pytest.mark.parametrize("page", PAGES, ids=lambda x: str(x.relative_to(ROOT)))
def test_marks_stand_before_what_they_name(page: Path) -> None:
    marked = [(block, mark) for block in blocks(page) for mark in block.marks]
    assert len(marked) == len(MARK.findall(page.read_text(encoding="utf-8")))
    for block, (words, _) in marked:
        assert words is None or words in block.text, block


# -- pages run ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """A folder for what pages take as given."""
    return tmp_path_factory.mktemp("docs")


def prepare(name: str, folder: Path) -> Path:
    """The path of what a page takes as given, made on first use."""
    import kvfold
    from kvfold.hub.loading import load_tokenizer

    path, model = folder / name, str(folder / "model")
    if path.exists():
        return path
    if name != "model":
        prepare("model", folder)
    if name == "model":
        tokenizer = load_tokenizer("reference:gqa")
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(path)
        tiny_model(len(tokenizer)).save_pretrained(path)
    elif name == "maps":
        kvfold.compress(model, max_tokens=4096, check=False, output=str(path))
    elif name == "questions.jsonl":
        path.write_text(QUESTIONS)
    elif name == "answered.jsonl":
        write(answered(kvfold.load(model), load_tokenizer(model), 12), path)
    else:
        size = {"folded": {"keep": 0.5}, "planned": {"factor": 8}}[name]
        kvfold.compress(
            model, "small", fold=True, max_tokens=4096, check=False, output=str(path), **size
        )
    return path


def tiny_model(num_tokens: int) -> transformers.PreTrainedModel:
    """A random Llama of two layers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=num_tokens,
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    return transformers.LlamaForCausalLM(config)


def runs(block: Block) -> bool:
    """Whether a block runs, at least in part."""
    whole = all(words for words, _ in block.marks)
    return whole and (block.language == "python" or block.language in SHELL)


def script(text: str, marks: list[tuple[str | None, str]]) -> str:
    """What runs of a shell block: without marked lines, with less calibration
    and shorter answers."""
    lines = text.replace("\\\n", " ").splitlines()
    lines = [x for x in lines if not any(words and words in x for words, _ in marks)]
    text = re.sub(r"--max-new-tokens \d{3}", "--max-new-tokens 20", "\n".join(lines))
    short = r"kvfold compress (?!.*--(?:calib|max)-tokens)"
    return re.sub(short, "kvfold compress --calib-tokens 4096 ", text)


def run_page(page: str, folder: Path) -> None:
    """Run a page's blocks in order in `folder`: Python in one namespace, shell blocks that follow
    each other in one shell, which ends what it left running. Ports are free ones."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, call in [("kvfold", "-m kvfold"), ("python", ""), ("torchrun", TORCHRUN)]:
        path = folder / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {call} "$@"\n')
        path.chmod(0o755)
    namespace: dict[str, Any] = {"__name__": "docs"}
    ports = ("8123", "8124", "8125", "8126")
    stand_ins = NAMED | dict(zip(ports, map(str, free_ports(len(ports))), strict=True))
    running = [block for block in blocks(ROOT / page) if runs(block)]
    for is_python, members in itertools.groupby(running, lambda x: x.language == "python"):
        group = [*members]
        texts = [x.text if is_python else script(x.text, x.marks) for x in group]
        for name, there in stand_ins.items():
            texts = [text.replace(name, there) for text in texts]
        if is_python:
            for block, text in zip(group, texts, strict=True):
                exec(compile(text, str(block), "exec"), namespace)
        else:
            run_shell("\n".join(texts), folder, str(group[0]))


def run_shell(text: str, folder: Path, name: str) -> None:
    """Run a script in bash with the folder's programs."""
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    end = "trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT\n"
    with (folder / "printed").open("w+") as printed:  # a pipe would wait for who is left
        done = subprocess.run(
            ["bash", "-euc", end + text],
            cwd=folder,
            env=environment,
            stdout=printed,
            stderr=printed,
        )
        printed.seek(0)
        assert done.returncode == 0, f"{name}: {printed.read()}"


def _pages() -> list[Any]:
    pages = dict.fromkeys(x.page for x in BLOCKS if runs(x) and not x.page.startswith(ONLY_PARSED))
    return [pytest.param(x, marks=[] if x in FAST else [pytest.mark.slow]) for x in pages]


@pytest.mark.parametrize("page", _pages())
def test_a_page_runs(page: str, prepared: Path, tmp_path, monkeypatch) -> None:
    for name in ("model", *NEEDS.get(page, [])):
        (tmp_path / name).symlink_to(prepare(name, prepared))
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(None):
        run_page(page, tmp_path)
