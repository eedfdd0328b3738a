"""One self-contained HTML file about a compression: numbers, figures, generated text.

Figures are SVG inside the page. Matplotlib draws them in stand-in colours that become CSS variables
here, so that the same figure follows the reader's light or dark mode.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.evaluate import compare
from kvfold.evaluate.compare import Row

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


@dataclass(frozen=True, kw_only=True)
class RankMap:
    """Kept ranks: `ranks[row][layer]`, None where a layer has no such group.

    `labels_y` and `widths` (the full rank) have one entry a row, and so has `parts` ("keys",
    "values"): rows of one part share a panel, and without parts all rows do.
    """

    labels_y: Sequence[str]
    ranks: Sequence[Sequence[int | None]]
    widths: Sequence[int]
    parts: Sequence[str] = ()


def write_report(
    path: str | Path,
    *,
    title: str,
    summary: Sequence[tuple[str, str]],
    rows: Sequence[Row],
    ranks: RankMap | None,
    spectra: Spectra | None = None,
    examples: Sequence[tuple[str, str]] = (),
) -> None:
    """Write the report to `path`; its folder is created if need be.

    `summary` holds headline numbers as (label, value), `examples` generated texts as (title, text).
    `spectra` maps a part ("keys") to one descending sequence a layer; each is divided by its first
    value. Raises ValueError if matplotlib or jinja2 is missing or `ranks` is ragged.
    """
    try:
        import jinja2
        import matplotlib  # noqa: F401
    except ImportError as error:
        hint = 'pip install "kvfold[report]"'
        raise ValueError(f"report: {error.name} is not installed; run: {hint}") from None
    page = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(_PAGE)
    html = page.render(
        title=title,
        summary=summary,
        rows=rows,
        compare=compare,
        texts=compare.texts(rows),
        lengths=compare.needle_lengths(rows),
        losses=[_loss_figure(rows, name) for name in compare.texts(rows) if _points(rows, name)],
        ranks=_rank_figures(ranks) if ranks else [],
        spectra=[_spectrum_figure(name, curves) for name, curves in (spectra or {}).items()],
        examples=examples,
        css=_css(),
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(html, encoding="utf-8")


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Empty axes of the given size in inches, in the house look."""
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
    """Figure as inline SVG markup, with its caption and the CSS pixels it may take."""
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
    # A wide figure takes a row of its own and on a phone scrolls, so that its text stays legible.
    wide = width > 6
    style = f"min-width:{80 * width * wide:.0f}px;max-width:{112 * width:.0f}px"
    return {"svg": Markup(svg), "name": name, "style": style, "wide": wide}


def _points(rows: Sequence[Row], text: str) -> dict[str, list[tuple[float, float, float]]]:
    """Per recipe the (kept fraction, loss increase, standard error) on `text`, by kept fraction."""
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        mean, se = row.delta_nll.get(text, (math.nan, math.nan))
        if math.isfinite(mean):
            lines.setdefault(row.recipe, []).append((row.kept_fraction, mean, se))
    return {recipe: sorted(points) for recipe, points in lines.items()}


def _loss_figure(rows: Sequence[Row], text: str) -> dict[str, Any]:
    """Loss increase against kept fraction, a line a recipe; what is not above zero sits below."""
    figure, axes = _figure(4.6, 3.7)
    lines = _points(rows, text)
    order = list(dict.fromkeys(row.recipe for row in rows if row.delta_nll))
    positive = [mean for points in lines.values() for _, mean, _ in points if mean > 0]
    floor = min(positive, default=1e-4) / 2
    axes.set_yscale("log")
    axes.set_ylim(floor / 1.25, max(positive, default=1e-2) * 1.6)
    axes.grid(axis="y", color=_LINE, linewidth=0.6)
    axes.locator_params(axis="x", nbins=5)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set(xlabel="kept fraction of the cache", ylabel="loss increase, nats per token")
    for recipe, points in lines.items():
        _draw_line(axes, order.index(recipe), points, floor)
    _label_ends(axes, {name: (order.index(name), lines[name][-1]) for name in lines}, floor)
    return _svg(figure, text)


def _draw_line(axes: Axes, index: int, points: Sequence[tuple[float, ...]], floor: float) -> None:
    color = _SERIES[index % len(_SERIES)]
    x = [kept for kept, _, _ in points]
    y = [max(mean, floor) for _, mean, _ in points]
    bars = [0.0 if math.isnan(se) or mean <= 0 else se for _, mean, se in points]
    below = [min(bar, value - floor) for bar, value in zip(bars, y, strict=True)]
    style = "-" if index < len(_SERIES) else (0, (4, 2))
    axes.errorbar(x, y, yerr=[below, bars], color=color, linestyle=style, linewidth=1.5)
    faces = [color if mean > 0 else "none" for _, mean, _ in points]
    marker = _MARKERS[index % len(_MARKERS)]
    axes.scatter(x, y, s=20, marker=marker, facecolors=faces, edgecolors=color, zorder=3)


