"""Writes the tables of docs/quality.md and docs/performance.md from benchmarks/results.

    python tools/results_tables.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, NAME is a function of this file.
"""

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ("docs/quality.md", "docs/performance.md")
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = dict[str, Any]

FLAGS = {  # settings of suites-qwen.json: flags of kvfold, times smaller
    "bits-8": ("`--bits 8`", 28672 / 14560),
    "bits-4": ("`--bits 4`", 28672 / 7392),
    "default": ("default (`swift` for speed)", 4),
    "swift-5x-speed": ("`--recipe swift --set prefer=speed --factor 5`", 5),
    "swift-6x-speed": ("`--recipe swift --set prefer=speed --factor 6`", 6),
    "lean-4x": ("`--recipe lean --factor 4`", 4),
    "lean-6x": ("`--recipe lean --factor 6`", 6),
    "lean-8x": ("`--recipe lean --factor 8`", 8),
    "small-4x": ("`--recipe small --factor 4`", 4),
    "small-6x": ("`--recipe small --factor 6`", 6),
    "small-8x": ("`--recipe small --factor 8`", 8),
    "small-10x": ("`--recipe small --factor 10`", 10),
    "small-14x": ("`--recipe small --factor 14`", 14),
}


def results(name: str) -> Any:
    """A file of benchmarks/results."""
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table, numbers to the right."""
    names = list(head)
    lines = [names, ["---", *["--:"] * (len(names) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def percent(nats: float) -> str:
    """The increase in perplexity that an increase in cross-entropy (nats/token) is."""
    value = 100 * math.expm1(nats)
    if value > 1000:
        return "over +1000 %"
    digits = 2 if abs(value) < 0.1 else 1 if value < 100 else 0
    return f"{value:+.{digits}f} %"


def smaller(factor: float) -> str:
    return f"{factor:.1f}x".replace(".0x", "x")


def extent(values: Iterable[int]) -> str:
    """A number, or the smallest and the largest of several measurements."""
    low, high = min(numbers := list(values), default=None), max(numbers, default=None)
    return "" if low is None else str(low) if low == high else f"{low} to {high}"


# -- quality --------------------------------------------------------------------------------------


def qwen() -> str:
    """Loss and answers of Qwen2.5-Coder-1.5B-Instruct by setting."""
    rows = results("suites-qwen")["rows"]

    def right(setting: str, suite: str) -> str:
        return extent(x[suite]["right"] for x in rows if x["setting"] == setting and suite in x)

    def line(setting: str, flags: str, size: float) -> list[str]:
        losses = next(x["nats"] for x in rows if x["setting"] == setting and x.get("nats"))
        lost = [percent(losses[text]) for text in ("wiki", "python")]
        return [flags, smaller(size), *lost, right(setting, "code"), right(setting, "math")]

    head = ["setting", "smaller", "Wikipedia", "Python", "HumanEval, of 164", "GSM8K, of 200"]
    first = ["uncompressed", "1x", "", "", right("original", "code"), right("original", "math")]
    return markdown(head, [first, *(line(name, *x) for name, x in FLAGS.items())])


def answers() -> str:
    """All questions of GSM8K with Qwen2.5-Coder-1.5B-Instruct."""
    names = {
        "original": "uncompressed",
        "default": "default, folded, 4x",
        "maps-default": "default, 4x",
        "lean-6x": "`lean`, 6x",
    }
    rows = results("suites-qwen")["all_questions"]["rows"]
    rows = [row for row in rows if row["engine"] == "kvfold"]

    def line(row: Row) -> list[str]:
        counts = (row["math"]["right"], row["math"]["gained"], row["math"]["lost"])
        return [names[row["setting"]], *map(str, counts), str(row["code"]["right"])]

    head = [
        "setting",
        "right, of 1319",
        "only compressed",
        "only uncompressed",
        "HumanEval, of 164",
    ]
    return markdown(head, map(line, rows))


def smollm2() -> str:
    """Increase in perplexity of SmolLM2-135M-Instruct by recipe and size."""
    rows = {row["name"]: row for row in results("quality-smollm2-packaged")["rows"]}
    sizes = [2, 3, 4, 5, 6, 8, 10, 14]

    def cell(name: str) -> str:
        if name not in rows:
            return ""
        lost = [increase(rows[name], rows["original"], text) for text in ("wiki", "python")]
        return ", ".join(percent(x).replace(" %", "") for x in lost)

    lines = [[f"`{x}`", *(cell(f"{x} {n}x") for n in sizes)] for x in ("swift", "lean", "small")]
    plain = {2: "int8, rotated", 3: "KIVI 4 bits", 4: "int4, rotated", 5: "int3, rotated"}
    lines.append(
        ["without maps", *(cell(plain[n]) + note(plain[n]) if n in plain else "" for n in sizes)]
    )
    return markdown(["", *(f"{n}x" for n in sizes)], lines)


def note(name: str) -> str:
    """What a setting without maps is called in a cell, with its exact size."""
    rows = {row["name"]: row for row in results("quality-smollm2-packaged")["rows"]}
    short = name.removesuffix(", rotated")
    return f" ({short}, {1 / rows[name]['kept_fraction']:.1f}x)"


def increase(row: Row, original: Row, text: str) -> float:
    """Increase in cross-entropy (nats/token), the mean over windows."""
    losses = (x["texts"][text]["window_nll"] for x in (row, original))
    return statistics.mean(a - b for a, b in zip(*losses, strict=True))


def published() -> str:
    """Published methods beside kvfold's recipes on SmolLM2-135M-Instruct."""
    rows = {row["name"]: row for row in results("quality-smollm2")["rows"]}
    names = {
        "KIVI 4 bits": "KIVI, 4 bits",
        "KIVI 2 bits": "KIVI, 2 bits",
        "palu-j 0.5": "Palu (joint), half of the dimensions",
        "palu-j 0.5, 4 bits": "Palu (joint), half, 4 bits",
        "zack 0.5": "ZACK, half of the dimensions",
        "lorc 0.5": "LoRC, half of the dimensions",
        "swift 4x": "`swift`",
        "lean 4x": "`lean`",
        "small 4x": "`small`",
        "small 8x": "`small`",
    }

    def line(name: str, label: str) -> list[str]:
        texts = ("wiki-heldout", "source-code")
        lost = [percent(increase(rows[name], rows["original"], text)) for text in texts]
        return [label, smaller(1 / rows[name]["kept_fraction"]), *lost]

    head = ["method", "smaller", "Wikipedia", "Python"]
    return markdown(head, (line(*x) for x in names.items()))


