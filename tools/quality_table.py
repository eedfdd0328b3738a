"""Markdown tables of a `kvfold compare --json` file: loss increase by text, and retrieval.

python tools/quality_table.py benchmarks/results/quality-gqa.json
"""

import json
import sys
from pathlib import Path


def cell(row: dict, text: str) -> str:
    mean, error = row["delta_nll"][text]
    return f"{mean:.4f} ± {error:.4f}"


def main(path: str) -> None:
    report = json.loads(Path(path).read_text(encoding="utf-8"))
    original, *rows = report["rows"]
    texts = list(original["perplexity"])
    keeps = sorted({row["keep"] for row in rows}, reverse=True)
    found = {(row["recipe"], row["keep"]): row for row in rows}
    for text in texts:
        print(f"\n{text}, original perplexity {original['perplexity'][text]:.2f}:\n")
        print("| recipe | " + " | ".join(f"{keep:g}" for keep in keeps) + " |")
        print("|---|" + "---|" * len(keeps))
        for recipe in dict.fromkeys(row["recipe"] for row in rows):
            cells = [
                cell(found[recipe, keep], text) if (recipe, keep) in found else "–"
                for keep in keeps
            ]
            print(f"| `{recipe}` | " + " | ".join(cells) + " |")
    if original["needle"]:
        print_needle(original, rows)


def print_needle(original: dict, rows: list[dict]) -> None:
    """Per cent of questions answered, by context length."""
    lengths = list(original["needle"])
    print("\n| recipe | kept | " + " | ".join(lengths) + " |")
    print("|---|---|" + "---|" * len(lengths))
    for row in [original, *(row for row in rows if row["needle"])]:
        cells = [f"{100 * row['needle'][length]:.0f}" for length in lengths]
        print(f"| `{row['recipe']}` | {row['keep']:g} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main(sys.argv[1])
