"""Markdown tables of benchmarks/results/cache-quality.json: what bits and eviction cost.

python tools/cache_quality_table.py benchmarks/results/cache-quality.json bits
"""

import json
import math
import statistics
import sys
from pathlib import Path

SECTIONS = ("policies", "metric", "bits", "factor", "recipes", "papers")


def loss(row: dict, original: dict, text: str) -> str:
    """Increase of the loss, nats a token, paired by window, and its standard error."""
    pairs = zip(
        row["texts"][text]["window_nll"], original["texts"][text]["window_nll"], strict=True
    )
    gaps = [after - before for after, before in pairs]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return f"{statistics.mean(gaps):.4f} ± {error:.4f}"


def answers(row: dict, asked: str) -> list[str]:
    """Per cent answered at every context length."""
    found = row.get(f"needle_{asked}")
    return [f"{100 * x['exact']:.0f}" for x in found.values()] if found else []


def main(path: str, section: str) -> None:
    report = json.loads(Path(path).read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in report["rows"]}
    original = rows["original"]
    texts = list(original["texts"])
    lengths = list(original["needle_after"])
    chosen = [row for row in rows.values() if row.get("section", section) == section]
    chosen = [row for row in chosen if row is not original]
    before = any("needle_before" in row for row in chosen)
    asked = ["after", "before"] if before else ["after"]
    names = [f"{length} {when}" for when in asked for length in lengths] if before else lengths
    print("| | kept | pool | " + " | ".join([*texts, *names]) + " |")
    print("|---|" + "---|" * (2 + len(texts) + len(names)))
    for row in chosen:
        cells = [f"{row['kept_fraction']:.4f}", f"{row['pool_fraction']:.4f}"]
        cells += [loss(row, original, text) for text in texts]
        for when in asked:
            cells += answers(row, when) or ["–"] * len(lengths)
        print(f"| {row['name']} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[2] not in SECTIONS:
        sys.exit(f"usage: {sys.argv[0]} FILE.json {'|'.join(SECTIONS)}")
    main(sys.argv[1], sys.argv[2])
