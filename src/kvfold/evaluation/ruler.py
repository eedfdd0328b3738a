"""Rows in the words of RULER (Hsieh et al. 2024, its released templates): contexts to be compressed
before anyone asks for one fact of several, all values of one key, or a chain of variables.

Its noise is prose here, its examples of an answered question before the context are left out, and
what a question and an answer take is kept free at its end.
"""

import itertools
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from kvfold.evaluation.haystack import (
    ANSWER,
    FACT,
    INTRO,
    build_sample,
    draw_facts,
    fit_prompt,
    load_filler,
)
from kvfold.evaluation.tasks.asked import AskedTask
from kvfold.utils.chat import apply_template, reply_words
from kvfold.utils.tokens import encode

ALL_VALUES = (
    "What are all the special magic numbers for {key} mentioned in the provided text? "
    "The special magic numbers for {key} mentioned in the provided text are"
)
CHAIN_INTRO = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
)
CHAIN = (
    "Question: Find all variables that are assigned the value {value} in the text above. "
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables "
    "are assigned the value {value}, they are:"
)
Count = Callable[[str], int]  # tokens of a text


def keys(count: Count, rng: random.Random, length: int, facts: int) -> Iterator[AskedTask]:
    """Every fact of a context that has `facts` keys with one number each (niah_multikey)."""
    sample = build_sample(count, length=length, num_facts=facts, filler=load_filler(), rng=rng)
    for question, answer in zip(sample.questions, sample.answers, strict=True):
        yield _row(count, sample.prompt, question, (answer,))


def values(count: Count, rng: random.Random, length: int, facts: int) -> Iterator[AskedTask]:
    """All of the `facts` numbers of one key (niah_multivalue)."""
    pairs = draw_facts(facts, rng)
    key, answers = pairs[0][0], tuple(ANSWER.format(value=value) for _, value in pairs)
    told = [FACT.format(key=key, value=value) for _, value in pairs]
    yield _fitted(count, rng, length, told, INTRO, ALL_VALUES.format(key=key), answers)


def variables(count: Count, rng: random.Random, length: int, facts: int) -> Iterator[AskedTask]:
    """All variables of a chain of `facts` assignments that begins with a number (vt)."""
    names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(facts)]
    value = str(rng.randrange(10_000, 100_000))
    told = [f"VAR {names[0]} = {value}"]
    told += [f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(names)]
    question = CHAIN.format(value=value, count=len(names))
    answers = tuple(f" {name}" for name in names)
    yield _fitted(count, rng, length, told, CHAIN_INTRO, question, answers, in_order=True)


# Name -> what makes a context's rows, and how a reply begins that the question has already.
KINDS = {
    "keys": (keys, "The special magic number for"),
    "values": (values, "The special magic numbers for"),
    "variables": (variables, "Answer: According to"),
}


def rows(
    kind: str, tokenizer: Any, *, length: int, contexts: int, facts: int = 4
) -> list[AskedTask]:
    """Rows of `contexts` contexts of about `length` tokens, the same ones every time; with the
    marks of the chat template where there is one, the context as the beginning of a user's turn.

    Raises ValueError for an unknown kind, and where the facts do not fit.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    rng, (make, begins) = random.Random(f"0/{length}"), KINDS[kind]
    count = cache(lambda text: len(encode(tokenizer, text)))
    found = [row for _ in range(contexts) for row in make(count, rng, length, facts)]
    return [_in_chat(tokenizer, row, begins) for row in found] if tokenizer.chat_template else found


def _in_chat(tokenizer: Any, row: AskedTask, begins: str) -> AskedTask:
    """Context and question as a user's turn, and the words with which the reply begins."""
    turn = [{"role": "user", "content": "\x00"}]
    whole = apply_template(tokenizer, turn, add_generation_prompt=True)
    asked, _, rest = row.question.partition(begins)
    return replace(
        row,
        context=whole.partition("\x00")[0] + row.context,
        question=asked.rstrip() + reply_words(tokenizer) + begins + rest,
    )


def _fitted(
    count: Count,
    rng: random.Random,
    length: int,
    told: list[str],
    intro: str,
    question: str,
    answers: tuple[str, ...],
    **how: Any,
) -> AskedTask:
    asked = count(question) + sum(map(count, answers))
    how |= {"length": length, "asked": asked, "intro": intro}
    prompt = fit_prompt(count, told, load_filler(), rng, **how)
    return _row(count, prompt, question, answers)


def _row(count: Count, prompt: str, question: str, answers: tuple[str, ...]) -> AskedTask:
    """A token more than an answer has: what stands between several, or before one."""
    room = sum(count(answer) + 1 for answer in answers)
    answer = answers[0] if len(answers) == 1 else answers
    return AskedTask(context=prompt, question=question, answer=answer, max_new_tokens=room)
