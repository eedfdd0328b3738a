"""What an eviction loses that nobody had asked about: right answers, and loss on the text after it.

    python benchmarks/asked_after.py --model reference:smollm2 --length 512 --ctx 640 --windows 8 \
        --policies kvzip keydiff-all kv-compress --text wiki.txt --json asked.json

A context of --length tokens is read, evicted to a share, and then asked about, or continued by the
rest of a window of --ctx tokens of --text. Contexts to ask about are RULER's (`evaluation/ruler`):
one of several keys, all values of a key, a chain of variables. A model that chats gets them as a
user's turn by its chat template, and the beginning of an answer; an answer counts where it holds
the number, or in parts, where several are asked for. The policy `auto` is measured first, and the
row says which one it was. --together feeds all contexts and windows at once, with the same outcome.
--recipe and --factor: rows that are evicted are planned in dimensions and bits; `learned` scores
are learned of them. --repair: each case once more, with rows that stay repaired.
--svg FILE draws what --json holds: answers and loss against bytes.
"""

import dataclasses
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import quality
import together
from kvfold import recipes
from kvfold.compression.compressor import Compressor
from kvfold.config import AUTO, CacheConfig
from kvfold.evaluation import auto, ruler, scores
from kvfold.evaluation.measure import Measured, Measurement, measure
from kvfold.evaluation.perplexity import PerplexityResult, paired_difference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a policy and the share of rows that it keeps; None: all of them."""

    evict: str | None = None
    keep: float | None = None
    repair: bool = False

    @property
    def name(self) -> str:
        if not self.keep:
            return "original"
        return f"{self.evict} {self.keep:g}{' repaired' * self.repair}"

    def cache(self, page: int) -> CacheConfig:
        keep = self.keep
        return CacheConfig(page=page, evict=self.evict, keep_tokens=keep, repair=self.repair)


class Bench(quality.Bench):
    """Every case answers the same questions and reads the same windows."""

    @cached_property
    def folded(self) -> Any:
        """The model with rows as --recipe and --factor plan them; without them, as it is."""
        given = self.arguments
        if given.recipe is None:
            return self.model
        how = {"calib": given.calib, "max_tokens": given.calib_tokens}
        compressor = Compressor(self.model, recipes.get(given.recipe), self.tokenizer, **how)
        prepared = compressor.prepare(given.stats)
        folded = prepared.folded_copy(prepared.plan_factor(given.factor))
        if "learned" in given.policies:
            scores.learn_scores(folded, self.tokenizer, scores.readings(compressor))
        return folded

    def measure(self, cache: CacheConfig) -> Measured:
        given = self.arguments
        how = {"length": given.length, "contexts": given.contexts, "facts": given.facts}
        rows = {kind: ruler.examples(kind, self.tokenizer, **how) for kind in given.questions}
        what = Measurement(
            windows=self.texts,
            tasks={kind: own for kind, own in rows.items() if own},
            cache=cache,
            scored_from=given.length,
        )
        model = self.folded if cache.evict else self.model
        return (together.measure if given.together else measure)(model, self.tokenizer, what)

    def row(self, case: Case) -> dict[str, Any]:
        cache, begin = case.cache(self.arguments.page), time.perf_counter()
        result: dict[str, Any] = {"name": case.name, **dataclasses.asdict(case)}
        if case.evict == AUTO:
            own = together.measure if self.arguments.together else measure
            with patch("kvfold.evaluation.auto.measure", own):
                trials = auto.trials(self.folded, self.tokenizer, cache)
            cache = dataclasses.replace(cache, evict=auto.choose(trials))
            result |= {"chosen": cache.evict, "trials": [dataclasses.asdict(x) for x in trials]}
        found = self.measure(cache)
        for kind, asked in found.tasks.items():
            right = asked.scores["contains"].mean * asked.num_examples
            result.setdefault("answers", {})[kind] = {"right": right, "asked": asked.num_examples}
        if found.footprint is not None:
            result |= dataclasses.asdict(found.footprint)
        result["texts"] = {name: dataclasses.asdict(x) for name, x in found.texts.items()}
        return result | {"seconds": time.perf_counter() - begin}

    def lost(self, row: dict[str, Any]) -> Iterator[str]:
        for name, pair in losses(row, self.rows["original"]).items():
            yield "{}: {:.4f} ± {:.4f}".format(name, *pair)


def losses(row: dict[str, Any], original: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Nats a token more than the original on the same windows of every text, and their error."""
    pairs = ((name, x, original["texts"][name]) for name, x in row["texts"].items())
    return {
        name: paired_difference(PerplexityResult(**x), PerplexityResult(**y))
        for name, x, y in pairs
    }


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Answers of the first kind, and loss on the first text, against bytes of pages."""
    import matplotlib.pyplot as plt

    original = rows["original"]
    kind, (text, *_) = next(iter(original["answers"])), original["texts"]
    policies = dict.fromkeys(_label(x) for x in rows.values() if x["evict"] not in (None, AUTO))
    figure, (answers, loss) = plt.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    full = original["answers"][kind]
    answers.axhline(100 * full["right"] / full["asked"], color="grey", ls=":", label="all rows")
    for number, policy in enumerate(policies):
        own = sorted((x for x in rows.values() if _label(x) == policy), key=lambda x: x["keep"])
        kept = [x["cache_bytes"] / 1024 for x in own]
        right = [100 * x["answers"][kind]["right"] / x["answers"][kind]["asked"] for x in own]
        look = {"label": policy, "marker": "os^vDP*X<>"[number % 10], "color": f"C{number % 10}"}
        look["ls"] = "-" if number < 10 else "--"
        answers.plot(kept, right, **look)
        loss.plot(kept, [losses(x, original)[text][0] for x in own], **look)
    answers.set(ylabel=f"right answers to {kind}, %", ylim=(-3, 103))
    loss.set(ylabel=f"nats a token lost on {text}")
    loss.set_yscale("symlog", linthresh=0.01)
    loss.axhline(0, color="grey", ls=":")
    for panel in (answers, loss):
        panel.set_xscale("log", base=2)
        panel.set_xticks(sorted({x["cache_bytes"] / 1024 for x in rows.values() if x["keep"]}))
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.set_xlabel(f"KiB of pages after {original['tokens']} tokens")
        panel.grid(alpha=0.3)
    figure.legend(*answers.get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path)


def _label(row: dict[str, Any]) -> str | None:
    return f"{row['evict']}, repaired" if row.get("repair") else row["evict"]


def main() -> None:
    parser = quality.parser(__doc__, model="reference:smollm2", ctx=640, windows=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--contexts", type=int, default=25)
    parser.add_argument("--facts", type=int, default=4)
    parser.add_argument("--questions", nargs="+", choices=list(ruler.KINDS), default=["keys"])
    parser.add_argument("--policies", nargs="+", default=["kvzip", "keydiff-all", "kv-compress"])
    parser.add_argument("--keep", nargs="+", type=float, default=[0.25, 0.125])
    parser.add_argument("--repair", action="store_true", help="rows that stay, in a row beside")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--recipe", help="of rows that are evicted, with --factor")
    parser.add_argument("--factor", type=float)
    parser.add_argument("--together", action="store_true", help="all contexts at once, for GPUs")
    parser.add_argument("--svg", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if (arguments.recipe is None) != (arguments.factor is None):
        parser.error("--recipe and --factor go together: give both, or neither")
    bench = Bench(arguments)
    cases = [
        Case(evict=name, keep=keep, repair=repair)
        for name in arguments.policies
        for keep in arguments.keep
        for repair in (False, True)[: 1 + arguments.repair]
    ]
    for row in bench.run(bench.wanted([Case(), *cases]), bench.row):
        answers = row.get("answers", {}).items()
        right = (f"{kind}: {x['right']:g} of {x['asked']}," for kind, x in answers)
        print(row["name"], *right, *bench.lost(row), f"{row['seconds']:.0f} s", flush=True)
    if arguments.svg is not None:
        draw(bench.rows, arguments.svg)


if __name__ == "__main__":
    main()
