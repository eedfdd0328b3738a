"""ZDC's regression (§5.2) from statistics of a model and a limit of Q_d to hybrid ratios, trained
on near-optima that `hybrid.py` enumerated, against the Oracle, which enumerates them.

    cd benchmarks/results
    python ../hybrid_regression.py hybrid-gqa.json hybrid-mha.json --json hybrid-regression.json

A near-optimum is the row of fewest bytes within a limit; what is predicted is the nearest row of
the grid. Left out in turn: every limit, every text, every model.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import Ridge
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler

from hybrid import nearest
from kvfold.config import FORMER_RATIOS
from kvfold.utils.files import finite, write_json

LIMITS = tuple(float(x) for x in np.geomspace(0.01, 0.3, 12))
RATIOS = ("keys", "values", "low_rank_keys", "low_rank_values", "important", "important_last")


@dataclass(frozen=True)
class Optimum:
    """A near-optimum within a limit of Q_d on a text, and the grid that it is of."""

    model: str
    text: str
    limit: float
    statistics: list[float]
    row: dict[str, Any]
    grid: list[dict[str, Any]]

    @property
    def inputs(self) -> list[float]:
        return [*self.statistics, np.log(self.limit)]

    @property
    def ratios(self) -> list[float]:
        return ratios_of(self.row)


def ratios_of(row: dict[str, Any]) -> list[float]:
    ratios = {FORMER_RATIOS.get(name, name): share for name, share in row["ratios"].items()}
    return [ratios[name] for name in RATIOS]


def optima(path: Path) -> Iterator[Optimum]:
    report = json.loads(path.read_text())
    grid = [row for row in report["rows"] if row["variant"] == "ZDC"]
    for text in report["whole"]:
        for limit in LIMITS:
            if row := nearest(grid, "ZDC", limit, text):
                statistics = list(report["statistics"].values())
                yield Optimum(path.stem, text, limit, statistics, row, grid)


def regression() -> Pipeline:
    return make_pipeline(StandardScaler(), PolynomialFeatures(2), Ridge(0.1))


def judged(one: Optimum, found: Pipeline) -> dict[str, Any]:
    """The grid's row next to what is predicted, beside the Oracle's."""
    wanted = found.predict([one.inputs])[0]
    row = min(one.grid, key=lambda x: float(np.abs(np.array(ratios_of(x)) - wanted).sum()))
    own, best = row["texts"][one.text], one.row["texts"][one.text]
    return {
        "model": one.model,
        "text": one.text,
        "limit": one.limit,
        "Q_d": own["Q_d"],
        "more_bytes": own["bytes"] / best["bytes"] - 1,
    }


def left_out(all_of: list[Optimum], by: Callable[[Optimum], Any]) -> list[dict[str, Any]]:
    """Every near-optimum as predicted by the others that differ from it in this."""
    found = []
    for value in sorted({by(x) for x in all_of}):
        known = [x for x in all_of if by(x) != value]
        if known:
            fitted = regression().fit([x.inputs for x in known], [x.ratios for x in known])
            found += [judged(x, fitted) for x in all_of if by(x) == value]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    all_of = [x for path in given.files for x in optima(path)]
    splits = {
        "limit": left_out(all_of, lambda x: x.limit),
        "text": left_out(all_of, lambda x: (x.model, x.text)),
        "model": left_out(all_of, lambda x: x.model),
    }
    write_json(given.json, finite({"files": [x.name for x in given.files], "splits": splits}))
    print("| left out | predictions | within | Q_d / limit, median | bytes over the Oracle's |")
    print("|---|---|---|---|---|")
    for name, rows in splits.items():
        if rows:
            ratio = np.array([x["Q_d"] / x["limit"] for x in rows])
            more = np.array([x["more_bytes"] for x in rows])
            kept = f"{(ratio <= 1).mean():.0%} | {np.median(ratio):.2f}"
            size = f"{more.mean():+.1%} ({np.abs(more).mean():.1%})"
            print(f"| {name} | {len(rows)} | {kept} | {size} |")


if __name__ == "__main__":
    main()
