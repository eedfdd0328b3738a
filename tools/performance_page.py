"""Writes the pages of timings, docs/lab/timings-*.md, from files of the benchmarks' `--json`.

    python tools/performance_page.py

Takes every benchmark among benchmarks/results/*.json and nothing else. A page holds a benchmark;
files of the same benchmark, shape and device make one section.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from performance_plots import FIGURES, Row, save
from performance_tables import (
    FIRST,
    ablations,
    case_of,
    cases_of,
    chunk_of,
    first_table,
    grid,
    listed,
    losses,
    markdown,
    methods,
    speedup,
    steps_table,
    timed,
    times,
    times_table,
)

ROOT = Path(__file__).parents[1]
TITLES = {
    "attention": "Timings: decode attention",
    "decode": "Timings: decode steps and first tokens",
    "prefill": "Timings: prefill attention",
    "compress": "Timings: eviction",
}
HEAD = """# {title}

Measured by `benchmarks/gpu.sh`, made from `benchmarks/results/` by
`python tools/performance_page.py`; no number is written by hand.

Times are medians; what is compared took turns in one process. Kernels are timed as a CUDA graph
over layers, from a cold cache, after a check against attention written out, and given in
microseconds a layer. A multiple (**1.82×**) is the speed over the fastest bf16 baseline (marked *)
of the same batch B and tokens T, which reads the whole cache of sequences of equal length. Bytes
are those that must be read: stored numbers and scales; the ceiling is the fastest pure read of
memory in the same process. Speed says nothing of quality: see [quality](../quality.md) for what a
size costs, and [aims](speed-aims.md) for what was aimed for and reached.
"""

STEP = """Random weights in bfloat16, a cache filled as if prompts had been read, greedy sampling. A
step is everything between two tokens, scheduling and sampling included. Of what was timed more than
once the newest is shown; rows of older versions are of engines that took up to 2 ms more a step."""

Report = dict[str, Any]


def reports(folder: Path) -> list[Report]:
    """The benchmarks in a folder, by file name."""
    found = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    return [x for x in found if x.get("benchmark") in SECTIONS and "settings" in x]


def pages(found: Sequence[Report], plots: Path) -> dict[str, str]:
    """The text of each benchmark's page; writes their plots into the folder `plots`."""
    groups: dict[tuple[str, str, str], list[Report]] = {}
    for report in found:
        where = report["settings"]["shape"], report["versions"]["device"]
        groups.setdefault((report["benchmark"], *where), []).append(report)
    sections: dict[str, list[str]] = {}
    for (benchmark, shape, device), members in groups.items():
        stem = plots / _slug(benchmark, shape, device)
        section = SECTIONS[benchmark](members, f"{shape}, {device}", stem)
        sections.setdefault(benchmark, [HEAD.format(title=TITLES[benchmark])]).append(section)
    return {benchmark: "\n".join(texts) for benchmark, texts in sections.items()}


# -- sections -----------------------------------------------------------------------------------


def attention_section(found: Sequence[Report], where: str, stem: Path) -> str:
    """Decode attention: times and speed-ups, where it loses, plots, ablations; the rest folded."""
    rows = joined(found, "rows")
    shown = methods(rows)
    kinds = ["ceiling"] if len(cases_of(shown)) == 1 else ["speedup", "ceiling"]
    rebuilt = [row for row in rows if row.get("rank")]
    ceilings = listed(f"{x['ceiling']['read_tb_per_s']:.2f}" for x in found)
    copies = listed(f"{x['ceiling']['copy_tb_per_s']:.2f}" for x in found)
    return _section(
        f"Decode attention, {where}",
        f"us a layer. {made_with(found)} Ceiling {ceilings} TB/s read, {copies} copied.",
        grid(shown, timed, case_of),
        losses(shown),
        *(_picture(kind, shown, stem) for kind in kinds),
        _picture("rank", rebuilt, stem) if rebuilt else "",
        ablations([x["rows"] for x in found], "us"),
        folded("All times", times_table(rows)),
        *_about(found),
    )


def decode_section(found: Sequence[Report], where: str, stem: Path) -> str:
    """The whole engine: a step, the first token, memory beside its prediction."""
    rows, first = joined(found, "rows"), joined(found, "first_tokens")
    shown = methods(first)
    ttft = grid(shown, lambda row: f"{row['ms']:.0f}", lambda row: (row["tokens"],), "T = {}")
    alone = [[{"batch": 1, **row} for row in x.get("first_tokens", ())] for x in found]
    return _section(
        f"Time between tokens, {where}",
        f"Milliseconds a step. {made_with(found)}",
        STEP,
        grid(methods(rows), lambda row: f"{row['ms']:.2f}", case_of),
        _picture("steps", methods(rows), stem) if rows else "",
        ablations([x["rows"] for x in found], "ms"),
        f"Time to the first token of one prompt, milliseconds:\n\n{ttft}" if shown else "",
        ablations(alone, "ms", FIRST, "To the first token, without a method and with it:\n\n"),
        folded("All steps", steps_table(rows)),
        folded("All first tokens", first_table(first)) if first else "",
        *_about(found),
    )


