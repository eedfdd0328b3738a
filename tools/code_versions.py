"""Which results are older than the code that they measure.

`[code]` of benchmarks/claims.toml names the code that decides a kind of figure: the few files, or
functions of a file (`FILE.py:NAME`), after whose change a figure may be another one. Each results
file says there which code decides its figures: `code` of all rows, `some` of the rows named.

Code has a version: one more than its changes in benchmarks/code_versions.json that may
have moved figures. That file also has the versions that each results file was measured with. A
figure is stale if its code's version is higher, and pages then mark it with †.

A digest alone would mark every figure after every refactoring, and a number that people raise by
hand would be forgotten. So a test goes red when watched code is not as its digest says, and a
person decides, giving the reason:

    python tools/results_tables.py changed "attention on GPUs" "four heads a block"  # may move
    python tools/results_tables.py same "attention on GPUs" "other names"            # cannot
    python tools/results_tables.py measured vllm-8b                      # after a measurement
    python tools/results_tables.py measured quality-gqa --code Palu      # of these rows alone

The digest is of the syntax tree without docstrings, comments, imports, annotations and messages of
errors, which decide no figure.

Versions begin on 2026-11-28. Changes before that day were judged from the history of the watched
code: those that were known to move figures are versions, and others may have been missed.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

FILE = "benchmarks/code_versions.json"
STALE = "†"


class Change(NamedTuple):
    """A version of code that may have moved figures."""

    code: str
    date: str
    reason: str

    def __str__(self) -> str:
        return f"{self.code}, {self.date}: {self.reason}"


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


class Versions:
    """Versions of code, and those that results files were measured with."""

    def __init__(self, root: Path, code: dict[str, list[str]]) -> None:
        self.root, self.code = root, code
        self.path = root / FILE
        state = read_json(self.path) if self.path.exists() else {}
        self.history: dict[str, list[dict[str, Any]]] = state.get("history", {})
        self.digests: dict[str, dict[str, str]] = state.get("digests", {})
        self.files: dict[str, dict[str, int]] = state.get("measured", {})

    def version(self, name: str) -> int:
        """A code's version: one more than the changes that may have moved figures."""
        return 1 + sum(not x["same"] for x in self.history.get(name, []))

    def changes(self, file: str, code: Iterable[str]) -> list[Change]:
        """What changed in this code since a results file was measured."""
        found = []
        for name in code:
            moved = [x for x in self.history.get(name, []) if not x["same"]]
            since = self.files.get(file, {}).get(name, 1)
            found += [Change(name, x["date"], x["reason"]) for x in moved[since - 1 :]]
        return found

    def undecided(self) -> dict[str, list[str]]:
        """Files of each code that are not as its version says, and nobody has judged."""
        found = {}
        for name in self.code:
            now, then = self.current(name), self.digests.get(name, {})
            paths = [x for x in sorted({*now, *then}) if now.get(x) != then.get(x)]
            found.update({name: paths} if paths else {})
        return found

    def current(self, name: str) -> dict[str, str]:
        """Digests of the files of a code, by path."""
        return {x: digest(self.root, x) for x in sorted(self.paths(name))}

    def paths(self, name: str) -> Iterator[str]:
        """A pattern stands for the files that it matches."""
        for entry in self.code[name]:
            if "*" in entry:
                yield from (x.relative_to(self.root).as_posix() for x in self.root.glob(entry))
            else:
                yield entry

    def decide(self, name: str, reason: str, *, same: bool) -> None:
        """Take the code as it is now, as the same version or as the next one."""
        entry = {"date": date.today().isoformat(), "same": same, "reason": reason}
        self.history.setdefault(name, []).append(entry)
        self.digests[name] = self.current(name)
        self.save()

    def measured(self, file: str, code: Iterable[str], alone: str | None = None) -> None:
        """A results file, or its rows that the code `alone` decides, were measured with the code as
        it is now. `code` is all that decides rows of it."""
        before = self.files.get(file, {})
        again = {name for name in code if alone in (None, name)}
        self.files[file] = {x: self.version(x) if x in again else before.get(x, 1) for x in code}
        self.save()

    def save(self) -> None:
        known: dict[str, dict[str, Any]] = {
            "history": self.history, "digests": self.digests, "measured": self.files,
        }  # fmt: skip
        state = {
            part: {
                name: x
                for name, x in sorted(entries.items())
                if part == "measured" or name in self.code
            }
            for part, entries in known.items()
        }
        self.path.write_text(json.dumps(state, indent=1, ensure_ascii=False) + "\n", "utf-8")


def digest(root: Path, entry: str) -> str:
    """Of what a file computes, or `FILE.py:NAME`; "missing" if there is no such thing."""
    path, _, name = entry.partition(":")
    if not (root / path).exists():
        return "missing"
    text = (root / path).read_text(encoding="utf-8")
    if not path.endswith(".py"):
        text = " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL).split())
        return hashed(text)
    tree: ast.AST | None = ast.parse(text)
    for part in name.split(".") if name else []:
        body = getattr(tree, "body", [])
        tree = next((x for x in body if getattr(x, "name", None) == part), None)
    return hashed(repr(essence(tree))) if tree else "missing"


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def essence(node: object) -> object:
    """What a syntax tree computes, without empty fields: releases of Python differ in those."""
    if isinstance(node, list):
        return [x for x in map(essence, node) if x is not None]
    if not isinstance(node, ast.AST):
        return node
    if isinstance(node, ast.Import | ast.ImportFrom | ast.expr_context):
        return None
    if isinstance(node, ast.Raise):
        return "Raise"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return None  # a docstring
    left_out = {"annotation", "returns", "type_comment", "type_params", "kind"}
    fields = ((k, essence(v)) for k, v in ast.iter_fields(node) if k not in left_out)
    return [type(node).__name__, *([k, v] for k, v in fields if v is not None and v != [])]
