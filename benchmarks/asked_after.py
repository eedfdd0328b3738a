"""What an eviction loses that nobody had asked about: right answers, and loss on the text after it.

    python benchmarks/asked_after.py --model reference:smollm2 --length 512 --ctx 640 --windows 8 \
        --policies kvzip keydiff-all kv-compress --text wiki.txt --json asked.json

A context of --length tokens is read, evicted to a share, and then asked about, or continued by the
rest of a window of --ctx tokens of --text. Contexts to ask about are those of the needle test. A
model that chats gets them as a user's turn by its chat template, and the question's beginning of an
answer; an answer counts where it holds the number.
"""

import dataclasses
import random
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import quality

from kvfold.config import CacheConfig
from kvfold.evaluation.haystack import build_sample, load_filler
from kvfold.evaluation.measure import Measured, Measurement, measure
from kvfold.evaluation.perplexity import PerplexityResult, paired_difference
from kvfold.evaluation.tasks.asked import AskedTask
from kvfold.text import encode, reply_words

MARK = "The special magic number for"  # with which the answer begins


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


def questions(tokenizer: Any, length: int, contexts: int, facts: int) -> Iterator[AskedTask]:
    """`facts` rows of each context, in a chat's words where the model chats."""
    count, rng = cache(lambda text: len(encode(tokenizer, text))), random.Random(f"0/{length}")
    before, after = "", ""
    if tokenizer.chat_template:
        asked = [{"role": "user", "content": "\x00"}]
        whole = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        before, after = whole.partition("\x00")[0], reply_words(tokenizer)
    how = {"length": length, "num_facts": facts, "filler": load_filler()}
    for sample in (build_sample(count, rng=rng, **how) for _ in range(contexts)):
        for question, answer in zip(sample.questions, sample.answers, strict=True):
            asked, begun = question.split(MARK, 1)
            yield AskedTask(
                context=before + sample.prompt,
                question=asked.rstrip() + after + MARK + begun if after else question,
                answer=answer,
                max_new_tokens=count(answer) + 1,
            )


class Bench(quality.Bench):
    """Every case answers the same questions and reads the same windows."""

    def measure(self, case: Case) -> Measured:
        length, contexts = self.arguments.length, self.arguments.contexts
        rows = list(questions(self.tokenizer, length, contexts, self.arguments.facts))
        what = Measurement(
            windows=self.texts,
            tasks={"asked": rows} if rows else {},
            cache=case.cache(self.arguments.page),
            scored_from=length,
        )
        return measure(self.model, self.tokenizer, what)

    def row(self, case: Case) -> dict[str, Any]:
        begin, found = time.perf_counter(), self.measure(case)
        result: dict[str, Any] = {"name": case.name, **dataclasses.asdict(case)}
        if asked := found.tasks.get("asked"):
            right = round(asked.scores["contains"].mean * asked.rows)
            result |= {"right": right, "asked": asked.rows}
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
    parser.add_argument("--policies", nargs="+", default=["kvzip", "keydiff-all", "kv-compress"])
    parser.add_argument("--keep", nargs="+", type=float, default=[0.25, 0.125])
    parser.add_argument("--page", type=int, default=16)
    arguments = parser.parse_args()
    bench = Bench(arguments)
    cases = [Case(evict=name, keep=keep) for name in arguments.policies for keep in arguments.keep]
    for row in bench.run(bench.wanted([Case(), *cases]), bench.row):
        right = f"{row['right']} of {row['asked']}" if "right" in row else ""
        print(row["name"], right, *bench.lost(row), f"{row['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