def prefill_section(found: Sequence[Report], where: str, stem: Path) -> str:
    """Prefill attention: as decode attention, with arithmetic in place of bytes."""
    rows = joined(found, "rows")
    lines = [["B", "T", "chunk", "cache", "us", "p10–p90", "again", "TFLOP/s", "×"]]
    for row in rows:
        numbers = [*times(row), f"{row['tflops']:.0f}", speedup(row) or "–"]
        lines.append([*map(str, chunk_of(row)), f"`{row['variant']}`", *numbers])
    return _section(
        f"Prefill attention, {where}",
        f"us a layer for the last `chunk` of T tokens, causal. {made_with(found)}",
        grid(rows, timed, chunk_of, "{} x {}, chunk {}"),
        losses(rows),
        folded("All times", markdown(lines, left=(3,))),
        *_about(found),
    )


def compress_section(found: Sequence[Report], where: str, stem: Path) -> str:
    """What eviction costs, and what a decode step consists of."""
    lines = [["B", "T", "cache", "policy", "kept", "compression ms", "a decode step ms", "GB"]]
    for row in joined(found, "rows"):
        sizes = f"{row['bytes_before'] / 1e9:.1f} → {row['bytes_after'] / 1e9:.1f}"
        low_high = f"({row['compress_ms_low']:.0f}–{row['compress_ms_high']:.0f})"
        times = [f"{row['compress_ms']:.0f} {low_high}", f"{row['decode_ms']:.2f}"]
        names = [f"`{row['variant']}`", row["policy"], f"{row['keep']:g}"]
        lines.append([*map(str, case_of(row)), *names, *times, sizes])
    shares = joined(found, "shares")
    kinds = list(dict.fromkeys(kind for row in shares for kind in row["shares"]))
    parts = [["B", "T", "cache", "metrics", "kernels ms", *kinds]]
    for row in shares:
        names = [f"`{row['variant']}`", row["policy"] or "–", f"{row['kernel_ms']:.2f}"]
        each = [f"{100 * row['shares'].get(kind, 0):.1f} %" for kind in kinds]
        parts.append([*map(str, case_of(row)), *names, *each])
    return _section(
        f"Eviction and the parts of a step, {where}",
        f"All sequences compressed at once, all layers. {made_with(found)}",
        markdown(lines, left=(2, 3)),
        "Shares of the time in kernels of a decode step, launched one by one:",
        markdown(parts, left=(2, 3)),
        *_about(found),
    )


# -- where it comes from ------------------------------------------------------------------------


def made_with(found: Sequence[Report]) -> str:
    """Versions of the reports, and of rows that another run timed."""
    lines = []
    runs = (x for report in found for x in (report, *report["rows"]) if "versions" in x)
    for made in (run["versions"] for run in runs):
        names = [name for name in ("torch", "triton", "transformers", "kvfold") if made.get(name)]
        commit = (made["commit"] or "unknown")[:10]
        lines.append(", ".join(f"{name} {made[name]}" for name in names) + f" (`{commit}`)")
    return "; ".join(dict.fromkeys(lines)) + "."


def command(report: Report) -> str:
    """The command line that made a report."""
    settings, rows = {**report["settings"]}, report["rows"]
    if report["benchmark"] == "decode":
        settings = {
            name: listed((row[name[:-1] if name == "variants" else name] for row in rows), ",")
            for name in ("batch", "tokens", "variants")
        } | settings
    if cases := settings.pop("cases", None):
        names = ("batch", "tokens", "chunk")[: len(cases[0])]
        each = zip(names, zip(*cases, strict=True), strict=True)
        settings = {name: listed(values, ",") for name, values in each} | settings
    parts = [f"python benchmarks/bench_{report['benchmark']}.py"]
    for name, value in settings.items():
        if isinstance(value, list | tuple):
            value = listed(value, ",")
        if value not in (None, False):
            parts.append(f"--{name}" if value is True else f"--{name} {value}")
    return " ".join(parts)


def skipped_list(skipped: Sequence[Row]) -> str:
    """One line a name and reason, with the cases it holds for."""
    cases: dict[tuple[str, str], list[str]] = {}
    for item in skipped:
        name = item.get("name") or item["variant"]
        cases.setdefault((name, item["reason"]), []).append(f"{item['batch']} x {item['tokens']}")
    return "\n".join(
        f"- `{name}` at {listed(where)}: {reason}" for (name, reason), where in cases.items()
    )


def joined(found: Sequence[Report], key: str) -> list[Row]:
    return [row for report in found for row in report.get(key, ())]


def folded(title: str, text: str) -> str:
    """Text that is shown on request."""
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def _about(found: Sequence[Report]) -> list[str]:
    commands = "\n".join(dict.fromkeys(map(command, found)))
    skipped = joined(found, "skipped")
    return [
        folded("Not timed", skipped_list(skipped)) if skipped else "",
        folded("Commands", f"```\n{commands}\n```"),
    ]


def _section(title: str, *parts: str) -> str:
    return "\n\n".join([f"## {title}", *filter(None, parts)]) + "\n"


def _picture(kind: str, rows: Sequence[Row], stem: Path) -> str:
    path = stem.with_name(f"{stem.name}-{kind}.svg")
    save(FIGURES[kind](rows), path)
    return f"![{kind} by cache]({path.parent.name}/{path.name})"


def _slug(*words: str) -> str:
    return "-".join("-".join(words).lower().split())


SECTIONS: dict[str, Callable[[Sequence[Report], str, Path], str]] = {
    "attention": attention_section,
    "decode": decode_section,
    "prefill": prefill_section,
    "compress": compress_section,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "lab", help="a folder")
    options = parser.parse_args(arguments)
    found = reports(options.results)
    if not found:
        parser.error(f"{options.results} holds no file of a benchmark")
    for benchmark, text in pages(found, options.output / "timings").items():
        (options.output / f"timings-{benchmark}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
