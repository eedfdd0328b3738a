"""The page of speeds, docs/performance.md, with its plots: from files of `kvfold bench --json`.

    python tools/performance_page.py

Takes every benchmark among benchmarks/results/*.json and nothing else: a section a file.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COLORS = ("#0072b2", "#d55e00", "#009e73", "#a0468a", "#c98a00", "#3f9fd8", "#6b7280")
MARKERS = "osD^vP*"
INK, FAINT = "#1b1f24", "#d9dee4"
HEAD = """# Performance

Made from `benchmarks/results/` by `python tools/performance_page.py`; no number is written by hand.

Times are medians in microseconds a layer, with the 10th and 90th percentile, and the median of a
second run of as many rounds. Every kernel was checked against attention written out before it was
timed; all that is compared took turns in one process, each turn with a cold cache. Bytes are those
that must be read: stored numbers and scales. The ceiling is the fastest pure read of memory in the
same process. Speed-ups are over the fastest bf16 baseline of the same batch B and tokens T, which
has sequences of equal length and reads the whole cache. Speed says nothing of quality: see
[quality](quality.md) for what a size costs. [Goals](performance-goals.md) says what was aimed for,
what was reached and what was not.
"""

STEP = """Random weights in bfloat16, a cache filled as if prompts had been read, greedy sampling; a
step is everything between tokens, scheduling and sampling included. `transformers` is its dynamic
cache with SDPA. Predicted: weights and pages."""

Report = dict[str, Any]
Row = dict[str, Any]


def reports(folder: Path) -> dict[str, Report]:
    """The benchmarks in a folder, by file name without .json."""
    found = {
        path.stem: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))
    }
    return {stem: report for stem, report in found.items() if report.get("benchmark") in SECTIONS}


def page(found: dict[str, Report], plots: Path) -> str:
    """The page's text; writes its plots into `plots`, which lies beside it."""
    plots.mkdir(parents=True, exist_ok=True)
    sections = [
        SECTIONS[report["benchmark"]](stem, report, plots) for stem, report in found.items()
    ]
    return "\n".join([HEAD, *sections])


def attention_section(stem: str, report: Report, plots: Path) -> str:
    """Decode attention: what was measured, speed-ups, where we lose, everything."""
    rows = report["rows"]
    shape = report["settings"]["shape"]
    parts = [
        f"## Decode attention, {shape}, {report['versions']['device']}",
        provenance(report),
        "### Speed-up over the fastest baseline",
        speedup_table(rows),
    ]
    if len(_cases(rows)) > 1:
        save(speedup_figure(rows), plots / f"{stem}-speedup.svg")
        parts.append(f"![Speed-up against tokens of the batch]({plots.name}/{stem}-speedup.svg)")
    save(ceiling_figure(rows), plots / f"{stem}-ceiling.svg")
    parts += [
        f"![Share of the ceiling by cache]({plots.name}/{stem}-ceiling.svg)",
        "### Where it is slower",
        losses(rows),
        "### All times",
        times_table(rows),
    ]
    if report["skipped"]:
        parts += ["### Not timed", skipped_list(report["skipped"])]
    return "\n\n".join(parts) + "\n"


def decode_section(stem: str, report: Report, plots: Path) -> str:
    """The whole engine: milliseconds a step, and memory beside its prediction."""
    rows, settings = report["rows"], report["settings"]
    save(step_figure(rows), plots / f"{stem}-steps.svg")
    lines = [
        ["B", "T", "cache", "ms", "p10–p90", "tokens/s", "cache GB", "peak GB", "predicted GB"]
    ]
    for row in rows:
        sizes = (row["cache_bytes"], row["peak_bytes"], row["predicted_bytes"])
        numbers = [f"{row['ms']:.2f}", f"{row['ms_p10']:.2f}–{row['ms_p90']:.2f}"]
        numbers += [f"{row['tokens_per_s']:.0f}", *(f"{size / 1e9:.1f}" for size in sizes)]
        lines.append([*map(str, _case(row)), f"`{row['variant']}`", *numbers])
    batch, tokens = (_joined(case[i] for case in _cases(rows)) for i in range(2))
    variants = _joined(row["variant"] for row in rows)
    parts = [
        f"## Time between tokens, {settings['shape']}, {report['versions']['device']}",
        f"{made_with(report)}\n\n```\nkvfold bench decode --shape {settings['shape']} \\\n"
        f"    --batch {batch} --tokens {tokens} --steps {settings['steps']} \\\n"
        f"    --variants {variants}\n```",
        STEP,
        _table(lines, left=(2,)),
        f"![Milliseconds a step by cache]({plots.name}/{stem}-steps.svg)",
    ]
    return "\n\n".join(parts) + "\n"


