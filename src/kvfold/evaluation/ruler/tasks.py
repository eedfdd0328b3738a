"""The thirteen tasks of RULER (Hsieh et al. 2024, appendix B), with the prompts, sizes and noise
of its released scripts.

An example is built of `size` units: lines of noise, words of essays, needles, words of a list,
coded words, or documents. `examples` finds the size with which it is as long as wanted. Unlike
RULER, keys are always different, and words come from kvfold's lists and prose.
"""

import random
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import cycle, pairwise
from math import pi
from typing import Any
from uuid import UUID

from kvfold.evaluation.haystack import NEEDLE, intro, load_filler, load_words, question
from kvfold.utils.text import packaged

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = [round(100 * i / 39) for i in range(40)]  # where needles are hidden in essays, in percent
CHAIN_INTRO = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
)
CHAIN_QUESTION = (
    "Question: Find all variables that are assigned the value {value} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables"
    " are assigned the value {value}, they are: ",
)
LIST_INTRO = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
LIST_QUESTION = (
    "Question: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
)
CODED_INTRO = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. "
)
CODED_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
)
DOCUMENTS_QUESTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\n"
)
DOCUMENTS_INTRO = f"{DOCUMENTS_QUESTION}The following are given documents.\n\n"
SOLVED = 500  # tokens of the solved example of `vt`
STEP = 64  # of the length that an error suggests: other examples may be a little longer
SHORT = 4096  # lengths below it have shorter lists in `cwe`


@dataclass(frozen=True, kw_only=True)
class Example:
    """A question. context, question, reply: as in `Message`. answers: what the answer should
    contain."""

    context: str
    question: str
    reply: str
    answers: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.context + self.question + self.reply


@dataclass(frozen=True, kw_only=True)
class DocumentQuestion:
    """A question about documents. needed: indices of those that must be there. related: of those
    that are added first."""

    question: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What examples are built of. essays: sentences. documents, questions: by task, `qa_1` and
    `qa_2`."""

    essays: Sequence[str] = field(default_factory=load_filler)
    documents: Mapping[str, Sequence[str]] = field(default_factory=dict)
    questions: Mapping[str, Sequence[DocumentQuestion]] = field(default_factory=dict)


Count = Callable[[Example], int]  # tokens of a prompt
Build = Callable[[random.Random, int], Example]  # an example of so many units


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What an example is built for. length: in tokens. row: number of the example. count: tokens of
    a prompt."""

    sources: Sources
    length: int
    row: int
    count: Count


# -- needles -----------------------------------------------------------------------------------


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10**6, 10**7))


def _uuid(rng: random.Random) -> str:
    return str(UUID(int=rng.getrandbits(128), version=4))


def _word(rng: random.Random) -> str:
    adjectives, nouns = load_words()
    return f"{rng.choice(adjectives)}-{rng.choice(nouns)}"


_VALUES = {"words": _word, "numbers": _number, "uuids": _uuid}


def _distinct(rng: random.Random, kind: str, count: int) -> list[str]:
    """Different random values."""
    values: dict[str, None] = {}
    while len(values) < count:
        values[_VALUES[kind](rng)] = None
    return list(values)


def needles(
    setup: Setup,
    rng: random.Random,
    size: int,
    *,
    haystack: str,
    key: str = "words",
    value: str = "numbers",
    num_keys: int = 1,
    num_values: int = 1,
    num_asked: int = 1,
) -> Example:
    """Values of keys, hidden in `haystack` (noise, essays or needles), and a question for those of
    `num_asked` keys."""
    others = size if haystack == "needles" else 0
    names = _distinct(rng, key, num_keys + others)
    drawn = _distinct(rng, value, num_keys * num_values + others)
    hidden = {
        name: drawn[i * num_values : (i + 1) * num_values]
        for i, name in enumerate(names[:num_keys])
    }
    facts = [
        NEEDLE.format(kind=value, key=name, value=x)
        for name, values in hidden.items()
        for x in values
    ]
    rng.shuffle(facts)
    if haystack == "essays":
        text = _in_essays(setup.sources.essays, rng, size, facts)
    else:
        pairs = zip(names[num_keys:], drawn[num_keys * num_values :], strict=True)
        lines = [NEEDLE.format(kind=value, key=x, value=y) for x, y in pairs] or [NOISE] * size
        text = "\n".join(_insert(lines, facts, rng.sample(range(size), len(facts))))
    queried = rng.sample(list(hidden), num_asked)
    several = num_asked * num_values > 1
    words, reply = question(_listed(queried), value, several)
    return Example(
        context=f"{intro(value, several)}{text}\n",
        question=words,
        reply=reply,
        answers=tuple(x for name in queried for x in hidden[name]),
    )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"


