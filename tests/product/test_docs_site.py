"""The docs site: its menu has every page, its map every package, and it builds without warnings."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import kvfold

ROOT = Path(__file__).parents[2]
GENERATED = {"index.md", "contributing.md", "changelog.md", "security.md", "cli.md", "notebook.md"}
needs_mkdocs = pytest.mark.skipif(
    not importlib.util.find_spec("material"), reason="needs kvfold[docs], as `make docs` installs"
)


def menu() -> set[str]:
    """Pages that mkdocs.yml names."""

    def pages(entry: object) -> set[str]:
        if isinstance(entry, str):
            return {entry}
        entries = entry.values() if isinstance(entry, dict) else entry
        return set().union(*map(pages, entries))

    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return pages(yaml.safe_load(text[text.index("\nnav:") :])["nav"])


def hooks(name: str) -> ModuleType:
    """A module of tools/ that mkdocs runs."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_menu_has_every_page() -> None:
    pages = {x.relative_to(ROOT / "docs").as_posix() for x in ROOT.glob("docs/**/*.md")}
    assert menu() == pages | GENERATED


def test_the_map_has_every_package() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    packages = {x.parent.name for x in Path(kvfold.__file__).parent.glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == packages
    drawing = (ROOT / "docs/assets/packages.svg").read_text(encoding="utf-8")
    drawn = re.findall(r'text-anchor="middle">(\w+)</text>', drawing)
    assert set(drawn) == packages - {"data"}


@needs_mkdocs
def test_links_lead_to_what_the_site_has() -> None:
    links = hooks("docs_site").with_links
    page = Path("docs/papers/zack.md")
    assert links("[a](../quality.md#b)", page, "papers/zack.md") == "[a](../quality.md#b)"
    assert links("[a](../../README.md)", page, "papers/zack.md") == "[a](../index.md)"
    assert links("[a](../../src/x.py)", page, "papers/zack.md") == "a"
    root = Path("README.md")
    assert links("[a](docs/guide.md) [b](#c)", root, "index.md") == "[a](guide.md) [b](#c)"
    assert (
        links("![a](docs/x.svg) [b](https://c)", root, "index.md") == "![a](x.svg) [b](https://c)"
    )
    results = "[a](benchmarks/results/x.json)"
    assert links(results, root, "index.md") == "[a](results/x.json)"


@needs_mkdocs
def test_a_notebook_becomes_a_page() -> None:
    code = {"cell_type": "code", "source": ["print(1)\n", "2"], "outputs": [{"text": ["1\n"]}]}
    text = hooks("docs_site").notebook([{"cell_type": "markdown", "source": ["# Title"]}, code])
    assert text.startswith("# Title\n\nDownload it as ")
    assert text.endswith("```python\nprint(1)\n2\n```\n\n```text\n1\n```")


@needs_mkdocs
def test_parameters_become_lists() -> None:
    listed = hooks("docs_parameters").listed
    text = "What it does.\n\nReads a file. path: where; a\nfolder too. a, b: sizes. Raises OSError."
    assert listed(text, {"path", "a", "b"}) == (
        "What it does.\n\nReads a file.\n\n- **path**: where; a folder too.\n- **a, b**: sizes.\n\n"
        "Raises OSError."
    )
    assert listed("Words: not a list. path: one", {"a"}) == "Words: not a list. path: one"


@needs_mkdocs
@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path) -> None:
    call = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    built = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "search/search_index.js").exists()
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r'(?:<script|<link|<img)[^>]+(?:src|href)="https?:', text), page


def test_the_citation_and_the_templates_can_be_read() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == kvfold.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert form.keys() == {"name", "description", "body"}, path
        kinds = {"input", "textarea", "dropdown"}
        assert all(x["type"] in kinds and x["attributes"]["label"] for x in form["body"]), path