def made_with(report: Report) -> str:
    """Device and versions."""
    made = report["versions"]
    names = [name for name in ("torch", "triton", "transformers", "kvfold") if made.get(name)]
    with_ = ", ".join(f"{name} {made[name]}" for name in names)
    return f"{made['device']}; {with_} (commit `{(made['commit'] or 'unknown')[:10]}`)."


def provenance(report: Report) -> str:
    """Device, versions, command and ceiling."""
    ceiling = report["ceiling"]
    return (
        f"{made_with(report)}\n"
        f"Ceiling {ceiling['read_tb_per_s']:.2f} TB/s read ({ceiling['read_by']}), copy"
        f" {ceiling['copy_tb_per_s']:.2f} TB/s.\n\n```\n{command(report['settings'])}\n```"
    )


def command(settings: dict[str, Any]) -> str:
    """The command line of an attention benchmark."""
    batch, tokens = (_joined(case[i] for case in settings["cases"]) for i in range(2))
    lists = "".join(
        f" \\\n    --{name} {_joined(settings[name])}" for name in ("variants", "baselines")
    )
    return (
        f"kvfold bench attention --shape {settings['shape']} --batch {batch} --tokens {tokens} \\\n"
        f"    --layers {settings['layers']} --rounds {settings['rounds']}{lists}"
    )


def speedup_table(rows: Sequence[Row]) -> str:
    """A line a case, a column a variant; bold where faster."""
    names = list(dict.fromkeys(row["variant"] for row in rows if row["kind"] == "variant"))
    lines = [["B", "T", "fastest baseline", "us", *names]]
    for case in _cases(rows):
        members = {row["variant"]: row for row in rows if _case(row) == case}
        first = next(iter(members.values()))
        bar = first["fastest_baseline_us"]
        cells = [_speedup(members.get(name)) for name in names]
        number = "–" if bar is None else f"{bar:.1f}"
        lines.append([*map(str, case), first["fastest_baseline"] or "–", number, *cells])
    return _table(lines, left=(2,))


def losses(rows: Sequence[Row]) -> str:
    """One line a variant: the cases in which it is slower, and the largest of them."""
    lines = []
    compared = [row for row in rows if row["kind"] == "variant" and row["speedup_vs_fastest"]]
    for name in dict.fromkeys(row["variant"] for row in compared):
        mine = [row for row in compared if row["variant"] == name]
        lost = [row for row in mine if row["speedup_vs_fastest"] < 1]
        if len(lost) in (0, len(mine)):
            lines.append(f"- `{name}`: in {'all' if lost else 'none of'} {len(mine)} cases.")
            continue
        where = ", ".join(f"{b} x {t}" for b, t in map(_case, lost))
        largest = max(row["batch"] * row["tokens"] for row in lost)
        lines.append(
            f"- `{name}`: in {len(lost)} of {len(mine)} cases (B x T: {where}), none above"
            f" {largest} tokens."
        )
    return "\n".join(lines) or "Nothing was compared: no baseline ran."


def times_table(rows: Sequence[Row]) -> str:
    lines = [["B", "T", "cache", "us", "p10–p90", "again", "MB", "TB/s", "of the ceiling", "×"]]
    for row in rows:
        numbers = [
            f"{row['us']:.1f}",
            f"{row['us_p10']:.1f}–{row['us_p90']:.1f}",
            f"{row['repeat_us']:.1f}",
            f"{row['bytes'] / 1e6:.4g}",
            f"{row['tb_per_s']:.2f}",
            f"{100 * row['ceiling_fraction']:.0f} %",
            _speedup(row),
        ]
        lines.append([*map(str, _case(row)), f"`{row['variant']}`", *numbers])
    return _table(lines, left=(2,))


