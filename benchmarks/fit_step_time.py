"""Coefficients of predicted step times, src/kvfold/data/step_time.json: least squares of relative
errors over what `kvfold bench` measured.

    python benchmarks/fit_step_time.py

Reads benchmarks/results/*.json. Prints, for docs/lab/speed-engine.md, how far off predictions are:
of every time by coefficients that were fitted without it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LinearRegression
from transformers import LlamaConfig

from kvfold.bench.synthetic_engine import WIDTHS
from kvfold.bench.variants import SHAPES, Variant, variant_layout
from kvfold.compression.planning.step_time import DEFAULT, Coefficients, attention_work
from kvfold.models.size import step_bytes
from kvfold.ops.decode import two_passes
from lab.variants import VARIANTS, is_served

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLE = ROOT / "src" / "kvfold" / "data" / "step_time.json"
WAITED = ("waited", "waited_sequence")
STEP = ("layer", "sequence", "runs", "rebuilt_runs", "rebuilt_runs_16", "beside", *WAITED)
# rebuilt_runs is fitted to `small` alone, not to `lean` in two passes.
ESTIMATED = ("unpacked", "runs_16", "rebuilt_runs", "rebuilt_runs_16")
MEASURED = (
    "launch", "stored", "rebuilt", "codes", "products", "wide",
    "whole", "whole_runs", "even_runs", "whole_rebuilt",
)  # fmt: skip
ONE_PASS = 32768  # rows from which on one pass read them when these were timed
# Results from before rows were read in one pass. Keys are reconstructed faster since.
TWO_PASSES = "decode-2-passes-8b.json"
# Results of engines that launch a step before they read the tokens of the one in front; in all
# others a step waited for the host, so much that it is fitted and then left out.
AHEAD = (
    "decode-tiers-once-8b.json", "decode-tiers-8b.json", "decode-8b-8192.json",
    "rebuilt-decode-7b.json", "decode-256-8b.json", "ablations-first-8b.json",
    "ablations-decode-8b.json",
)  # fmt: skip
# Latents that heads share, without RoPE: 2.6 times what their bytes take, by no work counted here.
UNFITTED = {"shared-llama-2-7b-norope.json"}
# Ablations without a device, and rebuilt pieces, which are fitted to steps (`rebuilt_runs`).
UNFITTED |= {"ablations-uneven-cost-8b.json", "small-attention-8b.json"}

# Without a file of results (docs/lab/speed-aims.md), on llama-3.1-8b and 64 sequences of 8192, a
# layer in microseconds: `lean` in 4 bits, and rows in one pass.
SEEN = replace(VARIANTS["lean-31"], bits=4), 314.0
ONCE = {"swift-4x": 178.0, "swift-5x": 193.0, "swift-5.9x-odd": 147.0, "swift-5.5x-odd": 169.0}
Work = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A time in microseconds, the work it is fitted to, and what of it is known without."""

    name: str
    us: float
    work: Work
    known: float = 0.0

    def predicted(self, found: Work) -> float:
        return self.known + sum(found[x] * self.work.get(x, 0.0) for x in found)


def reports(benchmark: str) -> list[dict[str, Any]]:
    """once: whether the kernel that reads rows in one pass was there; ahead: as AHEAD says."""
    each = {path.name: json.loads(path.read_text("utf-8")) for path in RESULTS.glob("*.json")}
    found = [
        each[name] | {"once": name != TWO_PASSES, "ahead": name in AHEAD}
        for name in sorted(each)
        if name not in UNFITTED
    ]
    return [x for x in found if x.get("benchmark") == benchmark]


def noted() -> dict[str, Any]:
    """A report of ONCE."""
    shape = {"kind": "variant", "shape": "llama-3.1-8b", "batch": 64, "tokens": 8192}
    rows = [{"variant": name, "us": us, **shape} for name, us in ONCE.items()]
    return {"rows": rows, "once": True, "ahead": True}


def work_of(shape: str, variant: Variant, rows: int, read: float, once: bool = True) -> Work:
    """Of one layer."""
    geometry, layout = SHAPES[shape], variant_layout(SHAPES[shape], variant, 1)
    once = once and rows >= ONE_PASS and two_passes(layout, geometry.queries_per_kv) is None
    return attention_work(layout.spec.layers[0], layout.groups, geometry, rows, read, once)


def attention_points(found: Sequence[dict[str, Any]], read: float) -> list[Point]:
    """Kernels as they are served, over sequences of equal length."""
    points = []
    for row, once, _ in _rows(found):
        if row["kind"] == "variant" and is_served(variant := VARIANTS[row["variant"]]):
            work = work_of(row["shape"], variant, row["batch"] * row["tokens"], read, once)
            points.append(Point(name=_name(row), us=row["us"], work=work))
    return points


