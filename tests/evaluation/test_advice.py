"""Losses that `kvfold advise` shows are those of benchmarks/results, and it chooses as it says."""

import json
import os
from pathlib import Path
from typing import Any

import kvfold
from kvfold.evaluation import advice
from kvfold.hub import reference

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TABLE = Path(kvfold.__file__).parent / "data" / "measured_losses.json"
TEXTS = ("wiki", "python")
PLANNED = [f"{name} {factor}x" for name, factors in advice.PLANS.items() for factor in factors]


def rows_of(file: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{file}.json").read_text())["rows"]


def nats_of(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """What a row of `benchmarks/real_quality.py` loses."""
    row, original = (next(x for x in rows if x["name"] == y) for y in (name, "original"))
    lost = {x: row["texts"][x]["nll"] - original["texts"][x]["nll"] for x in TEXTS}
    return {x: round(nats, 6) for x, nats in lost.items()}


def qwen() -> dict[str, dict[str, float]]:
    """`swift` is planned for speed there, in four layouts, as the default is."""
    suites, layouts = rows_of("suites-qwen"), rows_of("layouts-qwen2.5-coder-1.5b")
    first: dict[str, dict[str, float]] = {}
    for row in suites:
        if "nats" in row:
            first.setdefault(row["setting"], row["nats"])
    names = {f"--bits {x}": f"bits-{x}" for x in advice.BITS}
    names |= {x: x.replace(" ", "-") for x in PLANNED if not x.startswith("swift")}
    found = {x: {y: round(first[row][y], 6) for y in TEXTS} for x, row in names.items()}
    swift = [x for x in PLANNED if x.startswith("swift")]
    return found | {x: nats_of(layouts, f"{x}, 4 layouts") for x in swift}


def smollm2() -> dict[str, dict[str, float]]:
    rows = rows_of("quality-smollm2-packaged")
    names = {f"--bits {x}": f"int{x}, rotated" for x in advice.BITS} | {x: x for x in PLANNED}
    return {name: nats_of(rows, row) for name, row in names.items()}


def test_the_table_is_what_was_measured() -> None:
    expected = {
        "qwen2.5-coder-1.5b": {
            "short": "Qwen2.5-1.5B",
            "parameters": 1_543_714_304,
            "nats": qwen(),
        },
        "smollm2": {"short": "SmolLM2-135M", "parameters": 134_515_008, "nats": smollm2()},
    }
    if os.environ.get("KVFOLD_WRITE"):
        TABLE.write_text(json.dumps(expected, indent=2) + "\n")
    assert json.loads(TABLE.read_text()) == expected
    assert expected.keys() == reference.MODELS.keys()