def eviction() -> str:
    """Facts that SmolLM2-135M-Instruct still finds after eviction, by policy."""
    rows = results("asked-smollm2")["rows"]
    found = {(row["evict"], row["keep"]): row for row in rows}
    original = next(row for row in rows if row["evict"] is None)

    def right(row: Row | None) -> str:
        return str(row["answers"]["keys"]["right"]) if row else ""

    def line(policy: str) -> list[str]:
        cells = [right(found.get((policy, keep))) for keep in (0.5, 0.25, 0.125)]
        lost = increase(found[policy, 0.25], original, "wiki-heldout")
        return [f"`{policy}`", *cells, percent(lost)]

    policies = ["kvzip", "kvzip-keys", "learned", "auto", "expected-attention", "kv-compress"]
    policies += ["h2o", "snapkv", "streaming", "random"]
    head = ["policy", "1/2 kept", "1/4 kept", "1/8 kept", "Wikipedia at 1/4"]
    first = ["nothing evicted: all kept", right(original), right(original), right(original), ""]
    return markdown(head, [first, *map(line, policies)])


# -- speed and memory -----------------------------------------------------------------------------


def vllm() -> str:
    """Time of a decode step and of a first token under vLLM."""
    runs = [("A", "vllm-8b", "bf16-full"), ("A", "vllm-8b", "bits-4"), ("A", "vllm-8b", "swift-5x")]
    runs += [("B", "vllm-maps-8b", name) for name in ("bf16-full", "fp8", "maps-swift-5x")]
    names = {
        "bf16-full": "vLLM, bf16",
        "fp8": "vLLM, `--kv-cache-dtype fp8`",
        "bits-4": "kvfold, 4 bits",
        "swift-5x": "kvfold, `swift` 5x, folded",
        "maps-swift-5x": "kvfold, `swift` 5x",
    }

    def line(run: str, file: str, name: str) -> list[str]:
        report = results(file)
        steps = {x["batch"]: x["ms"] for x in report["rows"] if x["variant"] == name}
        (first,) = (x["ms"] for x in report["first_tokens"] if x["variant"] == name)
        (size,) = (x["token_bytes"] for x in report["capacity"] if x["variant"] == name)
        times = [f"{steps[n]:.2f}" if n in steps else "–" for n in (1, 8, 32, 64)]
        return [names[name], run, f"{size:,.0f}", *times, f"{first:.0f}"]

    head = ["", "run", "bytes per token", "1", "8", "32", "64", "first token"]
    return markdown(head, (line(*x) for x in runs))


