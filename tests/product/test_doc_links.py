"""Links between the pages of this repository lead somewhere, to a file and a heading of it."""

import re
from pathlib import Path

import pytest

from kvfold import recipes

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda x: str(x.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for file, heading in LINK.findall(prose(page)):
        target = page.parent / file if file else page
        assert target.exists(), file
        assert not heading or heading in anchors(target), f"{file}#{heading}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_files_that_a_guide_names_are_there(page: str) -> None:
    folders = ("src", "tests", "tools", "docs", "benchmarks")
    paths = [x.as_posix() for folder in folders for x in (ROOT / folder).rglob("*.*")]
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in re.findall(r"`([\w/]+\.(?:py|json|md))[`:]", text):
        if "NAME" not in name:
            assert any(path.endswith(f"/{name}") for path in paths), name


def test_there_is_a_page_a_paper() -> None:
    names = {x.stem for x in (ROOT / "docs/papers").iterdir()}
    assert names == {"zack", "zdc", "palu", "lorc", "kv-compress"}
    links = LINK.findall(prose(ROOT / "docs/quality.md"))
    assert {f"papers/{name}.md" for name in names} <= {file for file, _ in links}


def test_every_recipe_and_path_is_described() -> None:
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    assert not [x for x in recipes.RECIPES if f"`{x}`" not in page]
    page = (ROOT / "docs/http.md").read_text(encoding="utf-8")
    code = (ROOT / "src/kvfold/server/app.py").read_text(encoding="utf-8")
    paths = {x.split("/{")[0] for x in re.findall(r'@app\.\w+\("([^"]+)"', code)}
    assert len(paths) > 6 and not [x for x in sorted(paths) if x not in page]