def skipped_list(skipped: Sequence[dict[str, Any]]) -> str:
    """One line a name and reason, with the cases it holds for."""
    cases: dict[tuple[str, str], list[str]] = {}
    for item in skipped:
        cases.setdefault((item["name"], item["reason"]), []).append(
            f"{item['batch']} x {item['tokens']}"
        )
    return "\n".join(
        f"- `{name}` at {', '.join(where)}: {reason}" for (name, reason), where in cases.items()
    )


def speedup_figure(rows: Sequence[Row]) -> Any:
    """Speed-up against B x T: a point a case, a line through their median at every B x T."""
    figure, axes = _figure(7.2, 4.2)
    compared = [row for row in rows if row["kind"] == "variant" and row["speedup_vs_fastest"]]
    for i, name in enumerate(dict.fromkeys(row["variant"] for row in compared)):
        points: dict[int, list[float]] = {}
        for row in compared:
            if row["variant"] == name:
                size = row["batch"] * row["tokens"]
                points.setdefault(size, []).append(row["speedup_vs_fastest"])
        sizes = sorted(points)
        style = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)]}
        dashes = "-" if i < len(COLORS) else "--"
        middle = [sorted(points[size])[len(points[size]) // 2] for size in sizes]
        axes.plot(sizes, middle, dashes, linewidth=1.4, markersize=5, label=name, **style)
        pairs = [(size, value) for size in sizes for value in points[size]]
        axes.scatter(*zip(*pairs, strict=True), s=9, alpha=0.5, **style)
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g}K")
    axes.set(xlabel="cached tokens of the batch, B x T", ylabel="speed-up over fastest baseline")
    if compared:
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def ceiling_figure(rows: Sequence[Row]) -> Any:
    """Share of the read ceiling: a faint point a case, a full one for the largest."""
    names = list(dict.fromkeys(row["variant"] for row in rows))
    figure, axes = _figure(7.2, 0.9 + 0.27 * len(names))
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


def step_figure(rows: Sequence[Row]) -> Any:
    """Milliseconds a step, a bar a cache, a group of bars a case."""
    figure, axes = _figure(7.2, 0.9 + 0.32 * len(rows))
    labels = [f"{row['variant']}, {row['batch']} x {row['tokens']}" for row in rows]
    colors = [COLORS[-1] if row["variant"] == "transformers" else COLORS[0] for row in rows]
    bars = axes.barh(labels, [row["ms"] for row in rows], color=colors, height=0.6)
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8, color=INK)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step")
    return figure


def save(figure: Any, path: Path) -> None:
    """The same bytes for the same figure."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path, format="svg", metadata={"Date": None})


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9, length=0, which="both")
    return figure, axes


def _case(row: Row) -> tuple[int, int]:
    return row["batch"], row["tokens"]


def _cases(rows: Sequence[Row]) -> list[tuple[int, int]]:
    return list(dict.fromkeys(map(_case, rows)))


def _speedup(row: Row | None) -> str:
    value = row and row["speedup_vs_fastest"]
    if value is None:
        return "–"
    return f"**{value:.2f}**" if value > 1 else f"{value:.2f}"


def _joined(items: Iterable[object]) -> str:
    return ",".join(map(str, dict.fromkeys(items)))


def _table(lines: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """Markdown; columns stand right unless they are in `left`."""
    head, *body = lines
    rule = [":--" if i in left else "--:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


SECTIONS: dict[str, Callable[[str, Report, Path], str]] = {
    "attention": attention_section,
    "decode": decode_section,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "performance.md")
    options = parser.parse_args(arguments)
    found = reports(options.results)
    if not found:
        parser.error(f"{options.results} holds no file of `kvfold bench ... --json`")
    text = page(found, options.output.with_suffix(""))
    options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