def _label_ends(
    axes: Axes, ends: Mapping[str, tuple[int, tuple[float, float, float]]], floor: float
) -> None:
    """Recipe names right of the axes, moved apart, each tied to its line's last point."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    right = axes.get_xlim()[1]
    order = sorted(ends, key=lambda name: ends[name][1][1])
    wanted = [(math.log(max(ends[name][1][1], floor)) - low) / (high - low) for name in order]
    for name, place in zip(order, spread(wanted, 0.066), strict=True):
        index, (kept, mean, _) = ends[name]
        color = _SERIES[index % len(_SERIES)]
        height = math.exp(low + place * (high - low))
        step = (right - axes.get_xlim()[0]) * 0.05
        tie = [kept, right, right + step], [max(mean, floor), height, height]
        axes.plot(*tie, color=color, linewidth=0.8, clip_on=False, alpha=0.6)
        axes.text(right + step * 1.3, height, name, color=_INK, size=9, va="center")
    axes.set_xlim(axes.get_xlim()[0], right)


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Ascending `places` moved to be `gap` apart, clusters staying centred, in [0, 1] if they fit.

    Less i * gap, places `gap` apart only have to ascend: the mean of running maximum and reverse
    running minimum does.
    """
    free = [place - i * gap for i, place in enumerate(places)]
    raised = itertools.accumulate(free, max)
    lowered = [*itertools.accumulate(reversed(free), min)][::-1]
    top = 1 - (len(places) - 1) * gap
    means = [(a + b) / 2 for a, b in zip(raised, lowered, strict=True)]
    return [max(0.0, min(mean, top)) + i * gap for i, mean in enumerate(means)]


def _rank_figures(ranks: RankMap) -> list[dict[str, Any]]:
    """One heat map a part: kept rank over full width, layers across and groups down."""
    parts = ranks.parts or ["all groups"] * len(ranks.labels_y)
    sizes = {len(ranks.labels_y), len(ranks.ranks), len(ranks.widths), len(parts)}
    if len(sizes) != 1 or len({len(row) for row in ranks.ranks}) != 1:
        raise ValueError(f"ranks: labels_y, ranks, widths and parts differ in length ({sizes})")
    members = {part: [i for i, own in enumerate(parts) if own == part] for part in parts}
    return [_rank_figure(ranks, part, rows) for part, rows in members.items()]


def _rank_figure(ranks: RankMap, part: str, members: Sequence[int]) -> dict[str, Any]:
    from matplotlib.colors import ListedColormap
    from numpy import array

    num_layers = len(ranks.ranks[0])
    shares = array([[_share(kept, ranks.widths[i]) for kept in ranks.ranks[i]] for i in members])
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
            for x, kept in enumerate(ranks.ranks[row]):
                color = _PAPER if shares[y, x] >= 0.5 else _INK
                label = "" if kept is None else str(kept)
                axes.text(x + 0.5, y + 0.5, label, color=color, size=9, ha="center", va="center")
    return _svg(figure, part)


def _share(kept: int | None, width: int) -> float:
    return math.nan if kept is None else kept / width


def _spectrum_figure(part: str, curves: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Each layer's spectrum over its first value, from the first layer (pale) to the last."""
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
    """Style sheet with the palette of either mode (Okabe and Ito's hues; one blue ramp)."""
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
    return f":root{{{_rules(light)}}}\n{in_the_dark}{{:root{{{_rules(dark)}}}}}\n{_STYLE}"


def _palette(roles: str, series: str, ramp: str) -> dict[str, str]:
    """CSS variables of one mode; the heat ramp runs in equal steps through its three colours."""
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


_STYLE = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:40px 24px 64px;background:var(--paper);color:var(--ink);
 font:15px/1.55 system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:1.9rem;line-height:1.2;letter-spacing:-.015em;margin:0 0 28px;text-wrap:balance}
h1::before{content:"kvfold";display:block;font-size:.85rem;letter-spacing:0;color:var(--accent);
 margin-bottom:6px}
