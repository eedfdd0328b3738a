"""Pictures of README and docs/quality.md, in docs/quality: real models by the size of the cache.

    python tools/quality_plots.py

Bars are one standard error: of a loss the error of its mean over windows, paired with the
uncompressed model's; of answers that of a count. Of perplexity-qwen.json only means were stored:
its points have no bars.
"""

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
TEXTS = {"wiki": "Wikipedia", "python": "Python source"}
FACTOR_OF_BITS = {"bits-8": 28672 / 14560, "bits-4": 28672 / 7392}
WITHOUT_BARS: dict[
    str, tuple[dict[float, str], str]
] = {  # label: (settings of perplexity-qwen.json by factor, marker)
    "swift (the default)": ({4: "default", 5: "swift-5x-speed", 6: "swift-6x-speed"}, "o-"),
    "small (reconstructs keys)": ({x: f"small-{x}x" for x in (4, 6, 8, 10, 14)}, "s-"),
    "lean (reconstructs keys)": ({x: f"lean-{x}x" for x in (4, 6, 8)}, "^-"),
    "kvfold --bits 8, --bits 4": ({y: x for x, y in FACTOR_OF_BITS.items()}, "D"),
}
SIZES = {  # label: (sizes in quality-smollm2-packaged.json, marker)
    "swift": ((2, 3, 4, 5, 6, 8, 10), "o-"),
    "lean": ((2, 3, 4, 5, 6, 8, 10, 14), "^-"),
    "small": ((2, 3, 4, 5, 6, 8, 10, 14), "s-"),
}
POLICIES = ("kvzip", "kvzip-keys", "learned", "expected-attention", "kv-compress")
SHARES = (0.5, 0.25, 0.125, 0.0625)

Row = dict[str, Any]


class Point(NamedTuple):
    """A height, and how long the bars below and above it are."""

    height: float
    below: float = 0.0
    above: float = 0.0


class Series(NamedTuple):
    """Points by their place on the horizontal axis, and how they are drawn."""

    points: dict[float, Point]
    marker: str
    color: str | None = None


class Panel(NamedTuple):
    """Series by label, and the panel's axes."""

    title: str
    series: dict[str, Series]
    axes: dict[str, Any]  # `Axes.set`'s arguments


def increase(mean: float, error: float = 0.0) -> Point:
    """The increase in perplexity (%) that an increase in cross-entropy (nats/token) is."""
    low, middle, high = (100 * math.expm1(mean + x) for x in (-error, 0, error))
    return Point(middle, middle - low, high - middle)


def paired(row: Row, original: Row, text: str) -> Point:
    """A row's loss over the original's, window by window."""
    windows = (x["texts"][text]["window_nll"] for x in (row, original))
    lost = [a - b for a, b in zip(*windows, strict=True)]
    return increase(statistics.mean(lost), statistics.stdev(lost) / math.sqrt(len(lost)))


def counted(right: int, asked: int) -> Point:
    """Right answers and the standard error of their number."""
    error = math.sqrt(right * (asked - right) / asked)
    return Point(right, error, error)


def rows_of(file: str) -> list[Row]:
    return json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["rows"]


def by_name(file: str) -> dict[str, Row]:
    return {row["name"]: row for row in rows_of(file)}


def stored_means(text: str) -> dict[str, Point]:
    return {x["setting"]: increase(x["nats"][text]) for x in rows_of("perplexity-qwen")}


def by_size(title: str, series: dict[str, Series], scale: str) -> Panel:
    sizes = [2, 3, 4, 6, 8, 14]
    ticks = {"xscale": "log", "xticks": sizes, "xticklabels": [f"{x}" for x in sizes]}
    axes = {"xlabel": "cache is smaller by a factor of", "yscale": scale, **ticks}
    return Panel(title, series, axes)


def qwen() -> list[Panel]:
    def panel(text: str, title: str) -> Panel:
        means = stored_means(text)
        series = {
            label: Series({x: means[name] for x, name in settings.items()}, marker)
            for label, (settings, marker) in WITHOUT_BARS.items()
        }
        if text == "wiki":
            lost = by_name("portable-qwen")["fp8"]["texts"]["wiki"]
            fp8 = {2.0: increase(lost["lost"], lost["lost_se"])}
            series["fp8, as vLLM stores it"] = Series(fp8, "x", "black")
        return by_size(title, series, "log")

    return [panel(*x) for x in TEXTS.items()]


