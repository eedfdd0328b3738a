"""Fills pages from results files: tables, numbers in sentences, and marks of what is stale.

    python tools/results_tables.py              # writes the pages
    python tools/results_tables.py where 11.6   # files and commands of the numbers that show 11.6
    python tools/results_tables.py stale        # what was measured before its code changed

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function of this file.
A number in a sentence is `<!--=FILE:KEY-->11.6<!--/-->` (claims.py). A page with marks of stale
figures explains them between `<!-- stale -->`, or `<!-- stale in short -->`, and `<!-- end -->`.
When watched code changes, see code_versions.py.
"""

import argparse
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from claims import CLAIM, ROOT, STEPS, ClaimError, Claims, percent

PAGES = (
    "README.md",
    "docs/quality.md",
    "docs/performance.md",
    "docs/vllm.md",
    "docs/vllm-tiers.md",
    "docs/lm-eval.md",
    "docs/recipes.md",
    "docs/start.md",
    "docs/long-prompts.md",
    "docs/paged-cache.md",
    "docs/lab/answers.md",
    "docs/lab/composites.md",
    "docs/lab/parallel.md",
    *(f"docs/papers/{name}.md" for name in ("kv-compress", "lorc", "palu", "zack", "zdc")),
)
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NOTES = re.compile(r"(<!-- stale( in short)? -->\n).*?(<!-- end -->)", re.DOTALL)
CLAIMS = Claims()

Row = dict[str, Any]