def qwen_steps() -> str:
    """Time of a decode step of Qwen2.5-Coder-1.5B in kvfold's engine."""
    names = {
        "original": ("uncompressed", 28672),
        "bits-8": ("`--bits 8`", 14560),
        "bits-4": ("`--bits 4`", 7392),
        "maps-default": ("default (`swift` for speed, 4x)", 7165),
        "swift-4x": ("`--recipe swift --factor 4` (balanced)", 7176),
    }
    times = results("suites-qwen")["steps_one_machine"]["step_ms"]
    rows = ([label, f"{size:,}", f"{times[name]:.2f}"] for name, (label, size) in names.items())
    return markdown(["", "bytes per token", "ms a step"], rows)


def engine_steps() -> str:
    """Time of a decode step of Llama-3.1-8B's shape in kvfold's engine."""
    names = {
        "bf16-full": "uncompressed",
        "int8-full": "8 bits",
        "swift-int4": "`swift`, 4 bits",
        "swift-4.6x-odd": "`swift` for speed, 4.6x",
        "lean-6x-odd": "`lean` for speed, 6x",
        "lean-8x": "`lean`, 8x, the same tiers in all heads",
    }
    report = results("decode-tiers-once-8b")
    steps = {(x["variant"], x["batch"]): x for x in report["rows"]}
    first = {x["variant"]: x["ms"] for x in report["first_tokens"]}

    def line(name: str, label: str) -> list[str]:
        size = steps[name, 64]["cache_bytes"] / 64 / 8192
        cells = [f"{steps[name, n]['ms']:.2f}" if (name, n) in steps else "–" for n in (1, 8, 64)]
        return [label, f"{size:,.0f}", *cells, f"{first[name]:.0f}" if name in first else "–"]

    head = ["", "bytes per token", "1", "8", "64", "first token"]
    return markdown(head, (line(*x) for x in names.items()))


def trace() -> str:
    """Requests of a trace under vLLM with a small cache."""
    names = {"bf16-full": "bf16", "bits-4": "kvfold, 4 bits", "swift-5x": "kvfold, `swift` 5x"}

    def line(x: Row) -> list[str]:
        times = [f"{x['ms_per_token']:.1f}", f"{x['first_s']:.2f}", f"{x['requests_per_s']:.1f}"]
        return [
            names[x["variant"]],
            f"{x['rate']:g}",
            f"{x['answered']} of {x['requests']}",
            *times,
        ]

    head = ["", "requests/s that come", "answered", "ms/token", "first token, s", "answered/s"]
    return markdown(head, map(line, results("vllm-8b")["rates"]))


def throughput() -> str:
    """Tokens a second with eviction where memory is short."""
    rows = [x for x in results("serving-8b")["rows"] if x["kind"] == "throughput"]
    rows = sorted(rows, key=lambda x: (x["tokens"], x["rate"]))
    whole = {x["tokens"]: x["tokens_per_s"] for x in rows if not x["kept"]}

    def line(x: Row) -> list[str]:
        gain = x["tokens_per_s"] / whole[x["tokens"]]
        kept = f"{x['kept']} tokens" if x["kept"] else "all"
        speed = f"{x['tokens_per_s']:,.0f}"
        return [f"{x['tokens']:,} tokens", kept, speed, f"{gain:.2f}x", str(x["largest_batch"])]

    return markdown(
        ["prompts", "kept of each", "tokens/s", "gain", "largest batch"], map(line, rows)
    )


QUALITY = (qwen, answers, smollm2, published, eviction)
SPEED = (vllm, qwen_steps, engine_steps, trace, throughput)
TABLES: dict[str, Callable[[], str]] = {table.__name__: table for table in (*QUALITY, *SPEED)}


def filled(text: str) -> str:
    """A page's text with its tables as the results say."""
    return MARKED.sub(lambda x: f"{x[1]}\n{TABLES[x[2]]()}\n\n{x[3]}", text)


def main() -> None:
    for page in PAGES:
        path = ROOT / page
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