def smollm2() -> list[Panel]:
    def panel(text: str, title: str) -> Panel:
        rows = by_name("quality-smollm2-packaged")

        def point(name: str) -> Point:
            return paired(rows[name], rows["original"], text)

        series = {
            label: Series({x: point(f"{label} {x}x") for x in sizes}, marker)
            for label, (sizes, marker) in SIZES.items()
        }
        names = ("KIVI 4 bits", "int4, rotated", "int3, rotated")
        bits = {1 / rows[name]["kept_fraction"]: point(name) for name in names}
        series["without maps: KIVI 4 bits, int4, int3"] = Series(bits, "D")
        return by_size(title, series, "symlog")  # losses at 2x and 3x may be negative

    return [panel(*x) for x in TEXTS.items()]


def evicted() -> list[Panel]:
    rows = by_name("asked-smollm2")
    original = rows["original"]

    def panel(title: str, ylabel: str, point: Callable[[Row], Point], **more: Any) -> Panel:
        series = {
            policy: Series({x: point(rows[f"{policy} {x:g}"]) for x in SHARES}, marker)
            for policy, marker in zip(POLICIES, ("o-", "s-", "^-", "v-", "D-"), strict=True)
        }
        shares = {"xscale": "log", "xticks": SHARES, "xticklabels": ["1/2", "1/4", "1/8", "1/16"]}
        axes = {"xlabel": "share of the tokens kept", "ylabel": ylabel, **shares, **more}
        return Panel(title, series, axes)

    def right(row: Row) -> Point:
        return counted(*(row["answers"]["keys"][x] for x in ("right", "asked")))

    def lost(row: Row) -> Point:
        return paired(row, original, "wiki-heldout")

    facts = panel("Hidden facts", "right answers of 100", right, ylim=(-3, 103))
    every = Series({x: right(original) for x in SHARES}, "--", "black")
    facts.series["nothing evicted"] = every
    return [facts, panel("Text that follows, Wikipedia", "increase in perplexity, %", lost)]


PICTURES = {  # by the name of the file: panels and ticks of the first one's vertical axis
    "qwen": (qwen, [0.01, 0.1, 1, 10, 50]),
    "smollm2-sizes": (smollm2, [0, 0.1, 1, 10, 100]),
    "eviction-smollm2": (evicted, None),
}


def numbers(name: str) -> str:
    """All that a picture shows, which its file keeps as a description."""
    shown = (
        f"{panel.title}, {label}: "
        + ", ".join(f"{x:.2f} {y.height:.3f}" for x, y in series.points.items())
        for panel in PICTURES[name][0]()
        for label, series in panel.series.items()
    )
    return "; ".join(shown)


def draw(name: str, path: Path) -> None:
    """Two panels beside each other."""
    panels, ticks = PICTURES[name]
    figure, places = plt.subplots(1, 2, figsize=(9, 3.4), sharey=ticks is not None)
    for axes, panel in zip(places, panels(), strict=True):
        for label, (points, marker, color) in panel.series.items():
            heights, *bars = zip(*points.values(), strict=True)
            look = {"fmt": marker, "color": color, "capsize": 2}
            axes.errorbar(list(points), heights, bars, label=label, **look)
        if panel.axes.get("yscale") == "symlog":
            axes.set_yscale("symlog", linthresh=0.1)
        axes.set(title=panel.title, **{k: v for k, v in panel.axes.items() if v != "symlog"})
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    if ticks:
        places[0].set_ylabel("increase in perplexity, %")
        places[0].set_yticks(ticks, [f"{x:g}" for x in ticks])
    figure.legend(*places[0].get_legend_handles_labels(), ncols=3, loc="lower center", fontsize=8)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.savefig(path, metadata={"Date": None, "Description": numbers(name)})


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "kvfold"
    for name in PICTURES:
        draw(name, ROOT / f"docs/quality/{name}.svg")


if __name__ == "__main__":
    main()
