"""Numbers on pages that are drawn from results files by a key.

A page holds `<!--=FILE:KEY-->11.6<!--/-->`. FILE is a file of benchmarks/results without `.json`;
`[FILE.claims]` of benchmarks/claims.toml says what KEY is:

    step = "rows[variant=swift-5x, batch=64].ms | {:.1f}"

Before the first `|` stands a value: paths into the file (`other-file:rows[...]` for another file)
and numbers, joined by ` + `, ` - `, ` * `, ` / ` and computed from left to right. Of two lists it
is the value of each pair.

    rows[name=x, batch=64]   the one row with these values
    rows[0]  rows.#          the first row; the number of rows
    lost(x, wiki)            the increase in cross-entropy (nats/token) of row x over the original
                             on text wiki, the mean over windows

Then come steps: a format, or a name of `STEPS`. A number whose code has changed since it was
measured is followed by †; `code_versions.py` says when that is.
"""

import math
import operator
import re
import statistics
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import code_versions
from code_versions import STALE, Change, Versions

ROOT = Path(__file__).parents[1]
REGISTRY = "benchmarks/claims.toml"
CLAIM = re.compile(r"<!--=([\w.+-]+):([\w.+-]+)-->(.*?)<!--/-->", re.DOTALL)
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
LOST = re.compile(r"lost\((.+), ([\w-]+)\)")
PART = re.compile(r"([^.\[\]]+)?(?:\[([^\]]*)\])?(?:\.|$)")


class ClaimError(Exception):
    """A number that cannot be drawn: the key, and what is missing."""


def percent(nats: float) -> str:
    """The increase in perplexity that an increase in cross-entropy (nats/token) is."""
    value = 100 * math.expm1(nats)
    if value > 1000:
        return "over +1000 %"
    digits = 2 if abs(value) < 0.1 else 1 if value < 100 else 0
    return f"{value:+.{digits}f} %"


STEPS: dict[str, Callable[[Any], Any]] = {
    "mean": statistics.mean,
    "error": lambda values: statistics.stdev(values) / math.sqrt(len(values)),
    "root": math.sqrt,
    "percent": percent,
    "nats": lambda nats: f"{nats:.3f}".replace("0.", ".", 1) if abs(nats) < 1 else f"{nats:.3f}",
    "unsigned": lambda text: text.lstrip("+"),
}


