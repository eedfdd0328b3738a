"""A published table or figure beside what kvfold measures.

    python -m benchmarks.papers                    # which papers, tables and figures there are
    python -m benchmarks.papers palu "Table 1"     # one of them; "text" is what no table has

The rows are those of docs/papers/PAPER.md that cite the table, with their numbers drawn anew from
benchmarks/results. † marks a number that was measured before its code changed.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))

from claims import CLAIM, Claims  # noqa: E402

PAGES = ROOT / "docs/papers"
PAPERS = tuple(sorted(page.stem for page in PAGES.glob("*.md")))
COLUMNS = ("claim", "setting", "here", "why")
TEXT = "text"  # what cites no table or figure
_NUMBER = r"\d+[a-z]?"
_CITED = re.compile(rf"(Table|Fig)s?\.? ({_NUMBER}(?:(?:, | and | to ){_NUMBER})*)")
_COMMAND = re.compile(r"^(\d+)\. (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """A claim of a paper, beside what was measured here. tables: what it cites, such as "Table 1";
    commands: those that measured it."""

    claim: str
    setting: str
    here: str
    why: str
    tables: tuple[str, ...]
    commands: tuple[str, ...]


def cited(claim: str) -> Iterator[str]:
    """Tables and figures that a claim cites, such as "Table 8"; TEXT if there are none."""
    none = True
    for kind, numbers in _CITED.findall(claim):
        name = "Table" if kind == "Table" else "Fig."
        for part in re.split(r", | and ", numbers):
            first, _, last = part.partition(" to ")
            span = range(int(first), int(last) + 1) if last else (first,)
            yield from (f"{name} {number}" for number in span)
            none = False
    if none:
        yield TEXT


def rows(paper: str, claims: Claims | None = None) -> list[Row]:
    """Every claim of a paper, in the order of its page. Numbers are drawn from results files."""
    page = (PAGES / f"{paper}.md").read_text(encoding="utf-8")
    registry = Claims(ROOT) if claims is None else claims
    drawn = CLAIM.sub(lambda x: registry.shown(x[1], x[2]), page)
    commands = dict(_COMMAND.findall(drawn.partition("## Commands")[2]))
    found = []
    for line in drawn.splitlines():
        cells = [x.strip() for x in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) != len(COLUMNS) or cells[0] in ("claim", "---"):
            continue
        claim, setting, here, why = (plain(x) for x in cells)
        numbers = dict.fromkeys(re.findall(r"\[(\d+)\](?!\()", cells[2]))
        used = tuple(f"[{x}] {plain(commands[x])}" for x in numbers)
        found.append(Row(claim, setting, here, why, tuple(cited(claim)), used))
    return found


def plain(cell: str) -> str:
    """Markdown without its links and backquotes, and without links to rows."""
    cell = re.sub(r" \((?:\[\w+\]\(\S+?\.json\)(?:, )?)+\)", "", cell)
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", cell).replace("`", "")


def tables(paper: str) -> list[str]:
    """The tables and figures of a paper that its page has, in order."""
    names = {name for row in rows(paper) for name in row.tables}
    return sorted(names, key=lambda x: (x == TEXT, x[0] != "T", int(re.sub(r"\D", "", x) or 0), x))


def show(paper: str, table: str) -> str:
    """A table of a paper beside ours, to print. Raises ValueError for a table that is not there."""
    wanted = _same(table)
    chosen = [row for row in rows(paper) if wanted in map(_same, row.tables)]
    if not chosen:
        raise ValueError(f"{paper} has no {table!r} here; there are {', '.join(tables(paper))}")
    blocks = ["\n".join(map(_line, COLUMNS, _cells(row))) for row in chosen]
    commands = dict.fromkeys(x for row in chosen for x in row.commands)
    return "\n\n".join([*blocks, *commands])


def _same(table: str) -> str:
    return re.sub(r"[\s.]|ure", "", table).lower()


def _cells(row: Row) -> tuple[str, ...]:
    return row.claim, row.setting, row.here, row.why


def _line(name: str, cell: str) -> str:
    name = "paper" if name == "claim" else name
    return textwrap.fill(f"{name:9}{cell}", 100, subsequent_indent=" " * 9)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paper", nargs="?", choices=PAPERS)
    parser.add_argument("table", nargs="?", help='such as "Table 1" or "Fig. 5a"')
    asked = parser.parse_args(arguments)
    if asked.table is None:
        for paper in PAPERS if asked.paper is None else [asked.paper]:
            print(f"{paper}: {', '.join(tables(paper))}")
        return
    try:
        print(show(asked.paper, asked.table))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
