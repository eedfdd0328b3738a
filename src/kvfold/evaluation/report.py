"""Writes a self-contained HTML report: numbers, figures and generated text.

Figures are SVG inside the page. Matplotlib draws them in placeholder colours, which become CSS
variables here, so that a figure follows the reader's light or dark mode.
"""

from __future__ import annotations

import difflib
import io
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.evaluation import compare
from kvfold.evaluation.compare import Row
from kvfold.utils.files import write_text, writing
from kvfold.utils.text import packaged

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Spectra = Mapping[str, Sequence[Sequence[float]]]

_INK, _MUTED, _LINE, _PAPER = "#010101", "#010102", "#010103", "#010104"
_SERIES = tuple(f"#0202{i:02x}" for i in range(7))
_STEPS = tuple(f"#0303{i:02x}" for i in range(10))
_VARIABLES = (
    {_INK: "ink", _MUTED: "muted", _LINE: "line", _PAPER: "paper"}
    | {color: f"s{i}" for i, color in enumerate(_SERIES)}
    | {color: f"h{i}" for i, color in enumerate(_STEPS)}
)
_MARKERS = "osD^vPX"
_MAX_LABELLED_CELLS = 400
_LABEL = 0.245  # inches of a figure that a line's name takes
_FLOOR = 0.1  # per cent of perplexity: smaller increases are drawn there


@dataclass(frozen=True, kw_only=True)
class RankMap:
    """The kept ranks of all layers: `ranks[row][layer]`, None if a layer has no such group.

    labels_y, widths: the label and the full rank of each row. parts: "keys" or "values" of each
    row; rows of one part share a panel. Empty: all rows share one.
    """

    labels_y: Sequence[str]
    ranks: Sequence[Sequence[int | None]]
    widths: Sequence[int]
    parts: Sequence[str] = ()