def step_points(found: Sequence[dict[str, Any]], base: Coefficients) -> list[Point]:
    """Engine steps on kernels. known: reading weights, and attention but for what STEP names."""
    points = []
    for row, once, ahead in _rows(found):
        if row["variant"] not in VARIANTS or not row["graph"]:
            continue
        variant, shape, batch = VARIANTS[row["variant"]], row["shape"], row["batch"]
        if variant.rebuilt and not once:  # by the kernels of before
            continue
        layers = SHAPES[shape].num_layers
        attention = work_of(shape, variant, batch * row["tokens"], base.read, once)
        fitted = {name: layers * attention.pop(name, 0.0) for name in STEP}
        each = base.attention_us(attention)
        weights = step_bytes(_config(shape), variant_layout(SHAPES[shape], variant).spec)
        known = base.step_us(weights, layers * each, layers, batch)
        work = fitted | {"layer": layers, "sequence": batch}
        work |= dict.fromkeys(WAITED, 0.0) if ahead else dict(zip(WAITED, (1, batch), strict=True))
        points.append(Point(name=_name(row), us=1e3 * row["ms"], work=work, known=known))
    return points


def _rows(found: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], bool, bool]]:
    """With `once` and `ahead` of their reports."""
    return ((row, report["once"], report["ahead"]) for report in found for row in report["rows"])


def _name(row: dict[str, Any]) -> str:
    return f"{row['variant']}, {row['shape']}, {row['batch']} x {row['tokens']}"


def _config(shape: str) -> LlamaConfig:
    (width, mlp, vocabulary), geometry = WIDTHS[shape], SHAPES[shape]
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=mlp,
        vocab_size=vocabulary,
        num_hidden_layers=geometry.num_layers,
        num_attention_heads=geometry.num_query_heads,
        num_key_value_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
    )


def fit(names: Sequence[str], points: Sequence[Point]) -> Work:
    """Coefficients, none below 0, for the least squared relative error."""
    us = np.array([x.us for x in points])
    work = np.array([[x.work.get(name, 0.0) for name in names] for x in points])
    model = LinearRegression(positive=True, fit_intercept=False)
    model.fit(work / us[:, None], 1 - np.array([x.known for x in points]) / us)
    return {name: float(f"{x:.4g}") for name, x in zip(names, model.coef_, strict=True)}


def print_errors(title: str, names: Sequence[str], points: Sequence[Point]) -> None:
    """Of every time by a fit to all others."""
    errors = []
    for i, x in enumerate(points):
        errors.append(x.predicted(fit(names, [*points[:i], *points[i + 1 :]])) / x.us - 1)
    mean, worst = (100 * f(np.abs(errors)) for f in (np.mean, np.max))
    print(f"{title}: {len(points)} times, off by {mean:.1f} % in the mean, {worst:.0f} % at worst")
    for x, error in zip(points, errors, strict=True):
        print(f"  {x.name:42} {x.us:9.1f} us {100 * error:+6.1f} %")


def coefficients(device: str) -> Coefficients:
    """Of a device; prints the errors."""
    attention, decode = (
        [x for x in reports(kind) if x["versions"]["device"] == device]
        for kind in ("attention", "decode")
    )
    read = float(np.median([x["ceiling"]["read_tb_per_s"] for x in attention]).round(3))
    points = attention_points([*attention, noted()], read)
    print_errors(f"{device}, attention, a layer", MEASURED, points)
    found = fit(MEASURED, points)
    variant, us = SEEN
    work = work_of("llama-3.1-8b", variant, 64 * 8192, read)
    known = sum(found[x] * work.get(x, 0.0) for x in found)
    seen = Point(name="lean-31, 4 bits", us=us, work=work, known=known)
    found |= fit(["unpacked"], [seen])
    base = Coefficients(read=read, attention=found, estimated=ESTIMATED, layer=0.0, sequence=0.0)
    steps = step_points(decode, base)
    print_errors(f"{device}, engine, a step", STEP, steps)
    fitted = fit(STEP, steps)
    waited, each = (fitted.pop(name) for name in WAITED)
    print(
        f"steps not launched ahead waited {waited:.0f} us for the host, and {each:.0f} a sequence"
    )
    names = "runs", "rebuilt_runs", "rebuilt_runs_16", "beside"
    runs = {name: fitted.pop(name) for name in names}
    runs["runs_16"] = runs["runs"]  # never timed: as of fewer bits
    return replace(base, attention={**found, **runs}, **dict[str, Any](fitted))


def main() -> None:
    made = {DEFAULT: vars(coefficients(DEFAULT))}  # of other devices nothing is measured yet
    TABLE.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {TABLE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
