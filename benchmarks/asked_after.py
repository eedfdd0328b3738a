"""What an eviction loses that nobody had asked about: right answers, and loss on the text after it.

    python benchmarks/asked_after.py --model reference:smollm2 --length 512 --ctx 640 --windows 8 \
        --policies kvzip keydiff-all kv-compress --text wiki.txt --json asked.json

A context of --length tokens is read, evicted to a share, and then asked about, or continued by the
rest of a window of --ctx tokens of --text. Contexts to ask about are RULER's (`evaluation/ruler`):
one of several keys, all values of a key, a chain of variables. A model that chats gets them as a
user's turn by its chat template, and the beginning of an answer; an answer counts where it holds
the number, or in parts, where several are asked for.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import quality

from kvfold.config import CacheConfig
from kvfold.evaluation import ruler
from kvfold.evaluation.measure import Measured, Measurement, measure
from kvfold.evaluation.perplexity import PerplexityResult, paired_difference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row: a policy and the share of rows that it keeps; None: all of them."""

    evict: str | None = None
    keep: float | None = None

    @property
    def name(self) -> str:
        return f"{self.evict} {self.keep:g}" if self.keep else "original"

    def cache(self, page: int) -> CacheConfig:
        return CacheConfig(page=page, kv_bytes=2**28, evict=self.evict, keep_tokens=self.keep)


class Bench(quality.Bench):
    """Every case answers the same questions and reads the same windows."""

    def measure(self, case: Case) -> Measured:
        given = self.arguments
        how = {"length": given.length, "contexts": given.contexts, "facts": given.facts}
        rows = {kind: ruler.rows(kind, self.tokenizer, **how) for kind in given.questions}
        what = Measurement(
            windows=self.texts,
            tasks={kind: own for kind, own in rows.items() if own},
            cache=case.cache(given.page),
            scored_from=given.length,
        )
        return measure(self.model, self.tokenizer, what)

    def row(self, case: Case) -> dict[str, Any]:
        begin, found = time.perf_counter(), self.measure(case)
        result: dict[str, Any] = {"name": case.name, **dataclasses.asdict(case)}
        for kind, asked in found.tasks.items():
            right = asked.scores["contains"].mean * asked.rows
            result.setdefault("answers", {})[kind] = {"right": right, "asked": asked.rows}
        if found.footprint is not None:
            result |= dataclasses.asdict(found.footprint)
        result["texts"] = {name: dataclasses.asdict(x) for name, x in found.texts.items()}
        return result | {"seconds": time.perf_counter() - begin}

    def lost(self, row: dict[str, Any]) -> Iterator[str]:
        """Nats a token more than the original on the same windows, of every text."""
        for name, result in row["texts"].items():
            original = self.rows["original"]["texts"][name]
            pair = (PerplexityResult(**x) for x in (result, original))
            yield "{}: {:.4f} ± {:.4f}".format(name, *paired_difference(*pair))


def main() -> None:
    parser = quality.parser(__doc__, model="reference:smollm2", ctx=640, windows=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--contexts", type=int, default=25)
    parser.add_argument("--facts", type=int, default=4)
    parser.add_argument("--questions", nargs="+", choices=list(ruler.KINDS), default=["keys"])
    parser.add_argument("--policies", nargs="+", default=["kvzip", "keydiff-all", "kv-compress"])
    parser.add_argument("--keep", nargs="+", type=float, default=[0.25, 0.125])
    parser.add_argument("--page", type=int, default=16)
    arguments = parser.parse_args()
    bench = Bench(arguments)
    cases = [Case(evict=name, keep=keep) for name in arguments.policies for keep in arguments.keep]
    for row in bench.run(bench.wanted([Case(), *cases]), bench.row):
        answers = row.get("answers", {}).items()
        right = (f"{kind}: {x['right']:g} of {x['asked']}," for kind, x in answers)
        print(row["name"], *right, *bench.lost(row), f"{row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
