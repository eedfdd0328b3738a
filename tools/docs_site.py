"""Hooks of mkdocs.yml: what the docs site shows beside the pages of docs/.

- README, CONTRIBUTING, CHANGELOG and SECURITY become pages, and files of results become files of
  the site, so that every link in docs/ works there as it does on GitHub.
- The page of the command line is generated from the commands themselves, the notebook's page from
  its cells.
- `<!-- settings: MODULE.CLASS -->` becomes a table of that class's settings.
"""

import json
import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from cyclopts import App
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from kvfold.cli.main import app
from kvfold.cli.settings import Settings

ROOT = Path(__file__).parent.parent
ROOT_PAGES = {  # of the repository, by their name on the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
COMMANDS = "cli.md"
NOTEBOOK = "notebook.md"
LINK = re.compile(r"(!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\()((?!\w+:)[^)#\s]+)(#[^)\s]+)?\)")
SETTINGS = re.compile(r"<!-- settings: ([\w.]+)\.(\w+) -->")
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's own pages, the page of commands and files of results."""
    for source, name in ROOT_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, COMMANDS, content=commands()))
    cells = json.loads((ROOT / "docs/notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    files.append(File.generated(config, NOTEBOOK, content=notebook(cells)))
    for path in sorted(ROOT.glob("benchmarks/results/*.json")):
        name = f"results/{path.name}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A page's text with the site's links and with tables of settings."""
    if page.file.src_uri.startswith("lab/"):
        page.meta["search"] = {"boost": 0.3}  # behind pages of what is true today
    names = {site: source for source, site in ROOT_PAGES.items()}
    source = Path(names.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
    prose = CODE.split(markdown)  # code stands at odd places
    prose[::2] = [with_links(text, source, page.file.src_uri) for text in prose[::2]]
    return SETTINGS.sub(lambda x: settings(x[1], x[2]), "".join(prose))


def with_links(text: str, source: Path, uri: str) -> str:
    """Links of a page that lies at `source` in the repository and at `uri` on the site. A link to a
    file that the site does not have becomes the file's name."""

    def replace(link: re.Match[str]) -> str:
        begin, label, file, heading = link[1], link[2], link[3], link[4] or ""
        target = site_path(os.path.normpath(source.parent / file))
        if target is None:
            return label
        return f"{begin}{os.path.relpath(target, Path(uri).parent)}{heading})"

    return LINK.sub(replace, text)


def site_path(path: str) -> str | None:
    """Where the site has a file of the repository, or None."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path == "docs/notebook.ipynb":
        return NOTEBOOK
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if re.fullmatch(r"benchmarks/results/[^/]+\.json", path):
        return path.removeprefix("benchmarks/")
    return None


def commands() -> str:
    """The page of the command line, from the commands' own help."""
    text = app.generate_docs(output_format="markdown")
    contents = re.compile(r"^## Table of Contents\n.*?(?=^\*\*Commands)", re.MULTILINE | re.DOTALL)
    text = text.replace("(#kvfold-install-completion)", "(#kvfold---install-completion)")
    text = contents.sub("", text).replace("# kvfold\n", "# Command line\n", 1)
    return f"{text}\n## Settings\n\n{unflagged(app)}"


def notebook(cells: list[dict[str, Any]]) -> str:
    """Markdown of a notebook's cells: text, code, and what the code printed."""
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
    download = '<a href="notebook.ipynb" download>notebook.ipynb</a>'
    parts.insert(1, f"Download it as {download}.")
    return "\n\n".join(parts)


def unflagged(app: App, path: tuple[str, ...] = ()) -> str:
    """Markdown lists of what `--set NAME=VALUE` takes, a command each."""
    lists = []
    for name in (x for x in app if not x.startswith("-")):
        if app[name].default_command is None:
            lists.append(unflagged(app[name], (*path, name)))
            continue
        line = " ".join((*path, name))
        if hidden := Settings.of(app[name], line, parse_docstring=True).hidden:
            words = {x.names[0][2:]: x for x in hidden.values()}
            lines = [f"- `{setting}`: {x.parameter.help}" for setting, x in words.items()]
            lists.append(f"### kvfold {line} --set\n\n" + "\n".join(lines))
    return "\n\n".join(lists)


def settings(module: str, name: str) -> str:
    """A Markdown table of a class's settings: name, type, default, help and legal values."""
    from kvfold.config import settings_of

    config: Any = getattr(import_module(module), name)
    rows = ["| setting | type | default | |", "|---|---|---|---|"]
    for field, (kind, setting) in settings_of(config).items():
        default = getattr(config, field, None)
        cells = (f"`{field}`", spelt(kind), f"`{default!r}`", setting.text.replace("|", r"\|"))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def spelt(kind: Any) -> str:
    """A type in words, such as `int` or `None`."""
    names = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
    return " or ".join(f"`{name}`" for name in names.split(" | "))