class Claims:
    """The registry of numbers below a folder that holds benchmarks/."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.files: dict[str, Any] = tomllib.loads((root / REGISTRY).read_text(encoding="utf-8"))
        self.code: dict[str, list[str]] = self.files.pop("code", {})
        self.versions = Versions(root, self.code)
        self._results: dict[str, Any] = {}
        self.marked: dict[str, list[Change]] = {}  # of the page that is filled: changes by file
        self.opened: dict[str, None] = {}  # files that were asked for, in order

    def results(self, file: str) -> Any:
        """A file of benchmarks/results."""
        self.opened[file] = None
        if file not in self._results:
            path = self.root / f"benchmarks/results/{file}.json"
            if not path.exists():
                raise ClaimError(f"there is no benchmarks/results/{file}.json")
            self._results[file] = code_versions.read_json(path)
        return self._results[file]

    def definition(self, file: str, key: str) -> str:
        try:
            return self.files[file]["claims"][key]
        except KeyError:
            raise ClaimError(f"{REGISTRY} has no `{key}` in [{file}.claims]") from None

    def shown(self, file: str, key: str) -> str:
        """What a page shows for a key."""
        self.results(file)
        try:
            text = self.computed(file, self.definition(file, key))
        except ClaimError as error:
            raise ClaimError(f"{file}:{key}: {error}") from None
        return text + (STALE if self.changes(file, key) else "")

    def computed(self, file: str, definition: str) -> str:
        expression, *steps = (x.strip() for x in definition.split(" | "))
        value = self.value(file, expression)
        for step in steps:
            if "{" not in step and step not in STEPS:
                raise ClaimError(f"there is no step `{step}`")
            value = step.format(value) if "{" in step else STEPS[step](value)
        return str(value)

    def value(self, file: str, expression: str) -> Any:
        first, *rest = re.split(r" ([-+*/]) ", expression)
        value = self.term(file, first)
        for sign, term in zip(rest[::2], rest[1::2], strict=True):
            value = combined(OPERATIONS[sign], value, self.term(file, term))
        return value

    def term(self, file: str, text: str) -> Any:
        """A number, or what a path leads to."""
        if re.fullmatch(r"[\d.]+(e-?\d+)?", text):
            return float(text)
        if match := LOST.fullmatch(text):
            return self.lost(file, *match.groups())
        other, colon, path = text.partition(":")
        if colon and "[" not in other:
            file, text = other, path
        value = self.results(file)
        for name, choice in parts(text):
            try:
                value = len(value) if name == "#" else value[name] if name else value
                value = value if choice is None else chosen(value, choice)
            except (KeyError, IndexError, TypeError, ValueError):
                raise ClaimError(f"benchmarks/results/{file}.json has no `{text}`") from None
        return value

    def lost(self, file: str, name: str, text: str) -> float:
        """The increase in cross-entropy (nats/token) over the original, the mean over windows."""
        windows = (
            self.term(file, f"rows[name={x}].texts.{text}.window_nll") for x in (name, "original")
        )
        return statistics.mean(a - b for a, b in zip(*windows, strict=True))

    def changes(self, file: str, key: str) -> list[Change]:
        """What changed since a key's rows were measured."""
        definition = self.definition(file, key)
        others = re.findall(r"([\w.+-]+):(?=\w+[\[.])", definition)
        files = dict.fromkeys([file, *others])
        found = [x for each in files for x in self.changes_of(each, row_names(definition))]
        return list(dict.fromkeys(found))

    def changes_of(self, file: str, names: Iterable[str] = ()) -> list[Change]:
        """What changed since the rows of these names were measured."""
        entry = self.files.get(file, {})
        some = entry.get("some", {})
        names = set(names)
        matching = (
            x for x, rows in some.items() if any(set(r.split(" & ")) <= names for r in rows)
        )
        code = [*entry.get("code", []), *matching]
        found = self.versions.changes(file, code)
        if found:
            known = self.marked.setdefault(file, [])
            known += [x for x in found if x not in known]
        return found

    def mark(self, file: str, *names: str) -> str:
        """The mark of rows of these names, or nothing."""
        return STALE if self.changes_of(file, names) else ""

    def filled(self, text: str) -> str:
        """A page's text with its numbers as the results say."""
        return CLAIM.sub(lambda x: f"<!--={x[1]}:{x[2]}-->{self.shown(x[1], x[2])}<!--/-->", text)

    def footnote(self, *, short: bool) -> str:
        """What the marks of a page mean, or nothing."""
        if not self.marked:
            return ""
        if short:
            return (
                f"{STALE} Measured before code changed that may move the figure; "
                "`python tools/results_tables.py stale` says what changed.\n"
            )
        files: dict[Change, list[str]] = {}
        for file, changes in sorted(self.marked.items()):
            for change in changes:
                files.setdefault(change, []).append(f"`{file}.json`")
        lines = (f"- {change} ({', '.join(files[change])})\n" for change in sorted(files))
        return f"{STALE} Measured before a change that may move the figure:\n\n{''.join(lines)}"

    def described(self, file: str, key: str) -> str:
        """Where a number is from, for people."""
        definition = self.definition(file, key)
        row = re.match(r"\w+\[[^\]]*=[^\]]*\]", definition)
        lines = [f"{self.shown(file, key)}   {file}:{key}"]
        lines += self.origin(file, self.term(file, row[0]) if row else {})
        lines.insert(2, f"  value:    {definition}")
        lines += [f"  stale:    {change}" for change in self.changes(file, key)]
        return "\n".join(lines)

    def origin(self, file: str, row: dict[str, Any] | None = None) -> list[str]:
        """A results file, how it was made and which code decides it, a line each. A row that was
        measured again has versions of its own."""
        entry, report = self.files.get(file, {}), self.results(file)
        runs = [row or {}, report, *report.get("runs", [])]
        versions: dict[str, int] = next((x["versions"] for x in runs if "versions" in x), {})
        code = ", ".join([*entry.get("code", []), *entry.get("some", {})])
        found = {
            "file": f"benchmarks/results/{file}.json",
            "command": entry.get("command"),
            "versions": ", ".join(f"{name} {x}" for name, x in versions.items()),
            "code": code,
        }
        return [f"  {name + ':':9} {x}" for name, x in found.items() if x]


def parts(path: str) -> Iterator[tuple[str | None, str | None]]:
    """A path's names, each with what is in its brackets."""
    place = 0
    while place < len(path):
        match = PART.match(path, place)
        if not match or match.end() == place:
            raise ClaimError(f"`{path}` is no path")
        yield match[1], match[2]
        place = match.end()


def chosen(rows: Any, choice: str) -> Any:
    """The entry of a number, or the one row whose values are as `choice` says."""
    if choice.isdigit():
        return rows[int(choice)]
    conditions = wanted(choice)
    (row,) = [x for x in rows if all(spelt(inner(x, k)) == v for k, v in conditions)]
    return row


def wanted(choice: str) -> list[tuple[str, str]]:
    """Names and values of `name=swift 4x, 4 layouts, batch=64`."""
    pairs = (x.partition("=") for x in re.split(r", (?=[\w.]+=)", choice))
    return [(name, value) for name, _, value in pairs]


def inner(row: Any, path: str) -> object:
    """A value of a row, `settings.kind` too."""
    for name in path.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return row


def spelt(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def combined(operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Of two numbers, or of each pair of two lists."""
    if isinstance(left, list) and isinstance(right, list):
        return [operation(a, b) for a, b in zip(left, right, strict=True)]
    return operation(left, right)


def row_names(definition: str) -> list[str]:
    """Names of what a definition asks for: of rows, and of what they are in."""
    choices = re.findall(r"\[([^\]]*=[^\]]*)\]", definition)
    choices += [f"name={name}" for name, _ in LOST.findall(definition)]
    rows = [value for choice in choices for _, value in wanted(choice)]
    return rows + re.split(r"[.: ]", re.sub(r"\[[^\]]*\]", "", definition))