h2{font-size:1.15rem;margin:48px 0 4px}
h3{font-size:.9rem;font-weight:600;margin:0 0 8px}
p{color:var(--muted);margin:0 0 16px;max-width:74ch}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:20px 28px;margin:0}
dl div{border-top:2px solid var(--accent);padding-top:8px}
dt{color:var(--muted);font-size:.82rem;line-height:1.35}
dd{margin:2px 0 0;font-size:1.4rem;line-height:1.3;font-weight:600;overflow-wrap:anywhere}
.scroll{overflow-x:auto}
table{border-spacing:0;width:100%;font-size:13px;line-height:20px;font-variant-numeric:tabular-nums}
th,td{padding:4px 7px;text-align:right;white-space:nowrap}
th{font-weight:600;color:var(--muted)}
th[colspan]{text-align:center;padding-bottom:0}
thead tr:last-child th{border-bottom:1px solid var(--muted)}
tbody th,thead th:first-child{text-align:left;position:sticky;left:0;background:var(--paper)}
tbody th{font-weight:400}
tbody .first th{font-weight:600;color:var(--ink)}
tbody tr.first>*{border-top:1px solid var(--line)}
tbody tr:hover>*{background:var(--panel)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:32px}
figure{margin:0;min-width:0}
.wide{grid-column:1/-1}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-family:inherit!important}
.ramp{display:flex;align-items:center;gap:8px;color:var(--muted);font-size:.82rem;margin:0 0 16px}
.ramp span{display:flex}
.ramp i{width:18px;height:12px}
pre{margin:0;padding:14px 16px;background:var(--panel);border-radius:4px;white-space:pre-wrap;
 overflow-wrap:anywhere;font:inherit;font-size:.9rem}
@media(max-width:560px){body{padding:24px 16px 40px}h1{font-size:1.5rem}
 dl{grid-template-columns:repeat(2,1fr);gap:16px}dd{font-size:1.2rem}th,td{padding:4px 6px}}
@media print{body{max-width:none;padding:0;font-size:11px}.scroll{overflow:visible}
 .figures{grid-template-columns:1fr 1fr}[role=img]{min-width:0!important}
 table{font-size:8.5px;line-height:13px}th,td{padding:2px 4px}
 h2,p,.ramp{break-after:avoid}figure,pre,tr{break-inside:avoid}}
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title><style>{{ css|safe }}</style></head><body>
{% macro figures(items) %}
<div class="figures">{% for item in items %}
<figure{% if item.wide %} class="wide"{% endif %}><h3>{{ item.name }}</h3><div class="scroll">
<div role="img" aria-label="{{ item.name }}" style="{{ item.style }}">{{ item.svg }}</div>
</div></figure>
{% endfor %}</div>
{% endmacro %}
{% macro ramp(low, high, first) %}
<div class="ramp">{{ low }}<span>{% for i in range(first, 10) %}
<i style="background:var(--h{{ i }})"></i>{% endfor %}</span>{{ high }}</div>
{% endmacro %}
<h1>{{ title }}</h1>
<dl>{% for label, value in summary %}<div><dt>{{ label }}</dt><dd>{{ value }}</dd></div>
{% endfor %}</dl>
{% if rows %}
<h2>What each recipe saves and costs</h2>
<p>Kept is the bits one token stores over those of the uncompressed 16-bit cache; cache is the
memory this run allocated. The increase is in nats per token against the original on the same
windows, ± one standard error; 0.01 nats is 1 % of perplexity.</p>
<div class="scroll"><table><thead><tr><th></th><th colspan="5">cache</th>
{% for text in texts %}<th colspan="2">{{ text }}</th>{% endfor %}
{% if lengths %}<th colspan="{{ lengths|length }}">needle, % found</th>{% endif %}<th></th></tr>
<tr><th>recipe</th><th>asked</th><th>kept</th><th>smaller</th><th>B/token</th><th>cache</th>
{% for text in texts %}<th>perplexity</th><th>increase</th>{% endfor %}
{% for length in lengths %}<th>{{ compare.format_length(length) }}</th>{% endfor %}
<th>seconds</th></tr></thead><tbody>
{% for row in rows %}
<tr{% if loop.changed(row.recipe) %} class="first"{% endif %}><th>{{ row.recipe }}</th>
{% for cell in compare.format_storage(row) %}<td>{{ cell }}</td>{% endfor %}
{% for text in texts %}<td>{{ compare.format_perplexity(row.perplexity.get(text)) }}</td>
<td>{{ compare.format_delta(row.delta_nll.get(text)) }}</td>{% endfor %}
{% for length in lengths %}<td>{{ compare.format_needle(row, length) }}</td>{% endfor %}
<td>{{ compare.format_seconds(row) }}</td></tr>
{% endfor %}</tbody></table></div>
{% endif %}
{% if losses %}
<h2>Loss against cache kept</h2>
<p>Lower and further left is better. Bars are one standard error; a hollow mark on the floor is an
increase not above zero.</p>
{{ figures(losses) }}
{% endif %}
{% if ranks %}
<h2>Ranks kept</h2>
<p>Numbers are kept dimensions; colour is their share of the full width.</p>
{{ ramp("none", "all", 0) }}{{ figures(ranks) }}
{% endif %}
{% if spectra %}
<h2>Spectra</h2>
<p>How fast the importance of a layer's dimensions falls off, each layer over its largest.</p>
{{ ramp("first layer", "last layer", 3) }}{{ figures(spectra) }}
{% endif %}
{% if examples %}
<h2>Generated text</h2>
<div class="figures">{% for name, text in examples %}
<figure><h3>{{ name }}</h3><pre>{{ text }}</pre></figure>{% endfor %}</div>
{% endif %}
</body></html>
"""
