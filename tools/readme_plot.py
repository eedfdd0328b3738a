"""Pictures of README and docs/quality.md: perplexity of real models by the size of the cache.

    python tools/readme_plot.py

Bars are one standard error of the mean over windows, paired with the uncompressed model's. Of
suites-qwen.json only means were stored: its points have no bars.
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
FACTOR_OF_BITS = {"bits-8": 28672 / 14560, "bits-4": 28672 / 7392}
WITHOUT_BARS = {  # label: (settings of suites-qwen.json by factor, marker)
    "small (reconstructs keys)": ({x: f"small-{x}x" for x in (4, 6, 8, 10, 14)}, "s-"),
    "lean (reconstructs keys)": ({x: f"lean-{x}x" for x in (4, 6, 8)}, "^-"),
    "kvfold --bits 8, --bits 4": ({y: x for x, y in FACTOR_OF_BITS.items()}, "D"),
}
SIZES = {  # label: (sizes in quality-smollm2-packaged.json, marker)
    "swift": ((2, 3, 4, 5, 6, 8, 10), "o-"),
    "lean": ((2, 3, 4, 5, 6, 8, 10, 14), "^-"),
    "small": ((2, 3, 4, 5, 6, 8, 10, 14), "s-"),
}


class Loss(NamedTuple):
    """Mean and standard error of an increase in cross-entropy, in nats per token."""

    mean: float
    error: float = 0.0

    @property
    def percent(self) -> float:
        """More perplexity, in per cent."""
        return 100 * math.expm1(self.mean)

    @property
    def bars(self) -> tuple[float, float]:
        """What the bars below and above that are long."""
        low, high = (100 * math.expm1(self.mean + x) for x in (-self.error, self.error))
        return self.percent - low, high - self.percent


def rows_of(file: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["rows"]


def paired(rows: list[dict[str, Any]], name: str, text: str) -> Loss:
    """A row's loss over the original, window by window."""
    named = {row["name"]: row["texts"][text]["window_nll"] for row in rows}
    lost = [a - b for a, b in zip(named[name], named["original"], strict=True)]
    return Loss(statistics.mean(lost), statistics.stdev(lost) / math.sqrt(len(lost)))


def stored_means(text: str) -> dict[str, Loss]:
    """Of the first checkpoint of a setting that was measured."""
    found: dict[str, Loss] = {}
    for row in rows_of("suites-qwen"):
        if row.get("nats"):
            found.setdefault(row["setting"], Loss(row["nats"][text]))
    return found


class Series(NamedTuple):
    """Losses by how much smaller the cache is, and how they are drawn."""

    losses: dict[float, Loss]
    marker: str
    color: str | None = None


def qwen(text: str) -> dict[str, Series]:
    rows = rows_of("layouts-qwen2.5-coder-1.5b")
    swift = {x: paired(rows, f"swift {x}x, 4 layouts", text) for x in (4, 5, 6, 8)}
    found = {"swift (the default)": Series(swift, "o-")}
    means = stored_means(text)
    for label, (settings, marker) in WITHOUT_BARS.items():
        found[label] = Series({x: means[name] for x, name in settings.items()}, marker)
    if text == "wiki":
        (fp8, *_) = rows_of("portable-qwen")
        lost = fp8["texts"]["wiki"]
        loss = Loss(lost["lost"], lost["lost_se"])
        found["fp8, as vLLM stores it"] = Series({2: loss}, "x", "black")
    return found


def smollm2(text: str) -> dict[str, Series]:
    rows = rows_of("quality-smollm2-packaged")
    found = {
        label: Series({x: paired(rows, f"{label} {x}x", text) for x in sizes}, marker)
        for label, (sizes, marker) in SIZES.items()
    }
    kept = {row["name"]: row["kept_fraction"] for row in rows}
    names = ("KIVI 4 bits", "int4, rotated", "int3, rotated")
    bits = {1 / kept[name]: paired(rows, name, text) for name in names}
    return {**found, "without maps: KIVI 4 bits, int4, int3": Series(bits, "D")}


class Picture(NamedTuple):
    """What a picture shows, and its vertical axis."""

    series: Callable[[str], dict[str, Series]]
    ticks: list[float]
    scale: dict[str, Any]

    def numbers(self) -> str:
        """All that is drawn, which the file keeps as its description."""
        drawn = [
            f"{text} {label}: "
            + ", ".join(f"{x:.2f}x {y.percent:.3f}" for x, y in series.losses.items())
            for text in TEXTS
            for label, series in self.series(text).items()
        ]
        return "; ".join(drawn)


TEXTS = {"wiki": "Wikipedia", "python": "Python source"}
PICTURES = {  # by the name of the file in docs/quality
    "qwen": Picture(qwen, [0.01, 0.1, 1, 10, 50], {"value": "log"}),
    # Losses at 2x and 3x may be negative.
    "smollm2-sizes": Picture(smollm2, [0, 0.1, 1, 10, 100], {"value": "symlog", "linthresh": 0.1}),
}


def draw(picture: Picture, path: Path) -> None:
    """Wikipedia beside Python source."""
    figure, (wiki, python) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axes, (text, title) in zip((wiki, python), TEXTS.items(), strict=True):
        for label, (losses, marker, color) in picture.series(text).items():
            bars = list(zip(*(x.bars for x in losses.values()), strict=True))
            heights = [x.percent for x in losses.values()]
            axes.errorbar(
                list(losses), heights, bars, fmt=marker, label=label, color=color, capsize=2
            )
        axes.set_xscale("log")
        axes.set_yscale(**picture.scale)
        axes.set(xlabel="cache is smaller by a factor of", title=title)
        axes.set_xticks([2, 3, 4, 6, 8, 14], ["2", "3", "4", "6", "8", "14"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    wiki.set_ylabel("increase in perplexity, %")
    wiki.set_yticks(picture.ticks, [f"{x:g}" for x in picture.ticks])
    figure.legend(*wiki.get_legend_handles_labels(), ncols=3, loc="lower center", fontsize=8)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.savefig(path, metadata={"Date": None, "Description": picture.numbers()})


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "kvfold"
    for name, picture in PICTURES.items():
        draw(picture, ROOT / f"docs/quality/{name}.svg")


if __name__ == "__main__":
    main()