def _insert(lines: Sequence[str], added: Sequence[str], places: Sequence[int]) -> list[str]:
    """Insert `added[i]` before line `places[i]`."""
    result: list[str] = []
    before: dict[int, list[str]] = {}
    for place, line in zip(places, added, strict=True):
        before.setdefault(place, []).append(line)
    for i in range(len(lines) + 1):
        result += before.get(i, [])
        result += lines[i : i + 1]
    return result


def _in_essays(
    essays: Sequence[str], rng: random.Random, num_words: int, facts: Sequence[str]
) -> str:
    """The first words of the essays, which are repeated if they are too short, with facts between
    their sentences."""
    sentences: list[str] = []
    for sentence in cycle(essays):
        words = sentence.split()[:num_words]
        sentences.append(" ".join(words))
        num_words -= len(words)
        if num_words <= 0:
            break
    depths = sorted(rng.sample(DEPTHS, len(facts)))
    return " ".join(_insert(sentences, facts, [len(sentences) * x // 100 for x in depths]))


# -- chains, lists and coded words -------------------------------------------------------------


def _chain(rng: random.Random, size: int, letters: int) -> Example:
    """Five variables, each assigned the one before, between lines of noise."""
    names: dict[str, None] = {}
    while len(names) < 5:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    first, *_ = names
    value = str(rng.randrange(10_000, 100_000))
    chain = [f"VAR {first} = {value}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(names))]
    places = sorted(rng.sample(range(size), len(chain)))
    text = "\n".join(_insert([NOISE] * size, chain, places))
    words, reply = (x.format(value=value, count=len(names)) for x in CHAIN_QUESTION)
    return Example(
        context=f"{CHAIN_INTRO}{text}\n", question=words, reply=reply, answers=tuple(names)
    )


@lru_cache(maxsize=4)
def _solved_lines(count: Count) -> int:
    return _largest(partial(_chain, letters=3), 0, count, SOLVED, 5)


def variables(setup: Setup, rng: random.Random, size: int) -> Example:
    """All variables of a chain (vt), after a solved example of about SOLVED tokens."""
    solved = _chain(rng, _solved_lines(setup.count), letters=3)
    example = _chain(rng, size, letters=5)
    begin = f"{solved.text} {' '.join(solved.answers)}\n\n"
    return Example(
        context=begin + example.context,
        question=example.question,
        reply=example.reply,
        answers=example.answers,
    )


@lru_cache(maxsize=1)
def _words() -> tuple[list[str], list[str]]:
    """kvfold's adjectives and nouns, and these with all words of its prose."""
    adjectives, nouns = load_words()
    few = sorted({*adjectives, *nouns})
    prose = set(re.findall(r"\b[a-z]{3,}\b", packaged("filler.txt"))) - set(few)
    return few, [*few, *sorted(prose)]


def _list(rng: random.Random, size: int, common: int, uncommon: int) -> tuple[str, list[str]]:
    """A numbered list of `size` words, 10 of which come `common` times, the others `uncommon`
    times; and these 10."""
    few, many = _words()
    drawn = rng.sample(few if size <= len(few) else many, min(size, len(many)))
    words = drawn[:10] * common + drawn[10:] * uncommon
    rng.shuffle(words)
    return _numbered(words), drawn[:10]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


def common_words(setup: Setup, rng: random.Random, size: int) -> Example:
    """The ten most common words of a list (cwe), after a solved example."""
    words, reply = LIST_QUESTION
    sizes = ((20, 3, 1), (6, 1)) if setup.length < SHORT else ((40, 10, 3), (30, 3))
    solved, answers = _list(rng, *sizes[0])
    begin = f"{LIST_INTRO}{solved}\n{words}{reply} {_numbered(answers)}\n"
    text, answers = _list(rng, size, *sizes[1])
    return Example(
        context=f"{begin}{LIST_INTRO}{text}\n",
        question=words,
        reply=reply,
        answers=tuple(answers),
    )


def frequent_words(setup: Setup, rng: random.Random, size: int) -> Example:
    """The three most frequent coded words of a text whose frequencies fall with the square of the
    rank (fwe). The most frequent word is a row of dots."""
    names: dict[str, None] = {"...": None}
    while len(names) < max((setup.length - TASKS["fwe"].max_new_tokens) // 50, 4):
        names["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    coded = list(names)
    drawn = [
        word
        for rank, word in enumerate(coded, start=1)
        for _ in range(int(size / rank**2 / (pi**2 / 6)))
    ]
    rng.shuffle(drawn)
    words, reply = CODED_QUESTION
    return Example(
        context=f"{CODED_INTRO}{' '.join(drawn)}\n",
        question=words,
        reply=reply,
        answers=tuple(coded[1:4]),
    )


# -- questions about documents -----------------------------------------------------------------


def documents(setup: Setup, rng: random.Random, size: int, *, name: str) -> Example:
    """A question about one or some of `size` documents."""
    texts, known = setup.sources.documents[name], setup.sources.questions[name]
    query = known[setup.row % len(known)]
    chosen = [*query.needed, *_some(query.related, rng, size - len(query.needed))]
    rest = [i for i in range(len(texts)) if i not in {*query.needed, *query.related}]
    chosen += _some(rest, rng, size - len(chosen))
    rng.shuffle(chosen)
    text = "\n\n".join(f"Document {i}:\n{texts[x]}" for i, x in enumerate(chosen, start=1))
    return Example(
        context=f"{DOCUMENTS_INTRO}{text}\n\n",
        question=f"{DOCUMENTS_QUESTION}Question: {query.question}",
        reply=" Answer:",
        answers=query.answers,
    )


def _some(items: Sequence[int], rng: random.Random, count: int) -> list[int]:
    """At most `count` of the items."""
    return rng.sample(items, min(max(count, 0), len(items)))


# -- all tasks ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A task. make: builds an example. max_new_tokens: of an answer. least: units of the smallest
    example. any_answer: one of the answers is enough; else the score is the share of them."""

    make: Callable[..., Example]
    max_new_tokens: int
    least: int
    any_answer: bool = False


def _needles(least: int = 1, **how: Any) -> Task:
    return Task(partial(needles, **how), 128, least)


TASKS = {
    "niah_single_1": _needles(haystack="noise"),
    "niah_single_2": _needles(haystack="essays"),
    "niah_single_3": _needles(haystack="essays", value="uuids"),
    "niah_multikey_1": _needles(haystack="essays", num_keys=4),
    "niah_multikey_2": _needles(haystack="needles"),
    "niah_multikey_3": _needles(haystack="needles", key="uuids", value="uuids"),
    "niah_multivalue": _needles(haystack="essays", num_values=4),
    "niah_multiquery": _needles(haystack="essays", num_keys=4, num_asked=4),
    "vt": Task(variables, 30, 5),
    "cwe": Task(common_words, 120, 11),
    "fwe": Task(frequent_words, 50, 30),
    "qa_1": Task(partial(documents, name="qa_1"), 32, 1, any_answer=True),
    "qa_2": Task(partial(documents, name="qa_2"), 32, 10, any_answer=True),
}


def check_length(
    names: Sequence[str], sources: Sources, *, length: int, rows: int, count: Count
) -> None:
    """Raise ValueError that says what length these tasks need, if `length` is too short for one of
    them. The first `rows` examples of each are tried."""
    needed = dict.fromkeys(names, 0)
    for row in range(rows):
        setup = Setup(sources=sources, length=length, row=row, count=count)
        for name, task in TASKS.items():
            if name in needed:
                example = task.make(setup, random.Random(f"{name}/{length}/{row}"), task.least)
                needed[name] = max(needed[name], count(example) + task.max_new_tokens)
        if row == 0 and max(needed.values()) <= length:
            return
    longest = max(needed, key=needed.__getitem__)
    raise ValueError(
        f"RULER needs at least {-(-needed[longest] // STEP) * STEP} tokens, for {longest}, and the "
        f"length is {length}: ask for that length"
    )


def examples(
    name: str, sources: Sources, *, length: int, rows: int, count: Count
) -> Iterator[Example]:
    """Yield the first `rows` examples of a task, the same ones every time.

    length: most tokens of a prompt and its answer. count: tokens of a prompt. Raises ValueError if
    not even the smallest example fits; `check_length` says so before.
    """
    task, size = TASKS[name], None
    most = length - task.max_new_tokens
    for row in range(rows):
        setup = Setup(sources=sources, length=length, row=row, count=count)
        build, seed = partial(task.make, setup), f"{name}/{length}/{row}"
        if size is None:
            size = _largest(build, seed, count, most, task.least)
        fitting, example = size, build(random.Random(seed), size)
        while (tokens := count(example)) > most and fitting > task.least:
            fitting = max(min(fitting - 1, fitting * 99 // 100), task.least)
            example = build(random.Random(seed), fitting)
        if tokens > most:
            raise ValueError(
                f"{name} of RULER needs at least {tokens + task.max_new_tokens} tokens, and the "
                f"length is {length}: ask for that length"
            )
        yield example


def _largest(build: Build, seed: int | str, count: Count, most: int, least: int) -> int:
    """The largest number of units from `least` on with which an example has at most `most`
    tokens."""

    def fits(size: int) -> bool:
        return count(build(random.Random(seed), size)) <= most

    high = 2 * least
    while high <= most and fits(high):  # a unit has at least one token
        high *= 2
    low = least
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def score(name: str, answers: Sequence[str], text: str) -> float:
    """The share of the answers that a text contains, or, for questions about documents, whether it
    contains one of them; upper and lower case are equal (string_match_all, string_match_part)."""
    plain = re.sub(r"[\x00-\x1f]", "\n", text).strip().lower()
    matches = [answer.lower() in plain for answer in answers]
    return float(any(matches)) if TASKS[name].any_answer else sum(matches) / len(matches)
