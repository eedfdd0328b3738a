"""Tables of results in docs/ show what their reports say, on whatever page they stand."""

import html
import json
from functools import cache
from pathlib import Path

import pytest

import hybrid
from cache_quality_table import beside
from cache_quality_table import table as cache_table
from real_quality_table import levels_table, table
from results_tables import PAGES, TABLES, filled

ROOT = Path(__file__).parents[2]


@cache
def lines_of_docs() -> frozenset[str]:
    """All lines of all pages."""
    pages = (ROOT / "docs").rglob("*.md")
    return frozenset(x for page in pages for x in page.read_text(encoding="utf-8").splitlines())


def test_every_row_of_the_report_is_on_the_page() -> None:
    rows = json.loads((ROOT / "benchmarks/results/quality-smollm2.json").read_text())["rows"]
    page = lines_of_docs()
    lines = table(rows).splitlines()[2:]
    assert len(lines) > 50 and set(lines) <= page


@pytest.mark.parametrize("model", ["smollm2", "gqa"])
def test_plans_for_speed_are_on_the_page(model: str) -> None:
    rows = json.loads((ROOT / f"benchmarks/results/speed-{model}.json").read_text())["rows"]
    page = lines_of_docs()
    lines = table(rows).splitlines()[2:]
    assert len(lines) > 10 and {*lines} <= page


@pytest.mark.parametrize("model", ["smollm2", "gqa"])
def test_plans_by_levels_are_on_the_page(model: str) -> None:
    rows = json.loads((ROOT / f"benchmarks/results/levels-{model}.json").read_text())["rows"]
    page = lines_of_docs()
    lines = levels_table(rows, "wiki-heldout").splitlines()[2:]
    others = table([row for row in rows if not row.get("factor")]).splitlines()[2:]
    assert len(lines) == 15 and len(others) == 3 and {*lines, *others} <= page


@pytest.mark.parametrize("model", ["gqa", "mha", "smollm2"])
def test_published_methods_are_on_the_page(model: str) -> None:
    report = json.loads((ROOT / f"benchmarks/results/papers-{model}.json").read_text())
    page = lines_of_docs()
    lines = cache_table(report, "papers").splitlines()[2:]
    assert len(lines) > 10 and {*lines, *beside(report).splitlines()[2:]} <= page


def test_ours_are_beside_the_best_at_about_as_many_bytes() -> None:
    """Not the best of all, or at far more, and less its loss, window by window."""

    def row(name: str, kept: float, *losses: float) -> dict:
        return {"name": name, "kept_fraction": kept, "texts": {"a": {"window_nll": losses}}}

    published = row("int4", 0.28, 3.0, 4.0), row("KIVI 2 bits", 0.2, 3.5, 5.0)
    rows = [row("original", 1, 2.0, 2.0), row("int8", 0.5, 2.0, 2.0), *published]
    rows += [row("lean 4x", 0.25, 2.5, 3.0), row("small 6x", 0.16, 2.0, 2.0)]
    *_, line = beside({"rows": rows}).splitlines()
    assert line == "| lean 4x | 0.2500 | int4 | 0.2800 | -0.7500 ± 0.2500 |"


def test_rows_of_palus_recovery_are_on_the_page() -> None:
    rows = json.loads((ROOT / "benchmarks/results/lora-gqa.json").read_text())["rows"]
    page = lines_of_docs()
    lines = table(rows).splitlines()[2:]
    assert len(lines) >= 4 and {*lines} <= page


def test_hybrid_ratios_are_on_the_page(capsys: pytest.CaptureFixture) -> None:
    hybrid.table(ROOT / "benchmarks/results/hybrid-gqa.json")
    page = lines_of_docs()
    lines = [x for x in capsys.readouterr().out.splitlines() if x and "| nan |" not in x]
    assert len(lines) > 8 and {*lines} <= page


@pytest.mark.parametrize("page", PAGES)
def test_results_are_as_the_reports_say(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert filled(text) == text, "run python tools/results_tables.py"
    assert len(text.split()) <= 2500, "what is true today fits on a page"


def test_every_table_of_results_is_on_a_page() -> None:
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    assert all(f"<!-- table: {name} -->" in text for name in TABLES)


@pytest.mark.parametrize("name", ["qwen", "smollm2-sizes", "eviction-smollm2"])
def test_pictures_show_what_the_results_say(name: str) -> None:
    pytest.importorskip("matplotlib", reason="Matplotlib is not installed")
    from quality_plots import numbers

    shown = html.escape(numbers(name), quote=False)
    picture = (ROOT / f"docs/quality/{name}.svg").read_text(encoding="utf-8")
    assert shown in picture, "run python tools/quality_plots.py"
