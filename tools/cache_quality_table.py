"""Markdown tables of benchmarks/results/cache-quality.json: what bits and eviction cost.

python tools/cache_quality_table.py benchmarks/results/cache-quality.json bits
"""

import json
import math
import statistics
import sys
from pathlib import Path

from kvfold.cli.methods import OURS, PUBLISHED, SETS

ROOM = 1.15  # bytes of a published method that ours are put beside, over theirs
SECTIONS = ("policies", "metric", "bits", "factor", "recipes", "papers")


def paired(row: dict, other: dict, text: str) -> tuple[float, float]:
    """Loss of a row less another's, nats a token, paired by window, and its standard error."""
    pairs = zip(row["texts"][text]["window_nll"], other["texts"][text]["window_nll"], strict=True)
    gaps = [after - before for after, before in pairs]
    return statistics.mean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps))


def loss(row: dict, original: dict, text: str) -> str:
    """Increase of the loss, and its standard error."""
    return "{:.4f} ± {:.4f}".format(*paired(row, original, text))


def answers(row: dict, asked: str, lengths: list[str]) -> list[str]:
    """Per cent answered at every context length."""
    found = row.get(f"needle_{asked}") or {}
    return [f"{100 * found[x]['exact']:.0f}" if x in found else "–" for x in lengths]


def table(report: dict, section: str) -> str:
    """What every row keeps, loses and finds."""
    rows = {row["name"]: row for row in report["rows"]}
    original = rows["original"]
    texts = list(original["texts"])
    lengths = list(original["needle_after"])
    chosen = [row for row in rows.values() if row.get("section", section) == section]
    chosen = [row for row in chosen if row is not original]
    if section == "papers":
        chosen.sort(key=lambda row: SETS["papers"].index(row["name"]))
    before = lengths and any("needle_before" in row for row in chosen)
    asked = ["after", "before"] if before else ["after"]
    names = [f"{length} {when}" for when in asked for length in lengths] if before else lengths
    lines = ["| | kept | pool | " + " | ".join([*texts, *names]) + " |"]
    lines.append("|---|" + "---|" * (2 + len(texts) + len(names)))
    for row in chosen:
        cells = [f"{row['kept_fraction']:.4f}", f"{row['pool_fraction']:.4f}"]
        cells += [loss(row, original, text) for text in texts]
        cells += [cell for when in asked for cell in answers(row, when, lengths)]
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def beside(report: dict) -> str:
    """Ours less the published method that loses least, the mean over texts, of those that take at
    most ROOM times their bytes; only where there is one."""
    rows = {row["name"]: row for row in report["rows"]}
    original, texts = rows["original"], list(rows["original"]["texts"])
    lines = ["| | kept | beside | kept | " + " | ".join(texts) + " |"]
    lines.append("|---|---|---|---|" + "---|" * len(texts))
    published = [rows[name] for name in PUBLISHED if name in rows]
    for row in (rows[name] for name in OURS if name in rows):
        most = ROOM * row["kept_fraction"]
        others = [other for other in published if other["kept_fraction"] <= most]
        if not others:
            continue
        best = min(others, key=lambda x: sum(paired(x, original, text)[0] for text in texts))
        cells = [loss(row, best, text) for text in texts]
        about = [f"{row['kept_fraction']:.4f}", best["name"], f"{best['kept_fraction']:.4f}"]
        lines.append(f"| {row['name']} | " + " | ".join([*about, *cells]) + " |")
    return "\n".join(lines)


def main(path: str, section: str) -> None:
    report = json.loads(Path(path).read_text(encoding="utf-8"))
    print(table(report, section))
    if section == "papers":
        print(beside(report), sep="\n")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[2] not in SECTIONS:
        sys.exit(f"usage: {sys.argv[0]} FILE.json {'|'.join(SECTIONS)}")
    main(sys.argv[1], sys.argv[2])