FLAGS = {  # settings of perplexity-qwen.json: flags of kvfold, times smaller
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


def with_window(factor: float) -> float:
    """How much smaller 8192 tokens are with 128 of them in 16 bits, too."""
    return 1 / (1 / factor + 128 / 8192)


FACTOR_7 = "`--recipe small --factor 7`", 7


def windowed(factor: float) -> tuple[str, float]:
    return f"`small` {factor}x, window of 128", with_window(factor)


WINDOWS = {  # settings with an exact window, as FLAGS
    "small-4.3x-window": windowed(4.27),
    "small-7.9x-window": windowed(7.86),
    "small-11.9x-window": windowed(11.85),
}
FP8 = "vLLM's `--kv-cache-dtype fp8`", 2
QUESTIONS = {  # settings of questions-qwen.json, as FLAGS
    "bits-8": FLAGS["bits-8"],
    "bits-4": FLAGS["bits-4"],
    "bits-4-window": ("`--bits 4 --set window=128`", with_window(28672 / 7392)),
    "small-4x": FLAGS["small-4x"],
    "swift-4x": FLAGS["default"],
    "swift-5x": FLAGS["swift-5x-speed"],
    "small-6x": FLAGS["small-6x"],
    "small-7x": FACTOR_7,
    "small-8x": FLAGS["small-8x"],
    "small-10x": FLAGS["small-10x"],
    **WINDOWS,
    "kivi-4": ("KIVI, 4 bits", 3.1),
    "kivi-2": ("KIVI, 2 bits", 5),
    "palu-j": ("Palu J, half of the dimensions", 2),
    "zack": ("ZACK, half of the dimensions", 2),
    "fp8": FP8,
}

EVICTED, EVICTED_4 = 28672 / 29120, 28672 / 7840  # with what pages store for eviction; in 4 bits
RULER = {  # settings of ruler-qwen-*.json, as FLAGS
    "bits-8": FLAGS["bits-8"],
    "bits-4": FLAGS["bits-4"],
    "small-4x": FLAGS["small-4x"],
    "swift-4x": FLAGS["default"],
    "swift-5x": FLAGS["swift-5x-speed"],
    "small-7x": FACTOR_7,
    "small-8x": FLAGS["small-8x"],
    **WINDOWS,
    "kvzip-before": ("`kvzip` 1/4", 4 * EVICTED),
    "kvzip-repair-before": ("`kvzip` 1/4, repair", 4 * EVICTED),
    "kvzip-half-repair-bits-4-before": ("`kvzip` 1/2, repair, 4 bits", 2 * EVICTED_4),
    "kvzip-half-repair-bits-4-after": ("`kvzip` 1/2, repair, 4 bits, asked later", 2 * EVICTED_4),
    "fp8": FP8,
}


def results(name: str) -> Any:
    """A file of benchmarks/results."""
    return CLAIMS.results(name)


def mark(file: str, *names: str) -> str:
    """What follows the label of a stale row."""
    return f" {found}" if (found := CLAIMS.mark(file, *names)) else ""


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table, numbers to the right."""
    names = list(head)
    lines = [names, ["---", *["--:"] * (len(names) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def smaller(factor: float) -> str:
    return f"{factor:.1f}x".replace(".0x", "x")


# -- quality --------------------------------------------------------------------------------------


def qwen() -> str:
    """Loss of Qwen2.5-Coder-1.5B-Instruct by setting."""
    nats = {x["setting"]: x["nats"] for x in results("perplexity-qwen")["rows"]}

    def line(setting: str, flags: str, size: float) -> list[str]:
        lost = [percent(nats[setting][text]) for text in ("wiki", "python")]
        return [flags + mark("perplexity-qwen", setting), smaller(size), *lost]

    head = ["setting", "smaller", "Wikipedia", "Python"]
    return markdown(head, [line(name, *x) for name, x in FLAGS.items()])


def ruler() -> str:
    """Scores of RULER, and what settings lose, paired by question."""
    lengths = 4096, 8192, 16384
    files = [f"ruler-qwen-{tokens}" for tokens in lengths]
    found = [{row["setting"]: row for row in results(file)["rows"]} for file in files]

    def line(setting: str, label: str, size: float) -> list[str]:
        rows = [x.get(setting) for x in found]
        lost = [
            f"{100 * x['difference']:+.1f} ± {100 * x['difference_se']:.1f}" if x else ""
            for x in rows
        ]
        return [label + mark(files[0], setting), smaller(size), *lost]

    scores = [f"{100 * x['original']['score']:.1f} %" for x in found]
    first = ["uncompressed", "1x", *scores]
    head = ["setting", "smaller", *(f"{x} tokens" for x in lengths)]
    return markdown(head, [first, *(line(name, *x) for name, x in RULER.items())])


def questions() -> str:
    """Points that settings lose on 500 questions of GSM8K and on HumanEval, paired by question."""
    found = dict[str, dict[str, Row]]()
    for row in results("questions-qwen")["rows"]:
        found.setdefault(row["setting"], {})[row["suite"]] = row

    def line(setting: str, label: str, size: float) -> list[str]:
        suites = [found[setting][x] for x in ("math", "code")]
        lost = [(x["difference"], x["difference_se"]) for x in suites]
        points = [f"{100 * mean:+.1f} ± {100 * error:.1f}" for mean, error in lost]
        return [label + mark("questions-qwen", setting), smaller(size), *points]

    original = found["original"]
    first = [f"{100 * original[x]['score']:.1f} %" for x in ("math", "code")]
    head = ["setting", "smaller", "GSM8K, 500", "HumanEval, 164"]
    rows = (line(name, *x) for name, x in QUESTIONS.items())
    return markdown(head, [["uncompressed", "1x", *first], *rows])


def smollm2() -> str:
    """Increase in perplexity of SmolLM2-135M-Instruct by recipe and size."""
    rows = {row["name"]: row for row in results("quality-smollm2-packaged")["rows"]}
    sizes = [2, 3, 4, 5, 6, 8, 10, 14]

    def cell(name: str) -> str:
        if name not in rows:
            return ""
        lost = [increase(rows[name], rows["original"], text) for text in ("wiki", "python")]
        stale = mark("quality-smollm2-packaged", name)
        return ", ".join(percent(x).replace(" %", "") for x in lost) + stale

    lines = [[f"`{x}`", *(cell(f"{x} {n}x") for n in sizes)] for x in ("swift", "lean", "small")]
    plain = {2: "int8, rotated", 3: "KIVI 4 bits", 4: "int4, rotated", 5: "int3, rotated"}
    lines.append(
        ["without maps", *(cell(plain[n]) + note(plain[n]) if n in plain else "" for n in sizes)]
    )
    return markdown(["", *(f"{n}x" for n in sizes)], lines)


def lm_eval() -> str:
    """Scores of choice tasks by lm-evaluation-harness and by `kvfold eval`."""
    names = {
        "eval": "`kvfold eval`",
        "lm-eval": "`lm_eval --model kvfold`",
        "lm-eval-vllm": "`lm_eval --model vllm`",
    }
    rows = {(x["bits"], x["way"], x["task"]): x for x in results("lm-eval-smollm2")["rows"]}
    tasks = ["piqa", "arc_easy"]

    def line(bits: int, way: str) -> list[str]:
        found = [rows[bits, way, task] for task in tasks]
        scores = [f"{x['accuracy']:.2f}, {x['accuracy_per_byte']:.2f}" for x in found]
        apart = [f"{x['from_lm_eval']['mean']:.5f}" if "from_lm_eval" in x else "" for x in found]
        return [f"{bits} bits{mark('lm-eval-smollm2')}", names[way], *scores, *apart]

    head = ["cache", "command", *tasks, *(f"nats, {task}" for task in tasks)]
    return markdown(head, [line(bits, way) for bits in (16, 8) for way in names])


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
        "lorc 0.6": "LoRC, .6 of the dimensions",
        "lean 4x": "`lean`",
        "small 4x": "`small`",
        "small 8x": "`small`",
    }

    def line(name: str, label: str) -> list[str]:
        texts = ("wiki-heldout", "source-code")
        lost = [
            percent(increase(rows[name], rows["original"], text))
            if text in rows[name]["texts"]
            else "not measured"
            for text in texts
        ]
        label += mark("quality-smollm2", name)
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
        return [f"`{policy}`{mark('asked-smollm2', policy)}", *cells, percent(lost)]

    policies = ["kvzip", "kvzip-keys", "learned", "auto", "expected-attention", "kv-compress"]
    policies += ["h2o", "snapkv", "streaming", "random"]
    head = ["policy", "1/2 kept", "1/4 kept", "1/8 kept", "Wikipedia at 1/4"]
    first = ["nothing evicted: all kept", right(original), right(original), right(original), ""]
    return markdown(head, [first, *map(line, policies)])


# -- speed and memory -----------------------------------------------------------------------------


CACHES = {  # kinds of benchmarks/vllm_speed.py and vllm_agents.py
    "bf16-full": "vLLM, bf16",
    "fp8": "vLLM, `--kv-cache-dtype fp8`",
    "bits-4": "kvfold, 4 bits",
    "swift-5x": "kvfold, `swift` 5x, folded",
    "maps-swift-5x": "kvfold, `swift` 5x",
    "swift-5.1x-odd": "kvfold, `swift` 5.1x, keys 8/4",
    "lean-8x": "kvfold, `lean` 8x",
}


def vllm() -> str:
    """Time of a decode step and of a first token under vLLM."""
    runs = [("A", "vllm-8b", "bf16-full"), ("A", "vllm-8b", "bits-4"), ("A", "vllm-8b", "swift-5x")]
    runs += [("B", "vllm-maps-8b", name) for name in ("bf16-full", "fp8", "maps-swift-5x")]
    runs += [("C", "vllm-odd-8b", name) for name in ("fp8", "bits-4", "swift-5.1x-odd")]

    def line(run: str, file: str, name: str) -> list[str]:
        report = results(file)
        steps = {x["batch"]: x["ms"] for x in report["rows"] if x["variant"] == name}
        (first,) = (x["ms"] for x in report["first_tokens"] if x["variant"] == name)
        (size,) = (x["token_bytes"] for x in report["capacity"] if x["variant"] == name)
        times = [f"{steps[n]:.2f}" if n in steps else "–" for n in (1, 8, 32, 64)]
        label = CACHES[name] + mark(file, name)
        return [label, run, f"{size:,.0f}", *times, f"{first:.0f}"]

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
    rows = (
        [label + mark("suites-qwen", name), f"{size:,}", f"{times[name]:.2f}"]
        for name, (label, size) in names.items()
    )
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
        label += mark("decode-tiers-once-8b", name)
        return [label, f"{size:,.0f}", *cells, f"{first[name]:.0f}" if name in first else "–"]

    head = ["", "bytes per token", "1", "8", "64", "first token"]
    return markdown(head, (line(*x) for x in names.items()))


def trace() -> str:
    """Requests of a trace under vLLM with a small cache."""

    def line(file: str, x: Row) -> list[str]:
        times = [f"{x['ms_per_token']:.1f}", f"{x['first_s']:.2f}", f"{x['requests_per_s']:.1f}"]
        answered = f"{x['answered']} of {x['requests']}"
        label = CACHES[x["variant"]] + mark(file, "rates", x["variant"])
        return [label, some[file][0], f"{x['rate']:g}", answered, *times]

    head = ["", "run", "requests/s that come", "answered"]
    head += ["ms/token", "first token, s", "answered/s"]
    some = {
        "vllm-8b": ("A", (18, 22, 26)),
        "vllm-trace-8b": ("D", (18,)),
        "vllm-odd-8b": ("C", (30,)),
    }
    rows = (
        (file, x)
        for file, (_, rates) in some.items()
        for x in results(file)["rates"]
        if x["rate"] in rates
    )
    return markdown(head, (line(*x) for x in rows))


def agents() -> str:
    """Sessions of agents that one GPU bears under vLLM."""

    def line(label: str, run: Row, level: Row) -> list[str]:
        sessions = f"{level['sessions']}{'' if level['borne'] else ', not borne'}"
        return [label, f"{run['capacity']['tokens'] / 1e6:.2f} M", sessions, *_of_turns(level)]

    head = ["cache", "tokens that fit", "sessions", "a token", "first token"]
    files = "vllm-agents-8b", "vllm-documents-128-8b", "vllm-agents-odd-8b"
    return markdown(head, (line(*x) for x in _of_vllm("levels", *files)))


def documents() -> str:
    """Questions about long documents that one GPU answers under vLLM."""

    def line(label: str, _: Row, level: Row) -> list[str]:
        found = f"{level['found_in_cache']:.0%}".replace("%", " %")
        answered = f"{level['answered_per_s']:.2f}"
        return [label, str(level["sessions"]), answered, found, *_of_turns(level)]

    head = ["cache", "people", "answered a second", "found in the cache", "a token", "first token"]
    files = "vllm-documents-8b", "vllm-documents-128-8b"
    return markdown(head, (line(*x) for x in _of_vllm("documents", *files)))


def _of_vllm(part: str, *files: str) -> Iterator[tuple[str, Row, Row]]:
    """The cache, the run and each level of a part of vllm_agents.py's reports."""
    for file in files:
        for run in results(file)["runs"]:
            kind = run["settings"]["kind"]
            for level in run[part]:
                yield CACHES[kind] + mark(file, kind), run, level


def _of_turns(level: Row) -> list[str]:
    """Cells of a token's time and a first token's, median and 95 %."""
    return [
        f"{level[f'{of}_ms_median']:.{digits}f}, {level[f'{of}_ms_95']:.{digits}f}"
        for of, digits in (("token", 1), ("first", 0))
    ]


def vllm_start() -> str:
    """Seconds until vLLM can serve, on one machine."""

    def line(row: Row) -> list[str]:
        kernels = f"{row['kernels']} in {row['kernels_s']} s" if "kernels" in row else ""
        cache = CACHES[row["kind"]] + mark("vllm-start-8b", row["kind"])
        return [f"{row['run']}", cache, f"{row['ready_s']:.0f}", kernels]

    rows = [x for x in results("vllm-start-8b")["rows"] if x["machine"] == 3]
    return markdown(["run", "cache", "ready, s", "kernels compiled"], map(line, rows))


def throughput() -> str:
    """Tokens a second with eviction where memory is short."""
    rows = [x for x in results("serving-8b")["rows"] if x["kind"] == "throughput"]
    rows = sorted(rows, key=lambda x: (x["tokens"], x["rate"]))
    whole = {x["tokens"]: x["tokens_per_s"] for x in rows if x["engine"] == "bf16-full"}
    all_of = {"bf16-full": "all", "swift-4.6x-odd": "all, `swift` for speed 4.6x smaller"}

    def line(x: Row) -> list[str]:
        gain = x["tokens_per_s"] / whole[x["tokens"]]
        kept = f"{x['kept']:,} tokens" if x["kept"] else all_of[x["engine"]]
        speed = f"{x['tokens_per_s']:,.0f}"
        label = f"{x['tokens']:,} tokens{mark('serving-8b', 'throughput')}"
        return [label, kept, speed, f"{gain:.2f}x", str(x["largest_batch"])]

    return markdown(
        ["prompts", "kept of each", "tokens/s", "gain", "largest batch"], map(line, rows)
    )


COMPOSITES = "serving-composites-8b"  # of benchmarks/serving_composites.py
HALVES = {"zack": "zack 0.5", "zdc": "zdc 0.5, packaged text alone, 16K tokens"}  # on SmolLM2


def composites() -> str:
    """Times of ZACK, ZDC and their composites through the server, beside what they lose."""
    try:
        times = {(x["method"], x["load"]): x for x in results(COMPOSITES)["rows"]}
    except ClaimError:  # nothing was measured yet
        times = {}

    def cell(name: str, load: str) -> str:
        if (row := times.get((name, load))) is None:
            return "not measured"
        means = [row[key] and row[key]["mean"] for key in ("ttft_ms", "tbt_ms", "jct_ms")]
        digits = zip(means, (0, 1, 0), strict=True)
        shown = ", ".join("–" if x is None else f"{x:,.{n}f}" for x, n in digits)
        done = row["completed"], row["requests"]
        return shown + (f" ({done[0]} of {done[1]} done)" if done[0] < done[1] else "")

    def line(name: str) -> list[str]:
        pytorch = name.startswith(("Keyformer", "GEAR", "KVQuant"))
        share, *losses = quality_of(name)
        label = name.replace(" .5", ", half of the dimensions").replace("zack", "ZACK")
        label = label.replace("zdc", "ZDC") + mark(COMPOSITES, name)
        loads = (cell(name, load) for load in ("together", "alone"))
        return [label, share, "plain PyTorch" if pytorch else "kernels", *losses, *loads]

    head = ["method", "kept", "decoded by", "`reference:gqa`", "SmolLM2", "12 together", "alone"]
    names = ["uncompressed", "zack .5", "zdc .5", "ZDC, two widths", "int4", "H2O", "H2O-ZDC"]
    names += ["Keyformer", "Keyformer-Z", "GEAR 4 bits", "GEAR-ZDC 4 bits", "GEAR-ZDC 2 bits"]
    return markdown(head, map(line, [*names, "KVQuant 4 bits", "KVQuant-Z 4 bits"]))


def quality_of(name: str) -> tuple[str, str, str]:
    """What is kept with a method's setting, and what it loses on Wikipedia with reference:gqa and
    with SmolLM2 (nats)."""
    nats = STEPS["nats"]
    if name == "uncompressed":
        return "1", "0", "0"
    if name == "ZDC, two widths":
        report, text = results("hybrid-gqa"), "wiki-heldout"
        setting = "ZDC (0.0, 0.0) (0.5, 0.5) 0.2..0.6"
        (row,) = (x["texts"][text] for x in report["rows"] if x["name"] == setting)
        return nats(row["kept_fraction"]), nats(row["nll"] - report["whole"][text]["nll"]), "–"
    if name in ("zack .5", "zdc .5"):
        recipe = name.split()[0]
        (row,) = (x for x in results("quality-gqa")["rows"] if is_half(x, recipe))
        gqa = nats(row["delta_nll"]["wiki-heldout"][0]) + CLAIMS.mark("quality-gqa", recipe, "0.5")
        return nats(row["kept_fraction"]), gqa, lost("quality-smollm2", HALVES[recipe])
    (row,) = (x for x in results("papers-gqa")["rows"] if x["name"] == name)
    return nats(row["kept_fraction"]), lost("papers-gqa", name), lost("papers-smollm2", name)


def is_half(row: Row, recipe: str) -> bool:
    return (row["recipe"], row["keep"]) == (recipe, 0.5)


def lost(file: str, name: str) -> str:
    """What a setting loses on Wikipedia (nats), with its mark."""
    if all(x["name"] != name for x in results(file)["rows"]):
        return "–"
    return STEPS["nats"](CLAIMS.lost(file, name, "wiki-heldout")) + CLAIMS.mark(file, name)


def divergence() -> str:
    """What SmolLM2-135M-Instruct loses along its own answers, by setting."""

    def line(file: str, row: Row) -> list[str]:
        quarters = [x["kl"][0] for name, x in row.items() if " to " in name]
        sizes = [smaller(row["smaller"][x]) for x in ("1024", "8192")]
        losses = [f"{row['all']['kl'][0]:.4f} ± {row['all']['kl'][1]:.4f}"]
        losses += [f"{x:.3f}" for x in (quarters[0], quarters[-1])]
        label = f"`{row['setting']}`" + mark(file, row["setting"])
        return [label, *sizes, *losses, f"{100 * row['all']['flips'][0]:.1f} %"]

    head = ["setting", "smaller at 1K", "at 8K", "KL", "first quarter", "last quarter", "flips"]
    files = [f"answer-divergence-{x}smollm2" for x in ("engine-", "", "windows-")]
    return markdown(head, [line(x, row) for x in files for row in results(x)["rows"]])


def quantisers() -> str:
    """What published quantisers lose along SmolLM2's own answers, beside kvfold's settings."""
    file, other = (f"{x}-divergence-quantisers-smollm2" for x in ("answer", "text"))
    texts = {x["setting"]: x["nats"] for x in results(other)["rows"]}
    lines = []
    for row in sorted(results(file)["rows"], key=lambda x: x["smaller"]["1024"]):
        sizes = [smaller(row["smaller"][x]) for x in ("1024", "8192")]
        losses = [f"{x[0]:.3f} ± {x[1]:.3f}" for x in (row["all"]["kl"], row["nats"])]
        text = texts.get(row["setting"])
        losses.append(f"{text[0]:.3f} ± {text[1]:.3f}" if text else "–")
        label = f"`{row['setting']}`" + mark(file, row["setting"])
        lines.append([label, *sizes, *losses, f"{100 * row['all']['flips'][0]:.1f} %"])
    head = ["setting", "smaller at 1K", "at 8K", "KL", "nats", "text", "flips"]
    return markdown(head, lines)


def quantiser_pairs() -> str:
    """Settings of kvfold less published quantisers, paired by question."""
    lines = [
        [f"`{x['setting']}`", f"`{x['less']}`", *(f"{y[0]:+.3f} ± {y[1]:.3f}" for y in losses)]
        for x in results("answer-divergence-quantisers-smollm2")["pairs"]
        for losses in ((x["kl"], x["nats"]),)
    ]
    return markdown(["setting", "instead of", "KL", "nats"], lines)


def windows() -> str:
    """What exact tokens win, paired by question."""
    files = [f"answer-divergence-{x}smollm2" for x in ("engine-", "windows-", "")]
    pairs = [x for file in files for x in results(file)["pairs"]]
    lines = [
        [f"`{x['setting']}`", f"`{x['less']}`", f"{x['kl'][0]:+.4f} ± {x['kl'][1]:.4f}"]
        for x in pairs
    ]
    return markdown(["setting", "instead of", "KL"], lines)


QUALITY = (
    qwen,
    questions,
    ruler,
    smollm2,
    lm_eval,
    published,
    eviction,
    divergence,
    windows,
    quantisers,
    quantiser_pairs,
)
SPEED = (
    vllm,
    qwen_steps,
    engine_steps,
    trace,
    agents,
    documents,
    vllm_start,
    throughput,
    composites,
)
TABLES: dict[str, Callable[[], str]] = {table.__name__: table for table in (*QUALITY, *SPEED)}


def filled(text: str, claims: Claims = CLAIMS) -> str:
    """A page's text with its tables, its numbers and its marks as the results say."""
    claims.marked.clear()
    text = MARKED.sub(lambda x: f"{x[1]}\n{TABLES[x[2]]()}\n\n{x[3]}", text)
    text = claims.filled(text)
    if claims.marked and not NOTES.search(text):
        raise ClaimError("a page with stale figures needs `<!-- stale -->` and `<!-- end -->`")
    return NOTES.sub(lambda x: f"{x[1]}\n{claims.footnote(short=bool(x[2]))}\n{x[3]}", text)


def write() -> None:
    """Fill all pages."""
    for page in PAGES:
        path = ROOT / page
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


def where(shown: str) -> Iterator[str]:
    """Where the numbers of pages that show these characters are from."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for file, key, number in CLAIM.findall(text):
            if shown in number or shown == f"{file}:{key}":
                yield f"{page}: {CLAIMS.described(file, key)}"
        for name, table in re.findall(r"<!-- table: (\w+) -->\n(.*?)<!-- end -->", text, re.DOTALL):
            if re.search(rf"(?<![\d.]){re.escape(shown)}(?![\d.])", table):
                lines = [f"{page}: table `{name}`, by {name}() of tools/results_tables.py"]
                yield "\n".join(lines + [x for file in files_of(name) for x in CLAIMS.origin(file)])


def files_of(table: str) -> list[str]:
    """The results files that a table is made of."""
    CLAIMS.opened.clear()
    TABLES[table]()
    return list(CLAIMS.opened)


def stale() -> Iterator[str]:
    """What was measured before its code changed, and code that nobody has judged yet."""
    for file in CLAIMS.files:
        some = CLAIMS.files[file].get("some", {})
        names = {x for rows in some.values() for row in rows for x in row.split(" & ")}
        for change in CLAIMS.changes_of(file, names):
            rows = f" ({', '.join(some[change.code])})" if change.code in some else ""
            yield f"benchmarks/results/{file}.json{rows}: {change}"
    for name, paths in CLAIMS.versions.undecided().items():
        yield undecided(name, paths)


def undecided(name: str, paths: Iterable[str]) -> str:
    """What a change of watched code makes stale, and what to do."""
    pages = pages_by_file()
    files = [x for x, entry in CLAIMS.files.items() if name in codes(entry)]
    figures = "".join(f"    {x}.json: {', '.join(pages.get(x, ['no page']))}\n" for x in files)
    return (
        f"{', '.join(paths)} changed. They decide figures of\n{figures}Run\n"
        f'    python tools/results_tables.py changed "{name}" "WHAT CHANGED"   if these may move '
        "(pages then mark them), or\n"
        f'    python tools/results_tables.py same "{name}" "WHY NOT"           if they cannot'
    )


def pages_by_file() -> dict[str, list[str]]:
    """The pages that show figures of each results file."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        files = [file for file, _, _ in CLAIM.findall(text)]
        files += [x for _, name, _ in MARKED.findall(text) for x in files_of(name)]
        for file in dict.fromkeys(files):
            found.setdefault(file, []).append(page)
    return found


def codes(entry: Row) -> list[str]:
    """Code that decides rows of a results file."""
    return [*entry.get("code", []), *entry.get("some", {})]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("where", help="file and command of a number").add_argument("number")
    commands.add_parser("stale", help="what was measured before its code changed")
    for name in ("changed", "same"):
        command = commands.add_parser(name, help="judge a change of watched code")
        command.add_argument("code", choices=list(CLAIMS.code))
        command.add_argument("reason")
    measured = commands.add_parser(
        "measured", help="take a results file as measured with today's code"
    )
    measured.add_argument("file", choices=list(CLAIMS.files))
    measured.add_argument("--code", choices=list(CLAIMS.code), help="of rows that it decides alone")
    args = parser.parse_args()
    if args.command in ("where", "stale"):
        print("\n".join(where(args.number) if args.command == "where" else stale()))
        return
    if args.command in ("changed", "same"):
        CLAIMS.versions.decide(args.code, args.reason, same=args.command == "same")
    elif args.command == "measured":
        CLAIMS.versions.measured(args.file, codes(CLAIMS.files[args.file]), args.code)
    write()


if __name__ == "__main__":
    main()
