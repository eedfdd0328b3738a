"""docs/quality.md shows what its report says."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

import hybrid  # noqa: E402

from real_quality_table import levels_table, table  # noqa: E402


def test_every_row_of_the_report_is_on_the_page() -> None:
    rows = json.loads((ROOT / "benchmarks/results/quality-smollm2.json").read_text())["rows"]
    page = (ROOT / "docs/quality.md").read_text(encoding="utf-8").splitlines()
    lines = table(rows).splitlines()[2:]
    assert len(lines) > 50 and set(lines) <= set(page)


@pytest.mark.parametrize("model", ["smollm2", "gqa"])
def test_plans_for_speed_are_on_the_page(model: str) -> None:
    rows = json.loads((ROOT / f"benchmarks/results/speed-{model}.json").read_text())["rows"]
    page = (ROOT / "docs/quality.md").read_text(encoding="utf-8").splitlines()
    lines = table(rows).splitlines()[2:]
    assert len(lines) > 10 and {*lines} <= set(page)


@pytest.mark.parametrize("model", ["smollm2", "gqa"])
def test_plans_by_levels_are_on_the_page(model: str) -> None:
    rows = json.loads((ROOT / f"benchmarks/results/levels-{model}.json").read_text())["rows"]
    page = (ROOT / "docs/quality.md").read_text(encoding="utf-8").splitlines()
    lines = levels_table(rows, "wiki-heldout").splitlines()[2:]
    others = table([row for row in rows if not row.get("factor")]).splitlines()[2:]
    assert len(lines) == 15 and len(others) == 3 and {*lines, *others} <= set(page)


def test_hybrid_ratios_are_on_the_page(capsys: pytest.CaptureFixture) -> None:
    hybrid.table(ROOT / "benchmarks/results/hybrid-gqa.json")
    page = (ROOT / "docs/quality.md").read_text(encoding="utf-8").splitlines()
    lines = [x for x in capsys.readouterr().out.splitlines() if x and "| nan |" not in x]
    assert len(lines) > 8 and {*lines} <= {*page}
