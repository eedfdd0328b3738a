"""Tables of docs/lab/timings-*.md, from rows of the benchmarks' `--json`."""

from collections.abc import Callable, Iterable, Sequence

from performance_plots import Row

Case = tuple[int, ...]
Compared = tuple[str, str, str]

_PARETO = "bf16-half-uneven-pareto"
_OE = "OE: values mapped back beside W_O", "bf16-half-online", "bf16-half"
_AC = "AC: uniform ranks, the same average", "bf16-half", "bf16-half-ragged"
# What is compared (ZACK §6.5): label, variant without the method, variant with it.
ABLATIONS = (
    ("OE: whole keys and values every step", "bf16-half-decompressed", "bf16-half"),
    _OE,
    _AC,
    ("KE: whole heads, longest first", "bf16-half-longest", "bf16-half"),
    ("KE: whole heads, a program each", "bf16-half-whole", "bf16-half"),
    ("KE, Pareto lengths: longest first", "bf16-half-pareto-longest", "bf16-half-pareto"),
    ("KE, Pareto lengths: a program each", "bf16-half-pareto-whole", "bf16-half-pareto"),
    ("KE, unequal heads: longest first", "bf16-half-uneven-longest", "bf16-half-uneven"),
    ("KE, unequal heads: a program each", "bf16-half-uneven-whole", "bf16-half-uneven"),
    *(
        (f"KE, unequal heads, Pareto lengths: {what}", f"{_PARETO}-{name}", _PARETO)
        for what, name in (("longest first", "longest"), ("a program each", "whole"))
    ),
)
# Of the first token.
FIRST = (
    _OE,
    _AC,
    ("KE: tiles of 64 queries for all heads", "bf16-half-uneven-fixed", "bf16-half-uneven"),
    ("KE as published: tiles of equal work", "bf16-half-uneven-zack", "bf16-half-uneven"),
)

TITLE = """ZACK's ablations (§6.5): without the method, and with it. What AC gains in the paper,
fewer dimensions at the same quality, is not in these times: here both keep as many.

"""


def grid(
    rows: Sequence[Row],
    cell: Callable[[Row], str],
    case: Callable[[Row], Case],
    title: str = "{} x {}",
) -> str:
    """A line a cache, a column a case."""
    cases = sorted({case(row) for row in rows})
    found = {(row["variant"], case(row)): cell(row) for row in rows}
    lines = [["", *(title.format(*x) for x in cases)]]
    for name in dict.fromkeys(row["variant"] for row in rows):
        lines.append([f"`{name}`", *(found.get((name, x), "–") for x in cases)])
    return markdown(lines, left=(0,))


def timed(row: Row) -> str:
    """Microseconds, and the speed-up of what is not a baseline."""
    if row["variant"] == row["fastest_baseline"]:
        return f"{row['us']:.1f} *"
    own = row.get("kind", "variant") == "variant"
    return f"{row['us']:.1f} {speedup(row)}" if own else f"{row['us']:.1f}"


def losses(rows: Sequence[Row]) -> str:
    """In which cases which caches are slower, in a line."""
    compared = [row for row in rows if row.get("kind", "variant") == "variant"]
    compared = [row for row in compared if row["speedup_vs_fastest"]]
    if not compared:
        return "Nothing was compared: no baseline ran."
    parts = []
    for name in dict.fromkeys(row["variant"] for row in compared):
        mine = [row for row in compared if row["variant"] == name]
        slower = [row for row in mine if row["speedup_vs_fastest"] < 1]
        lost = [f"{b} x {t}" for b, t in map(case_of, slower)]
        if lost:
            parts.append(f"`{name}` {'everywhere' if len(lost) == len(mine) else listed(lost)}")
    return f"Slower than the fastest baseline: {'; '.join(parts) or 'none'}."


def ablations(
    reports: Sequence[Sequence[Row]],
    unit: str,
    compared: Sequence[Compared] = ABLATIONS,
    title: str = TITLE,
) -> str:
    """ZACK's ablations where both sides were timed in one process; empty where none were."""
    lines = [["without", "B", "T", unit, f"with, {unit}", "longer by"]]
    for rows in reports:
        found = {(row["variant"], case_of(row)): row[unit] for row in rows}
        for label, without, with_ in compared:
            for case in cases_of(rows):
                slow, fast = found.get((without, case)), found.get((with_, case))
                if slow and fast:
                    numbers = [f"{slow:.4g}", f"{fast:.4g}", f"{100 * (slow / fast - 1):.0f} %"]
                    lines.append([label, *map(str, case), *numbers])
    return title + markdown(lines, left=(0,)) if len(lines) > 1 else ""


