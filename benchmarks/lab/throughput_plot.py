"""Draws throughput by rate of compression and by prompt length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvfold.bench.serve_plots import COLORS, MARKERS


def write_throughput(path: Path, rows: Sequence[Any]) -> None:
    """Throughput and the largest decode batch by rate of compression (KV-Compress Figs. 1b, 7), and
    throughput by prompt length (Fig. 8); means over runs. rows: `serve_throughput.Row`s."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = (
        ("rate", "tokens", "tokens_per_s", "generated tokens/s"),
        ("rate", "tokens", "largest_batch", "largest decode batch"),
        ("tokens", "rate", "tokens_per_s", "generated tokens/s"),
    )
    for axis, (x, line, y, label) in zip(figure.subplots(1, 3), panels, strict=True):
        for i, value in enumerate(sorted({getattr(row, line) for row in rows})):
            points: dict[float, list[float]] = {}
            for row in rows:
                if getattr(row, line) == value:
                    points.setdefault(getattr(row, x), []).append(getattr(row, y))
            xs = sorted(points)
            means = [sum(points[at]) / len(points[at]) for at in xs]
            style = {"color": COLORS[i % 7], "marker": MARKERS[i % 7], "markersize": 4}
            name = f"{value} tokens" if line == "tokens" else f"rate {value:g}"
            axis.plot(xs, means, label=name, **style)
        if x == "rate":
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda at, _: f"{at:g}")
        xlabel = "rate of compression" if x == "rate" else "tokens of a prompt"
        axis.set(xlabel=xlabel, ylabel=label, ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=7)
    figure.savefig(path)
