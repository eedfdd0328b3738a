"""Prints the table of a report of benchmarks/real_quality.py, and draws it.

python tools/real_quality_table.py benchmarks/results/quality-smollm2.json --plot smollm2.svg
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

Row = dict[str, Any]
OURS = {"small": "#1b6ca8", "lean": "#2e8b57", "swift": "#8a5fbf"}


def loss(row: Row, original: Row, text: str) -> tuple[float, float]:
    """Nats a token lost, paired by window, and its standard error."""
    pairs = zip(
        row["texts"][text]["window_nll"], original["texts"][text]["window_nll"], strict=True
    )
    lost = [found - was for found, was in pairs]
    return statistics.mean(lost), statistics.stdev(lost) / math.sqrt(len(lost))


def table(rows: list[Row]) -> str:
    original, *others = rows
    texts = list(original["texts"])
    lines = [f"| | smaller | {' | '.join(texts)} |", "|---|" + "---|" * (len(texts) + 1)]
    for row in others:
        cells = (
            "{:.4f} ± {:.4f}".format(*loss(row, original, text)) if text in row["texts"] else "–"
            for text in texts
        )
        lines.append(f"| {row['name']} | {1 / row['kept_fraction']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def levels_table(rows: list[Row], text: str) -> str:
    """Loss on one text of plans of a size, by the levels of their tiers; the size too, where a plan
    does not need what it may take."""
    original, *others = rows
    planned = [row["name"].split(", ", 1) for row in others if row["factor"]]
    sizes, sets = (list(dict.fromkeys(names)) for names in zip(*planned, strict=True))
    found = {row["name"]: row for row in others}

    def cell(row: Row) -> str:
        lost, error = loss(row, original, text)
        smaller = 1 / row["kept_fraction"]
        idle = smaller > 1.01 * row["factor"]
        return f"{lost:.4f} ± {error:.4f}" + (f" ({smaller:.1f}x)" if idle else "")

    lines = [f"| {text} | {' | '.join(sets)} |", "|---|" + "---|" * len(sets)]
    for size in sizes:
        lines.append(f"| {size} | {' | '.join(cell(found[f'{size}, {x}']) for x in sets)} |")
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    """Loss on the first text by how many times fewer bits a token stores."""
    import matplotlib.pyplot as plt

    original, *others = rows
    text = next(iter(original["texts"]))
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")

    def points(found: list[Row]) -> tuple[list[float], list[float]]:
        pairs = sorted((1 / row["kept_fraction"], loss(row, original, text)[0]) for row in found)
        shown = [(x, max(y, 3e-4)) for x, y in pairs]
        return [x for x, _ in shown], [y for _, y in shown]

    for name, colour in OURS.items():
        own = [row for row in others if row["recipe"] == name and row["factor"]]
        own = [row for row in own if "packaged" not in row["name"]]
        for steps, style in ((0, "o--"), (1, "o-")):
            x, y = points([row for row in own if bool(row["steps"]) == bool(steps)])
            axes.plot(x, y, style, color=colour, label=name + (", recovered" if steps else ""))
    groups = {
        "plain bits": ("s", "#555555", [r for r in others if r["name"].startswith("int")]),
        "KIVI": ("^", "#c0504d", [r for r in others if r["name"].startswith("KIVI")]),
        "palu-j, with bits": ("D", "#d98d00", [r for r in others if r["recipe"] == "palu-j"]),
        "palu-m": ("d", "#a87000", [r for r in others if r["recipe"] == "palu-m"]),
        "zack": ("v", "#7a7a2a", [r for r in others if r["recipe"] == "zack"]),
        "lorc": ("x", "#333333", [r for r in others if r["recipe"] == "lorc"]),
    }
    for name, (marker, colour, found) in groups.items():
        axes.plot(*points(found), marker, color=colour, label=name)
    axes.set(
        xlabel="times fewer bits a token", ylabel="nats a token lost", xscale="log", yscale="log"
    )
    ticks = [2, 3, 4, 5, 6, 8, 10, 14]
    axes.set_xticks(ticks, [str(x) for x in ticks])
    axes.minorticks_off()
    axes.set_title(f"SmolLM2-135M-Instruct, {text}: what a smaller cache costs")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--levels", action="store_true", help="plans by the levels of their tiers")
    arguments = parser.parse_args()
    rows = json.loads(arguments.report.read_text())["rows"]
    if arguments.levels:
        print("\n\n".join(levels_table(rows, text) for text in rows[0]["texts"]))
        rows = [row for row in rows if not row.get("factor")]
    print(table(rows))
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