def check_installed() -> None:
    """Raise ValueError if the packages that a report needs are missing."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        hint = 'pip install "kvfold[report]"'
        raise ValueError(f"report: {error.name} is not installed; run: {hint}") from None


def write_report(
    path: str | Path,
    *,
    title: str,
    summary: Sequence[tuple[str, str]],
    rows: Sequence[Row],
    ranks: RankMap | None,
    intro: str = "",
    baseline: str = "original",
    conditions: str = "",
    spectra: Spectra | None = None,
    sizes: Sequence[Row] = (),
    prompt: str = "",
    examples: Sequence[tuple[str, str]] = (),
    frontier: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the report to `path`; its folder is created if it is missing.

    summary: headlines as (label, lines), the first line large. baseline: the row that losses are
    paired with. conditions: sentences on what was scored and how, under the table. sizes: rows for
    the figures alone. examples: texts that were generated after `prompt`, as (title, text); their
    differences from the first are marked. spectra: by part ("keys"), a descending sequence per
    layer, of which each is divided by its first value. frontier: the best rows with the `command`
    of each; one of them is the `knee`. Raises ValueError if matplotlib or jinja2 is missing or
    `ranks` is ragged.
    """
    check_installed()
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    page = environment.from_string(packaged("report.html"))
    html = page.render(
        title=title,
        intro=intro,
        baseline=baseline,
        conditions=conditions,
        summary=summary,
        rows=rows,
        compare=compare,
        texts=compare.texts(rows),
        lengths=compare.needle_lengths(rows),
        scores=compare.task_scores(rows),
        losses=[
            _loss_figure([*rows, *sizes], name, frontier)
            for name in compare.texts(rows)
            if _points(rows, name)
        ],
        steps=[_step_figure(rows, name) for name in compare.texts(rows) if _times(rows, name)],
        floor=_FLOOR,
        frontier=frontier,
        ranks=_rank_figures(ranks) if ranks else [],
        spectra=[_spectrum_figure(name, curves) for name, curves in (spectra or {}).items()],
        prompt=prompt,
        examples=[(name, _compared(examples[0][1], text)) for name, text in examples],
        css=_css(),
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with writing(Path(path)):
        write_text(Path(path), html)


def _compared(original: str, text: str) -> list[tuple[str, bool]]:
    """Split `text` into pieces of words, each with whether `original` lacks it."""
    words = re.findall(r"\s*\S+", text)
    matcher = difflib.SequenceMatcher(None, original.split(), text.split(), autojunk=False)
    steps = matcher.get_opcodes()
    return [("".join(words[i:j]), kind != "equal") for kind, _, _, i, j in steps if i < j]


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Create a figure of this size in inches, with empty axes in the style of all figures."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    axes.patch.set_visible(False)
    figure.patch.set_visible(False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_LINE)
    axes.tick_params(colors=_MUTED, labelsize=9, length=0, which="both")
    axes.xaxis.label.set(color=_MUTED, size=9)
    axes.yaxis.label.set(color=_MUTED, size=9)
    return figure, axes


def _svg(figure: Figure, name: str) -> dict[str, Any]:
    """Convert a figure to inline SVG markup, with its caption and its width in CSS pixels."""
    import matplotlib
    from markupsafe import Markup

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()[out.getvalue().index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (xmlns(:xlink)?|width|height)="[^"]*"', "", svg, count=4)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"#0[123]0[123][0-9a-f]{2}", lambda hit: f"var(--{_VARIABLES[hit[0]]})", svg)
    width = figure.get_figwidth()
    # A wide figure takes the full width and scrolls on a phone, so that its text stays legible.
    wide = width > 6
    style = f"min-width:{80 * width * wide:.0f}px;max-width:{112 * width:.0f}px"
    return {"svg": Markup(svg), "name": name, "style": style, "wide": wide}


Lines = dict[str, list[tuple[float, float, float]]]


def _points(rows: Sequence[Row], text: str) -> Lines:
    """For each recipe, points (kept fraction, per cent more perplexity, standard error) on `text`,
    by ascending kept fraction."""
    return _lines(((row, row.kept_fraction) for row in rows), text)


def _times(rows: Sequence[Row], text: str) -> Lines:
    """The same against the predicted milliseconds of a decode step, of rows that have them."""
    return _lines(((row, row.step_ms) for row in rows if row.step_ms is not None), text)


def _lines(places: Iterable[tuple[Row, float]], text: str) -> Lines:
    lines: Lines = {}
    for row, place in places:
        delta = row.delta_nll.get(text, (math.nan, math.nan))
        if math.isfinite(delta[0]):
            point = (place, *compare.perplexity_increase(delta))
            lines.setdefault(row.recipe, []).append(point)
    return {recipe: sorted(points) for recipe, points in lines.items()}


def _loss_figure(
    rows: Sequence[Row], text: str, frontier: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Draw the perplexity increase against the kept fraction, a line per recipe. Increases below
    _FLOOR are drawn there; the knee of a frontier is a dotted line."""
    figure, axes = _loss_axes(rows, text, _points(rows, text), "kept fraction of the cache")
    for point in frontier:
        if point["knee"]:
            axes.axvline(1 / point["times"], color=_MUTED, linestyle=":", linewidth=1)
    return _svg(figure, text)


def _step_figure(rows: Sequence[Row], text: str) -> dict[str, Any]:
    """Draw the perplexity increase against the predicted time of a decode step. A dotted line is
    the original's time."""
    figure, axes = _loss_axes(rows, text, _times(rows, text), "predicted ms of a decode step")
    if (whole := rows[0].step_ms) is not None:
        axes.axvline(whole, color=_MUTED, linestyle=":", linewidth=1)
    return _svg(figure, text)


def _loss_axes(rows: Sequence[Row], text: str, lines: Lines, label: str) -> tuple[Any, Axes]:
    """Draw perplexity increases, a line per recipe; colours follow the order of `rows`."""
    height = max(3.7, _LABEL * len(lines))
    figure, axes = _figure(4.6, height)
    order = list(dict.fromkeys(row.recipe for row in rows if row.delta_nll))
    most = max(mean for points in lines.values() for _, mean, _ in points)
    axes.set_yscale("log")
    axes.set_ylim(_FLOOR / 1.25, max(most, 10 * _FLOOR) * 1.6)
    axes.grid(axis="y", color=_LINE, linewidth=0.6)
    axes.locator_params(axis="x", nbins=5)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.yaxis.set_minor_formatter("")
    axes.set(xlabel=label, ylabel="more perplexity than the original")
    for recipe, points in lines.items():
        _draw_line(axes, order.index(recipe), points)
    ends = {name: (order.index(name), lines[name][-1]) for name in lines}
    _label_ends(axes, ends, _LABEL / height)
    return figure, axes


def _draw_line(axes: Axes, index: int, points: Sequence[tuple[float, ...]]) -> None:
    color = _SERIES[index % len(_SERIES)]
    x = [place for place, _, _ in points]
    y = [max(mean, _FLOOR) for _, mean, _ in points]
    bars = [0.0 if math.isnan(se) or mean < _FLOOR else se for _, mean, se in points]
    below = [min(bar, value - _FLOOR) for bar, value in zip(bars, y, strict=True)]
    style = "-" if index < len(_SERIES) else (0, (4, 2))
    axes.errorbar(x, y, yerr=[below, bars], color=color, linestyle=style, linewidth=1.5)
    faces = [color if mean >= _FLOOR else "none" for _, mean, _ in points]
    marker = _MARKERS[index % len(_MARKERS)]
    axes.scatter(x, y, s=20, marker=marker, facecolors=faces, edgecolors=color, zorder=3)


def _label_ends(
    axes: Axes, ends: Mapping[str, tuple[int, tuple[float, float, float]]], gap: float
) -> None:
    """Write recipe names right of the axes, at least `gap` of the height apart, each connected to
    the last point of its line."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    right = axes.get_xlim()[1]
    order = sorted(ends, key=lambda name: ends[name][1][1])
    wanted = [(math.log(max(ends[name][1][1], _FLOOR)) - low) / (high - low) for name in order]
    for name, place in zip(order, spread(wanted, gap), strict=True):
        index, (end, mean, _) = ends[name]
        color = _SERIES[index % len(_SERIES)]
        height = math.exp(low + place * (high - low))
        step = (right - axes.get_xlim()[0]) * 0.05
        tie = [end, right, right + step], [max(mean, _FLOOR), height, height]
        axes.plot(*tie, color=color, linewidth=0.8, clip_on=False, alpha=0.6)
        axes.text(right + step * 1.3, height, name, color=_INK, size=9, va="center")
    axes.set_xlim(axes.get_xlim()[0], right)


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move ascending `places` at least `gap` apart, in [0, 1] if they fit, with clusters centred.

    After i * gap is subtracted from place i, they only have to ascend, as the mean of the running
    maximum and the reverse running minimum does.
    """
    free = [place - i * gap for i, place in enumerate(places)]
    raised = itertools.accumulate(free, max)
    lowered = [*itertools.accumulate(reversed(free), min)][::-1]
    top = 1 - (len(places) - 1) * gap
    means = [(a + b) / 2 for a, b in zip(raised, lowered, strict=True)]
    return [max(0.0, min(mean, top)) + i * gap for i, mean in enumerate(means)]


def _rank_figures(ranks: RankMap) -> list[dict[str, Any]]:
    """Draw a heat map per part: kept rank over full width, layers across and groups down."""
    parts = ranks.parts or ["all groups"] * len(ranks.labels_y)
    sizes = {len(ranks.labels_y), len(ranks.ranks), len(ranks.widths), len(parts)}
    if len(sizes) != 1 or len({len(row) for row in ranks.ranks}) != 1:
        raise ValueError(f"ranks: labels_y, ranks, widths and parts differ in length ({sizes})")
    members = {part: [i for i, other in enumerate(parts) if other == part] for part in parts}
    return [_rank_figure(ranks, part, rows) for part, rows in members.items()]


def _rank_figure(ranks: RankMap, part: str, members: Sequence[int]) -> dict[str, Any]:
    from matplotlib.colors import ListedColormap
    from numpy import array

    num_layers = len(ranks.ranks[0])
    kept_ranks = array([ranks.ranks[i] for i in members], dtype=float)  # None becomes NaN
    shares = kept_ranks / array([[ranks.widths[i]] for i in members])
    figure, axes = _figure(max(3.6, 1.0 + 0.4 * num_layers), 0.75 + 0.34 * len(members))
    cells = axes.pcolormesh(shares, cmap=ListedColormap(_STEPS), vmin=0, vmax=1)
    cells.set(edgecolor=_PAPER, linewidth=1.2)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.set_yticks([i + 0.5 for i in range(len(members))], [ranks.labels_y[i] for i in members])
    shown = range(0, num_layers, 1 + num_layers // 24)
    axes.set_xticks([i + 0.5 for i in shown], [str(i) for i in shown])
    axes.set_xlabel("layer")
    if shares.size <= _MAX_LABELLED_CELLS:
        for y, row in enumerate(members):
            for x, rank in enumerate(ranks.ranks[row]):
                color = _PAPER if shares[y, x] >= 0.5 else _INK
                label = "" if rank is None else str(rank)
                axes.text(x + 0.5, y + 0.5, label, color=color, size=9, ha="center", va="center")
    return _svg(figure, part)


def _spectrum_figure(part: str, curves: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Draw each layer's spectrum over its first value, from the first layer (pale) to the last."""
    figure, axes = _figure(4.6, 3.2)
    for layer, curve in enumerate(curves):
        x = [(i + 1) / len(curve) for i in range(len(curve))]
        y = [value / curve[0] if value > 0 else math.nan for value in curve]
        step = 3 + round(6 * layer / max(1, len(curves) - 1))
        axes.plot(x, y, color=_STEPS[step], linewidth=1.3)
    axes.set_yscale("log")
    axes.grid(axis="y", color=_LINE, linewidth=0.6)
    axes.set(xlabel="dimension, as a fraction of all", ylabel="value over the layer's largest")
    return _svg(figure, f"{part} spectrum")


def _css() -> str:
    """Return the style sheet with a palette per mode (Okabe and Ito's hues; one blue ramp)."""
    light = _palette(
        "#1b1f24 #5b6570 #d9dee4 #ffffff #f5f7f9 #0072b2",
        "#0072b2 #d55e00 #009e73 #a0468a #c98a00 #3f9fd8 #6b7280",
        "#e6f0f8 #3b82bd #0b3057",
    )
    dark = _palette(
        "#e4e8ec #9aa5b1 #333c46 #12161b #1a2027 #56b4e9",
        "#56b4e9 #ff8a3d #2fc79a #dd8ac2 #f0b84a #9fd3f5 #a3acb7",
        "#1b2a3a #4384b5 #d3eafb",
    )
    in_the_dark = "@media screen and (prefers-color-scheme:dark)"
    colors = f":root{{{_rules(light)}}}\n{in_the_dark}{{:root{{{_rules(dark)}}}}}\n"
    return colors + packaged("report.css")


def _palette(roles: str, series: str, ramp: str) -> dict[str, str]:
    """Return the CSS variables of a mode; the ramp has equal steps through three colours."""
    names = ("ink", "muted", "line", "paper", "panel", "accent")
    colors = dict(zip(names, roles.split(), strict=True))
    colors |= {f"s{i}": color for i, color in enumerate(series.split())}
    stops = [[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in ramp.split()]
    for step in range(len(_STEPS)):
        part, place = divmod(step / (len(_STEPS) - 1) * 1.999, 1)
        ends = zip(stops[int(part)], stops[int(part) + 1], strict=True)
        mix = [round(a + (b - a) * place) for a, b in ends]
        colors[f"h{step}"] = "#{:02x}{:02x}{:02x}".format(*mix)
    return colors


def _rules(colors: Mapping[str, str]) -> str:
    return ";".join(f"--{name}:{color}" for name, color in colors.items())
