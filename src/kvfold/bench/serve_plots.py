"""Plots load tests from their JSON: normalised latency against rate (ZACK Fig. 15, ZDC Fig. 21),
time to the first token and between tokens, requests answered."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLORS = ("#0072b2", "#d55e00", "#009e73", "#a0468a", "#c98a00", "#3f9fd8", "#6b7280")
MARKERS = "osD^vP*"
Report = Mapping[str, Any]


def check_installed() -> None:
    """Raises ValueError if Matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError('a plot needs Matplotlib: pip install "kvfold[load]"') from None


LABELS = {"offered_per_s": "requests offered a second", "agents": "agents"}


def write_figure(path: Path, reports: Sequence[Report], x: str = "offered_per_s") -> None:
    """Write a figure with one curve per report and panel over the field `x` of rows, a key of
    LABELS, as .svg, .png or .pdf. Rows without it are not drawn."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 6.4), layout="constrained")
    axes = figure.subplots(2, 2)
    first = ("normalised latency, ms/token", "normalised_ms", "mean")
    if x == "agents":
        first = ("TPOT, ms (p99 dashed)", "tpot_ms", "p50")
    panels = (
        first,
        ("TTFT, ms (p99 dashed)", "ttft_ms", "p50"),
        ("TBT, ms (p99 dashed)", "tbt_ms", "p50"),
        ("requests answered a second", "requests_per_s", None),
    )
    for axis, (label, name, key) in zip(axes.flat, panels, strict=True):
        for i, report in enumerate(reports):
            _draw(axis, report, i, name, key, x)
        axis.set(xlabel=LABELS[x], ylabel=label, ylim=(0, None), xlim=(0, None))
        if x == "agents":
            axis.xaxis.get_major_locator().set_params(integer=True)
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


def _draw(axis: Any, report: Report, number: int, name: str, key: str | None, x: str) -> None:
    rows = [y for y in report["rows"] if y[x] is not None and y.get(name) is not None]
    rows.sort(key=lambda row: row[x])
    rates = [row[x] for row in rows]
    style = {"color": COLORS[number % 7], "marker": MARKERS[number % 7], "markersize": 4}
    values = [row[name] if key is None else row[name][key] for row in rows]
    axis.plot(rates, values, label=report["settings"]["label"], **style)
    if key == "p50":
        axis.plot(rates, [row[name]["p99"] for row in rows], linestyle="--", linewidth=0.8, **style)
    elif name == "requests_per_s" and "goodput_per_s" in (rows or [{}])[0]:
        goodput = [row["goodput_per_s"] for row in rows]
        label = "goodput"
        axis.plot(rates, goodput, linestyle=":", linewidth=1, label=label, **style)
        axis.legend(frameon=False, fontsize=8)
