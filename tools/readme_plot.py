"""Pictures of README and docs/quality.md: perplexity of real models by the size of the cache.

    python tools/readme_plot.py

Bars are one standard error of the mean over windows, paired with the uncompressed model's. Of
suites-qwen.json only means were stored: its points have no bars.
"""

import json
import math
import statistics
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


def draw(axes: Any, losses: dict[float, Loss], marker: str, label: str, **more: Any) -> None:
    bars = list(zip(*(x.bars for x in losses.values()), strict=True))
    heights = [x.percent for x in losses.values()]
    axes.errorbar(list(losses), heights, bars, fmt=marker, label=label, capsize=2, **more)


def qwen(axes: Any, text: str) -> None:
    rows = rows_of("layouts-qwen2.5-coder-1.5b")
    swift = {x: paired(rows, f"swift {x}x, 4 layouts", text) for x in (4, 5, 6, 8)}
    draw(axes, swift, "o-", "swift (the default)")
    means = stored_means(text)
    for label, (settings, marker) in WITHOUT_BARS.items():
        draw(axes, {x: means[name] for x, name in settings.items()}, marker, label)
    if text == "wiki":
        (fp8, *_) = rows_of("portable-qwen")
        lost = fp8["texts"]["wiki"]
        loss = Loss(lost["lost"], lost["lost_se"])
        draw(axes, {2: loss}, "x", "fp8, as vLLM stores it", color="black")


def smollm2(axes: Any, text: str) -> None:
    rows = rows_of("quality-smollm2-packaged")
    for label, (sizes, marker) in SIZES.items():
        draw(axes, {x: paired(rows, f"{label} {x}x", text) for x in sizes}, marker, label)
    kept = {row["name"]: row["kept_fraction"] for row in rows}
    names = ("KIVI 4 bits", "int4, rotated", "int3, rotated")
    bits = {1 / kept[name]: paired(rows, name, text) for name in names}
    draw(axes, bits, "D", "without maps: KIVI 4 bits, int4, int3")


def figure(plot: Any, path: Path, ticks: list[float], scale: str, **more: Any) -> None:
    """Wikipedia beside Python source."""
    drawn, (wiki, python) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axes, text, title in ((wiki, "wiki", "Wikipedia"), (python, "python", "Python source")):
        plot(axes, text)
        axes.set_xscale("log")
        axes.set_yscale(scale, **more)
        axes.set(xlabel="cache is smaller by a factor of", title=title)
        axes.set_xticks([2, 3, 4, 6, 8, 14], ["2", "3", "4", "6", "8", "14"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    wiki.set_ylabel("increase in perplexity, %")
    wiki.set_yticks(ticks, [f"{x:g}" for x in ticks])
    drawn.legend(*wiki.get_legend_handles_labels(), ncols=3, loc="lower center", fontsize=8)
    drawn.tight_layout(rect=(0, 0.14, 1, 1))
    drawn.savefig(path, metadata={"Date": None})


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "kvfold"
    pictures = ROOT / "docs/quality"
    figure(qwen, pictures / "qwen.svg", [0.01, 0.1, 1, 10, 50], "log")
    # Losses at 2x and 3x may be negative.
    sizes = pictures / "smollm2-sizes.svg"
    figure(smollm2, sizes, [0, 0.1, 1, 10, 100], "symlog", linthresh=0.1)


if __name__ == "__main__":
    main()
