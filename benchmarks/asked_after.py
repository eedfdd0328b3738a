"""Facts asked for after the context was compressed: right answers by policy and share kept.

    python benchmarks/asked_after.py reference:smollm2 --length 512 --contexts 25 \
        --policies kvzip,keydiff-all,kv-compress --keep .25,.125 --json asked.json

Contexts are those of the needle test. A model that chats gets them as a user's turn by its chat
template, and the question's beginning of an answer; an answer counts where it holds the number.
"""

import argparse
import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

from kvfold.cli.common import load_tokenizer
from kvfold.config import CacheConfig
from kvfold.engine.build import build_runner
from kvfold.engine.request import CacheParams
from kvfold.engine.runner import ModelRunner
from kvfold.evaluation.haystack import NeedleSample, build_sample, load_filler
from kvfold.evaluation.paged import PagedSession
from kvfold.loading import load
from kvfold.text import encode, reply_words

MARK = "The special magic number for"  # with which the answer begins


def numbers(text: str, kind: Any) -> list[Any]:
    return [kind(x) for x in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--contexts", type=int, default=25)
    parser.add_argument("--facts", type=int, default=4)
    parser.add_argument("--policies", default="kvzip,keydiff-all,kv-compress")
    parser.add_argument("--keep", default=".25,.125")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--json")
    return parser.parse_args()


class Questions:
    """Contexts, questions and answers as tokens of one model."""

    def __init__(self, tokenizer: Any, length: int, facts: int) -> None:
        self.tokenizer, self.length, self.facts = tokenizer, length, facts
        self.count = cache(lambda text: len(self.ids(text)))
        self.before, self.after = tokenizer.bos_token or "", ""
        if tokenizer.chat_template:
            self.after = reply_words(tokenizer)
            asked = [{"role": "user", "content": "\x00"}]
            whole = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            self.before = whole.partition("\x00")[0]

    def ids(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)

    def samples(self, number: int) -> Iterator[NeedleSample]:
        rng = random.Random(f"0/{self.length}")
        how = {"length": self.length, "num_facts": self.facts, "filler": load_filler()}
        return (build_sample(self.count, rng=rng, **how) for _ in range(number))

    def context(self, sample: NeedleSample) -> list[int]:
        return self.ids(self.before) + self.ids(sample.prompt)

    def question(self, text: str) -> list[int]:
        if self.after:  # the question is the user's, the beginning of the answer the model's
            asked, begun = text.split(MARK, 1)
            return self.ids(asked.rstrip() + self.after + MARK + begun)
        return self.ids(text)


def right(runner: ModelRunner, questions: Questions, contexts: int, keep: float | None) -> int:
    hits = 0
    for sample in questions.samples(contexts):
        with PagedSession(runner) as session:
            context = questions.context(sample)
            session.sequence.cache = CacheParams(keep_tokens=keep)
            session.read(context, prompt=len(context))
            session.compress()
            for question, answer in zip(sample.questions, sample.answers, strict=True):
                mark = session.mark()
                last = session.read(questions.question(question))
                tokens = session.greedy(last, questions.count(answer) + 1)
                hits += answer.strip() in questions.tokenizer.decode(tokens)
                session.rewind(mark)
    return hits


def main() -> None:
    args = arguments()
    model, tokenizer = load(args.model), load_tokenizer(args.model)
    questions = Questions(tokenizer, args.length, args.facts)
    most, rows = 2 * args.length + 400, []
    for name in [None, *numbers(args.policies, str)]:
        evict = {"evict": name, "keep_tokens": 0.5} if name else {}
        config = CacheConfig(page=args.page, kv_bytes=2**28, **evict)
        runner = build_runner(model, config, num_slots=1, max_tokens=most, tokenizer=tokenizer)
        for keep in numbers(args.keep, float) if name else [None]:
            hits, asked = right(runner, questions, args.contexts, keep), args.contexts * args.facts
            rows.append({"policy": name, "keep": keep, "right": hits, "asked": asked})
            print(f"{name or 'original':16} {keep or 1:<6g} {hits:4} of {asked}", flush=True)
            if args.json:
                with open(args.json, "w") as file:
                    json.dump({"settings": vars(args), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