def methods(rows: Sequence[Row]) -> list[Row]:
    """Those that are no ablation; of what was timed more than once the last."""
    lesser = ("-longest", "-whole", "-pareto", "-decompressed", "-online", "-fixed", "-zack")
    own = [row for row in rows if not row["variant"].endswith(lesser)]
    keys = [(row["variant"], row.get("batch"), row["tokens"], row.get("chunk")) for row in own]
    return list(dict(zip(keys, own, strict=True)).values())


def times_table(rows: Sequence[Row]) -> str:
    rates = any(row.get("tflops") for row in rows)
    head = ["B", "T", "cache", "us", "p10–p90", "again", "MB", "TB/s", "of the ceiling", "×"]
    lines = [head + ["TFLOP/s"] * rates]
    for row in rows:
        share = f"{100 * row['ceiling_fraction']:.0f} %"
        numbers = [*times(row), f"{row['bytes'] / 1e6:.4g}", f"{row['tb_per_s']:.2f}", share]
        flops = [f"{row['tflops']:.0f}" if row.get("tflops") else "–"] * rates
        name = f"`{row['variant']}`"
        lines.append([*map(str, case_of(row)), name, *numbers, speedup(row) or "–", *flops])
    return markdown(lines, left=(2,))


def steps_table(rows: Sequence[Row]) -> str:
    """Predicted: weights and cache."""
    sizes = ("cache_bytes", "peak_bytes", "predicted_bytes")
    head = ["B", "T", "cache", "ms", "p10–p90", "again", "tokens/s", "cache GB", "peak GB"]
    lines = [[*head, "predicted GB"]]
    for row in rows:
        again = f"{row['repeat_ms']:.2f}" if "repeat_ms" in row else "–"
        numbers = [f"{row['ms']:.2f}", f"{row['ms_p10']:.2f}–{row['ms_p90']:.2f}", again]
        numbers += [f"{row['tokens_per_s']:.0f}", *(f"{row[size] / 1e9:.1f}" for size in sizes)]
        lines.append([*map(str, case_of(row)), f"`{row['variant']}`", *numbers])
    return markdown(lines, left=(2,))


def first_table(rows: Sequence[Row]) -> str:
    lines = [["T", "cache", "chunk", "ms", "fastest–slowest", "of", "tokens/s", "peak GB"]]
    for row in rows:
        numbers = [f"{row['ms']:.1f}", f"{row['ms_low']:.1f}–{row['ms_high']:.1f}"]
        numbers += [
            str(row["runs"]),
            f"{row['tokens_per_s']:.0f}",
            f"{row['peak_bytes'] / 1e9:.1f}",
        ]
        chunk = "all" if row["chunk"] is None else str(row["chunk"])
        lines.append([str(row["tokens"]), f"`{row['variant']}`", chunk, *numbers])
    return markdown(lines, left=(1,))


def case_of(row: Row) -> Case:
    return row["batch"], row["tokens"]


def chunk_of(row: Row) -> Case:
    return row["batch"], row["tokens"], row["chunk"]


def cases_of(rows: Sequence[Row]) -> list[Case]:
    return list(dict.fromkeys(map(case_of, rows)))


def times(row: Row) -> list[str]:
    low_high = f"{row['us_p10']:.1f}–{row['us_p90']:.1f}"
    return [f"{row['us']:.1f}", low_high, f"{row['repeat_us']:.1f}"]


def speedup(row: Row) -> str:
    value = row["speedup_vs_fastest"]
    if value is None:
        return ""
    return f"**{value:.2f}×**" if value > 1 else f"{value:.2f}×"


def listed(items: Iterable[object], comma: str = ", ") -> str:
    return comma.join(map(str, dict.fromkeys(items)))


def markdown(lines: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """Markdown; columns stand right unless they are in `left`."""
    head, *body = lines
    rule = [":--" if i in left else "--:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))
