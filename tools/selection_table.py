"""Markdown table of reports of benchmarks/selection.py: nats lost over all rows, by rule.

python tools/selection_table.py benchmarks/results/selection-*.json [--needle]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from real_quality_table import loss

Rows = dict[str, dict[str, Any]]


def read(path: Path) -> tuple[str, Rows]:
    """A report's name, and its rows by their rules."""
    report = json.loads(path.read_text(encoding="utf-8"))
    settings = report["settings"]
    rows = {row["name"].split("x, ", 1)[-1]: row for row in report["rows"]}
    model = settings["model"].removeprefix("reference:")
    return f"{model} {settings['factor']:g}x, {settings['ctx']}", rows


def lost(rows: Rows, rule: str) -> str:
    """Nats lost over attention to all rows of the same plan."""
    if rule not in rows or rule == "all rows":
        return "–"
    (text,) = rows[rule]["texts"]
    return "{:.4f} ± {:.4f}".format(*loss(rows[rule], rows["all rows"], text))


def found(rows: Rows, rule: str) -> str:
    """Per cent of hidden facts that are found, by length of the context."""
    if rule not in rows:
        return "–"
    each = rows[rule]["needle"].values()
    return ", ".join(f"{100 * x['exact']:.0f} ± {100 * x['exact_se']:.0f}" for x in each)


def table(reports: list[tuple[str, Rows]], needle: bool = False) -> str:
    rules = [*dict.fromkeys(rule for _, rows in reports for rule in rows)]
    if not needle:
        rules = [rule for rule in rules if rule not in ("original", "all rows")]
    lines = [f"| | {' | '.join(name for name, _ in reports)} |", "|---|" + "---|" * len(reports)]
    for rule in rules:
        cells = (found(rows, rule) if needle else lost(rows, rule) for _, rows in reports)
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--needle", action="store_true", help="facts found in place of losses")
    arguments = parser.parse_args()
    print(table([read(path) for path in arguments.reports], arguments.needle))
