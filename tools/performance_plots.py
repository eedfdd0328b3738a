"""Figures of docs/lab/timings-*.md. Each takes rows of the benchmarks' `--json`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

COLORS = ("#0072b2", "#d55e00", "#009e73", "#a0468a", "#c98a00", "#3f9fd8", "#6b7280")
MARKERS = "osD^vP*"
INK, FAINT = "#1b1f24", "#d9dee4"
Row = dict[str, Any]


def speedup_figure(rows: Sequence[Row]) -> Any:
    """Speed-up against B x T of what was timed at several: a point a case, a line through their
    median at every B x T."""
    figure, (axes,) = _figure(7.2, 4.2)
    compared = [row for row in rows if row["kind"] == "variant" and row["speedup_vs_fastest"]]
    compared = _at_several(compared, lambda row: row["batch"] * row["tokens"])
    for i, name in enumerate(_names(compared)):
        points: dict[int, list[float]] = {}
        for row in compared:
            if row["variant"] == name:
                size = row["batch"] * row["tokens"]
                points.setdefault(size, []).append(row["speedup_vs_fastest"])
        sizes = sorted(points)
        middle = [sorted(points[size])[len(points[size]) // 2] for size in sizes]
        axes.plot(sizes, middle, label=name, **_line(i))
        pairs = [(size, value) for size in sizes for value in points[size]]
        axes.scatter(*zip(*pairs, strict=True), s=9, alpha=0.5, color=_line(i)["color"])
    axes.axhline(1, color=INK, linewidth=0.8)
    _double(axes, "cached tokens of the batch, B x T", "speed-up over fastest baseline")
    if compared:
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def ceiling_figure(rows: Sequence[Row]) -> Any:
    """Share of the read ceiling: a faint point a case, a full one for the largest."""
    names = _names(rows)
    figure, (axes,) = _figure(7.2, 0.9 + 0.27 * len(names))
    for y, name in enumerate(names):
        mine = [row for row in rows if row["variant"] == name]
        largest = max(mine, key=lambda row: row["batch"] * row["tokens"])
        color = COLORS[0] if largest["kind"] == "variant" else COLORS[-1]
        every = [row["ceiling_fraction"] for row in mine]
        axes.scatter(every, [y] * len(every), s=14, color=color, alpha=0.35)
        axes.scatter(largest["ceiling_fraction"], y, s=42, color=color)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.set_xlabel("bytes per second over the read ceiling; full points: the largest B x T")
    return figure


def rank_figure(rows: Sequence[Row]) -> Any:
    """Time of attention over rebuilt keys against their rank, with the rate of the arithmetic that
    rebuilds them."""
    figure, (axes,) = _figure(7.2, 3.6)
    for i, case in enumerate(dict.fromkeys((row["batch"], row["tokens"]) for row in rows)):
        mine = [row for row in rows if (row["batch"], row["tokens"]) == case]
        ranks, times = [row["rank"] for row in mine], [row["us"] for row in mine]
        look = _line(i) | {"linestyle": "", "label": f"{case[0]} x {case[1]}"}
        axes.plot(ranks, times, **look)
        for row in mine:
            text = f"{row['variant']}, {row['tflops']:.0f} TFLOP/s"
            at = {"xytext": (6, -3), "textcoords": "offset points", "fontsize": 7, "color": INK}
            axes.annotate(text, (row["rank"], row["us"]), **at)
    _double(axes, "numbers that a key is rebuilt from", "us a layer")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.margins(x=0.25)
    axes.legend(frameon=False, fontsize=8, title="B x T", title_fontsize=8)
    return figure


def step_figure(rows: Sequence[Row]) -> Any:
    """Milliseconds a step: against tokens, a panel a batch, of what was timed at several lengths;
    bars where there is one."""
    if len({row["tokens"] for row in rows}) == 1:
        return _bars(rows)
    rows = _at_several(rows, lambda row: row["tokens"])
    batches = sorted({row["batch"] for row in rows})
    figure, panels = _figure(3.4 * max(2, len(batches)), 3.8, len(batches))
    for axes, batch in zip(panels, batches, strict=True):
        for i, name in enumerate(_names(rows)):
            mine = [row for row in rows if (row["variant"], row["batch"]) == (name, batch)]
            points = sorted((row["tokens"], row["ms"]) for row in mine)
            axes.plot(*zip(*points, strict=True) if points else ([], []), label=name, **_line(i))
        _double(axes, "tokens of a sequence", "ms a step" if axes is panels[0] else "")
        axes.set_title(f"B = {batch}", fontsize=9, color=INK)
    panels[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _bars(rows: Sequence[Row]) -> Any:
    figure, (axes,) = _figure(7.2, 0.9 + 0.32 * len(rows))
    labels = [f"{row['variant']}, {row['batch']} x {row['tokens']}" for row in rows]
    theirs = [row["variant"].startswith("transformers") for row in rows]
    colors = [COLORS[-1] if their else COLORS[0] for their in theirs]
    bars = axes.barh(labels, [row["ms"] for row in rows], color=colors, height=0.6)
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8, color=INK)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step")
    return figure


def _at_several(rows: Sequence[Row], size: Callable[[Row], int]) -> list[Row]:
    """Those of variants that were timed at more than one size; all, where none was."""
    sizes: dict[str, set[int]] = {}
    for row in rows:
        sizes.setdefault(row["variant"], set()).add(size(row))
    return [row for row in rows if len(sizes[row["variant"]]) > 1] or list(rows)


def save(figure: Any, path: Path) -> None:
    """The same bytes for the same figure."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["variant"] for row in rows))


def _line(i: int) -> dict[str, Any]:
    """How line number i looks."""
    return {
        "color": COLORS[i % len(COLORS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": ("-", "--", ":")[i // len(COLORS) % 3],
        "linewidth": 1.4,
        "markersize": 5,
    }


def _double(axes: Any, x: str, y: str) -> None:
    """Both axes by powers of two."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}K")
    axes.set(xlabel=x, ylabel=y)


def _figure(width: float, height: float, panels: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    found = list(figure.subplots(1, panels, squeeze=False, sharey=True)[0])
    for axes in found:
        axes.set_axisbelow(True)
        axes.grid(color=FAINT, linewidth=0.6)
        axes.spines[:].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9, length=0, which="both")
    return figure, found


FIGURES: dict[str, Callable[[Sequence[Row]], Any]] = {
    "speedup": speedup_figure,
    "ceiling": ceiling_figure,
    "rank": rank_figure,
    "steps": step_figure,
}
