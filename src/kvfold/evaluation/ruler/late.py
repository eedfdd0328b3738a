"""Short task examples in the words of RULER: a context, and after its compression a question for
one of several facts, all values of one key, or the variables of a chain of assignments.

Unlike the tasks of RULER (`tasks`), several questions share a context, the filler is always prose,
numbers have five digits, and there is no solved example before the context. Room for question and
answer is left within the length.
"""

import itertools
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from kvfold.evaluation.haystack import (
    ALL_VALUES,
    ANSWER,
    FACT,
    INTRO,
    build_sample,
    draw_facts,
    fit_prompt,
    load_filler,
)
from kvfold.evaluation.ruler.tasks import CHAIN_INTRO, CHAIN_QUESTION
from kvfold.evaluation.tasks.late_question import LateQuestionTask
from kvfold.utils.chat import around_message
from kvfold.utils.tokens import encode

CHAIN = "".join(CHAIN_QUESTION).rstrip()
Count = Callable[[str], int]  # tokens of a text


def keys(count: Count, rng: random.Random, length: int, facts: int) -> Iterator[LateQuestionTask]:
    """One example for each fact of a context with `facts` keys, a number each (niah_multikey)."""
    sample = build_sample(count, length=length, num_facts=facts, filler=load_filler(), rng=rng)
    for question, answer in zip(sample.questions, sample.answers, strict=True):
        yield _example(count, sample.prompt, question, (answer,))


def values(count: Count, rng: random.Random, length: int, facts: int) -> Iterator[LateQuestionTask]:
    """An example that asks for all `facts` numbers of one key (niah_multivalue)."""
    pairs = draw_facts(facts, rng)
    key, answers = pairs[0][0], tuple(ANSWER.format(value=value) for _, value in pairs)
    facts_text = [FACT.format(key=key, value=value) for _, value in pairs]
    yield _fitted(count, rng, length, facts_text, INTRO, ALL_VALUES.format(key=key), answers)


def variables(
    count: Count, rng: random.Random, length: int, facts: int
) -> Iterator[LateQuestionTask]:
    """An example that asks for all variables of a chain of `facts` assignments (vt)."""
    names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(facts)]
    value = str(rng.randrange(10_000, 100_000))
    assignments = [f"VAR {names[0]} = {value}"]
    assignments += [f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(names)]
    question = CHAIN.format(value=value, count=len(names))
    answers = tuple(f" {name}" for name in names)
    yield _fitted(count, rng, length, assignments, CHAIN_INTRO, question, answers, in_order=True)


# By name: a function that yields the examples of a context, and the words of the question with
# which the reply begins.
KINDS = {
    "keys": (keys, "The special magic number for"),
    "values": (values, "The special magic numbers for"),
    "variables": (variables, "Answer: According to"),
}


def examples(
    kind: str, tokenizer: Any, *, length: int, contexts: int, facts: int = 4
) -> list[LateQuestionTask]:
    """Build the examples of `contexts` contexts of about `length` tokens, the same ones every time.

    If the tokenizer has a chat template, the context begins a user's message. Raises ValueError for
    an unknown kind, and if the facts do not fit.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    rng, (make, begins) = random.Random(f"0/{length}"), KINDS[kind]
    count = cache(lambda text: len(encode(tokenizer, text)))
    built = [task for _ in range(contexts) for task in make(count, rng, length, facts)]
    if not tokenizer.chat_template:
        return built
    return [_in_chat(tokenizer, task, begins) for task in built]


def _in_chat(tokenizer: Any, task: LateQuestionTask, begins: str) -> LateQuestionTask:
    """Put context and question into a user's message, and `begins` and what follows it into the
    reply."""
    before, after = around_message(tokenizer)
    question, _, rest = task.question.partition(begins)
    return replace(
        task,
        context=before + task.context,
        question=question.rstrip() + (after or "\n") + begins + rest,
    )


def _fitted(
    count: Count,
    rng: random.Random,
    length: int,
    facts: list[str],
    intro: str,
    question: str,
    answers: tuple[str, ...],
    **how: Any,
) -> LateQuestionTask:
    reserved = count(question) + sum(map(count, answers))
    how |= {"length": length, "reserved": reserved, "intro": intro}
    prompt = fit_prompt(count, facts, load_filler(), rng, **how)
    return _example(count, prompt, question, answers)


def _example(
    count: Count, prompt: str, question: str, answers: tuple[str, ...]
) -> LateQuestionTask:
    # One token more per answer: a separator, or a space before it.
    max_new_tokens = sum(count(answer) + 1 for answer in answers)
    answer = answers[0] if len(answers) == 1 else answers
    return LateQuestionTask(
        context=prompt, question=question, answer=answer, max_new_tokens=max_new_tokens
    )
