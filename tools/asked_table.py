"""Prints the tables of reports of benchmarks/asked_after.py: right answers, and nats lost.

python tools/asked_table.py benchmarks/results/asked-smollm2.json
"""

import json
import statistics
import sys
from math import sqrt
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def loss(row: Row, original: Row, text: str) -> str:
    """Nats a token lost, paired by window, and its standard error."""
    pairs = zip(
        row["texts"][text]["window_nll"], original["texts"][text]["window_nll"], strict=True
    )
    lost = [found - was for found, was in pairs]
    return f"{statistics.mean(lost):.3f} ± {statistics.stdev(lost) / sqrt(len(lost)):.3f}"


def right(row: Row) -> str:
    return str(round(next(iter(row["answers"].values()))["right"]))


def by_share(rows: list[Row]) -> str:
    """Policies by the share that they keep: right answers, then loss on every text."""
    original, *others = rows
    shares = sorted({row["keep"] for row in others}, reverse=True)
    found = {(row["evict"], row["keep"]): row for row in others}
    policies = dict.fromkeys(row["evict"] for row in others)
    each = {policy: [found.get((policy, share)) for share in shares] for policy in policies}
    names = [f"1/{1 / share:g}" for share in shares]
    lines = [f"| right ({right(original)} with all rows) | {' | '.join(names)} |"]
    lines += ["|---|" + "---|" * len(shares)]
    for policy in policies:
        lines.append(line(f"`{policy}`", (right(row) if row else "" for row in each[policy])))
    for text in original["texts"]:
        for policy in policies:
            cells = (loss(row, original, text) if row else "" for row in each[policy])
            lines.append(line(f"`{policy}`, {text}", cells))
    return "\n".join(lines)


def composites(rows: list[Row]) -> str:
    """Recipes with eviction, the smallest last; sizes are of rows, and of pages with all that
    belongs to them, against 16 bits."""
    original, *others = rows
    texts = list(original["texts"])
    head = ["planned", "tokens", "policy", "rows", "pages", f"right of {right(original)}", *texts]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in sorted(others, key=lambda x: (x["factor"] / x["keep"], -int(right(x)))):
        cells = [f"{row['factor']:g}x", f"1/{1 / row['keep']:g}", f"`{row['evict']}`"]
        cells += [f"{1 / row[name]:.0f}x" for name in ("kept_fraction", "pool_fraction")]
        cells += [right(row), *(loss(row, original, text) for text in texts)]
        lines.append(line(f"`{row['recipe']}` {cells[0]}", cells[1:]))
    return "\n".join(lines)


def line(name: str, cells: Any) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        rows = json.loads(path.read_text())["rows"]
        print(composites(rows) if any(row.get("recipe") for row in rows) else by_share(rows))


if __name__ == "__main__":
    main()
