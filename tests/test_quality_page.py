"""docs/quality.md shows what its report says."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from real_quality_table import table  # noqa: E402


def test_every_row_of_the_report_is_on_the_page() -> None:
    rows = json.loads((ROOT / "benchmarks/results/quality-smollm2.json").read_text())["rows"]
    page = (ROOT / "docs/quality.md").read_text(encoding="utf-8").splitlines()
    lines = table(rows).splitlines()[2:]
    assert len(lines) > 50 and set(lines) <= set(page)
