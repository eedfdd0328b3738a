"""Parts of docs pages that tests write from a registry."""

import os
from inspect import getdoc
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def check_page(name: str, title: str, test: Path, table: str) -> None:
    """Compare a page's part between two markers with `table`; KVFOLD_WRITE=1 writes it first."""
    page, text = DOCS / name, (DOCS / name).read_text(encoding="utf-8")
    begin = f"<!-- {title}: written by {test.relative_to(DOCS.parent)} -->\n"
    end = f"<!-- end of {title} -->\n"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    assert after, f"docs/{name} has lost the markers {begin}{end}"
    expected = f"{before}{begin}\n{table}\n{end}{after}"
    if os.environ.get("KVFOLD_WRITE"):
        page.write_text(expected, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == expected, "KVFOLD_WRITE=1 writes the page"


def row(*cells: str) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def description(owner: Any) -> str:
    """The docstring of a class, on one line."""
    return " ".join((getdoc(owner) or "").split())
