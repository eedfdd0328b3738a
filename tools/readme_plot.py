"""README's picture: a real model's perplexity by how much smaller its cache is, as stored.

python tools/readme_plot.py docs/quality/qwen.svg
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent.parent / "benchmarks/results"
FACTOR_OF_BITS = {"bits-8": 28672 / 14560, "bits-4": 28672 / 7392}
SERIES = {  # label: (settings by factor, marker)
    "swift (the default)": ({4: "default", 5: "swift-5x-speed", 6: "swift-6x-speed"}, "o-"),
    "small (reconstructs keys)": ({x: f"small-{x}x" for x in (4, 6, 8, 10, 14)}, "s-"),
    "lean (reconstructs keys)": ({x: f"lean-{x}x" for x in (4, 6, 8)}, "^-"),
}


def percent(nats: float) -> float:
    """More perplexity, in per cent."""
    return 100 * math.expm1(nats)


def nats_by_setting(text: str) -> dict[str, float]:
    """Of the first checkpoint of a setting that was measured."""
    nats: dict[str, float] = {}
    for row in json.loads((RESULTS / "suites-qwen.json").read_text())["rows"]:
        if row.get("nats"):
            nats.setdefault(row["setting"], row["nats"][text])
    return nats


def draw(axes: Any, text: str) -> None:
    nats = nats_by_setting(text)
    for label, (settings, marker) in SERIES.items():
        axes.plot(
            list(settings), [percent(nats[x]) for x in settings.values()], marker, label=label
        )
    axes.plot(
        list(FACTOR_OF_BITS.values()),
        [percent(nats[x]) for x in FACTOR_OF_BITS],
        "D",
        label="kvfold --bits 8, --bits 4",
    )


def main() -> None:
    (fp8, *_) = json.loads((RESULTS / "portable-qwen.json").read_text())["rows"]
    figure, (wiki, python) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    draw(wiki, "wiki")
    draw(python, "python")
    wiki.plot(
        [2],
        [percent(fp8["texts"]["wiki"]["lost"])],
        "x",
        color="black",
        label="fp8, as vLLM stores it",
    )
    for axes, title in ((wiki, "Wikipedia"), (python, "Python source")):
        axes.set(xscale="log", yscale="log", xlabel="cache is smaller by a factor of", title=title)
        axes.set_xticks([2, 3, 4, 6, 8, 14], ["2", "3", "4", "6", "8", "14"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    wiki.set_ylabel("increase in perplexity, %")
    wiki.set_yticks([0.01, 0.1, 1, 10, 50], ["0.01", "0.1", "1", "10", "50"])
    figure.legend(*wiki.get_legend_handles_labels(), ncols=3, loc="lower center", fontsize=8)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.savefig(sys.argv[1], metadata={"Date": None})


if __name__ == "__main__":
    main()
