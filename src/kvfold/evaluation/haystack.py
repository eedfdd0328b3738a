"""Contexts for needle-in-a-haystack retrieval: facts hidden in prose, in the words of RULER."""

import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvfold.utils.text import packaged

NEEDLE = "One of the special magic {kind} for {key} is: {value}."


def intro(kind: str, several: bool) -> str:
    """What comes before the text. kind: of the hidden values, in the plural. several: whether more
    than one is asked for."""
    some, are = ("Some", "are") if several else ("A", "is")
    kind = kind if several else kind.removesuffix("s")
    return (
        f"{some} special magic {kind} {are} hidden within the following text. Make sure to memorize"
        f" it. I will quiz you about the {kind} afterwards.\n"
    )


def question(key: str, kind: str, several: bool) -> tuple[str, str]:
    """The question for the values of a key, and the words with which the answer begins."""
    what, are = ("are all", "are") if several else ("is", "is")
    kind = kind if several else kind.removesuffix("s")
    words = f"the special magic {kind} for {key} mentioned in the provided text"
    return f"What {what} {words}?", f" T{words[1:]} {are}"


INTRO = intro("numbers", several=True)
FACT = NEEDLE.replace("{kind}", "numbers")
QUESTION = "".join(question("{key}", "numbers", several=False))
ALL_VALUES = "".join(question("{key}", "numbers", several=True))
ANSWER = " {value}"

_ABBREVIATIONS = "".join(rf"(?<!\b{word}\.)" for word in ("Mr", "Mrs", "Dr", "St", "Sr", "No"))
_SENTENCE_GAP = re.compile(rf"(?<=[.!?]){_ABBREVIATIONS}\s+(?=[\"“‘'(]?[A-Z])")


@dataclass(frozen=True, kw_only=True)
class NeedleSample:
    """A context and its questions: after `prompt + questions[i]` a model should say
    `answers[i]`."""

    prompt: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]


@lru_cache(maxsize=1)
def load_filler() -> tuple[str, ...]:
    """Return the sentences of the packaged public-domain prose, in order."""
    return tuple(split_sentences(packaged("filler.txt")))


def split_sentences(text: str) -> list[str]:
    """The sentences of a text; a line end ends one too."""
    return [s for line in text.splitlines() for s in _SENTENCE_GAP.split(line.strip()) if s]


def load_words() -> tuple[list[str], list[str]]:
    """Return the packaged adjectives and nouns, which name facts."""
    return packaged("adjectives.txt").split(), packaged("nouns.txt").split()


def draw_facts(num_facts: int, rng: random.Random) -> list[tuple[str, int]]:
    """Draw `num_facts` pairs (key, value) with distinct keys and distinct five-digit values."""
    adjectives, nouns = load_words()
    indices = rng.sample(range(len(adjectives) * len(nouns)), num_facts)
    keys = [f"{adjectives[i // len(nouns)]} {nouns[i % len(nouns)]}" for i in indices]
    return list(zip(keys, rng.sample(range(10_000, 100_000), num_facts), strict=True))


def _take_sentences(
    count: Callable[[str], int], filler: Sequence[str], start: int, budget: int
) -> list[str]:
    """Take consecutive sentences from `start` on, at most `budget` tokens. The last sentence is
    truncated; after the end of the text comes its beginning."""
    taken: list[str] = []
    while budget > 0:
        sentence = filler[(start + len(taken)) % len(filler)]
        cost = count(" " + sentence)
        if cost > budget:
            cut = _cut(count, sentence, budget)
            return [*taken, cut] if cut else taken
        taken.append(sentence)
        budget -= cost
    return taken


def _cut(count: Callable[[str], int], sentence: str, budget: int) -> str:
    """The longest run of leading words of `sentence` that takes at most `budget` tokens."""
    words = sentence.split()
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if count(" " + " ".join(words[:middle])) <= budget:
            low = middle
        else:
            high = middle - 1
    return " ".join(words[:low])


def _insert(intro: str, sentences: Sequence[str], facts: Sequence[str], gaps: Sequence[int]) -> str:
    """Insert `facts[i]` before sentence `gaps[i]`; a gap equal to the number of sentences is the
    end."""
    placed = dict(zip(gaps, facts, strict=True))
    pieces: list[str] = []
    for index in range(len(sentences) + 1):
        pieces += [placed[index]] if index in placed else []
        pieces += list(sentences[index : index + 1])
    return intro + " ".join(pieces) + "\n"


def _find_start(
    count: Callable[[str], int],
    filler: Sequence[str],
    rng: random.Random,
    num_sentences: int,
    budget: int,
) -> tuple[int, int]:
    """Find a sentence with which `num_sentences` sentences of at most `budget` tokens begin,
    searching from a random one on.

    Returns its index and the number of tokens; those of the shortest such text if none fits.
    """
    begin, best = rng.randrange(len(filler)), (0, sys.maxsize)
    for offset in range(len(filler)):
        start = (begin + offset) % len(filler)
        run = [filler[(start + i) % len(filler)] for i in range(num_sentences)]
        cost = sum(count(" " + sentence) for sentence in run)
        best = min(best, (start, cost), key=lambda pair: pair[1])
        if cost <= budget:
            break
    return best


def fit_prompt(
    count: Callable[[str], int],
    facts: Sequence[str],
    filler: Sequence[str],
    rng: random.Random,
    *,
    length: int,
    reserved: int,
    intro: str = INTRO,
    in_order: bool = False,
) -> str:
    """Build a prompt of at most `length - reserved` tokens: `intro`, then sentences of `filler`,
    with `facts` between them (in the order of `facts` if `in_order`).

    Most tokenizers give the whole prompt as many tokens as the sum of its sentences; then the first
    pass fits. Otherwise the difference is corrected in the next pass. Raises ValueError if the
    facts do not fit.
    """
    fixed = reserved + count(intro) + sum(count(" " + fact) for fact in facts) + 1
    budget = length - fixed
    start, least = _find_start(count, filler, rng, max(1, len(facts) - 1), budget)
    if least > budget:
        raise ValueError(
            f"length is {length} tokens, but {len(facts)} facts between whole sentences, and a "
            f"question, need {fixed + least}: ask for that length or for fewer facts"
        )
    gap_seed = rng.getrandbits(64)
    best = ""
    for _ in range(4):
        sentences = _take_sentences(count, filler, start, budget)
        if len(sentences) < len(facts) - 1:
            break
        gaps = random.Random(gap_seed).sample(range(len(sentences) + 1), len(facts))
        prompt = _insert(intro, sentences, facts, sorted(gaps) if in_order else gaps)
        slack = length - reserved - count(prompt)
        best = prompt if slack >= 0 else best
        if 0 <= slack <= 8:
            break
        budget += slack
    assert best, "the tokenizer counts a text very differently from its sentences"
    return best


def build_sample(
    count_tokens: Callable[[str], int],
    *,
    length: int,
    num_facts: int,
    filler: Sequence[str],
    rng: random.Random,
) -> NeedleSample:
    """Build a context of filler with facts hidden in it, and one question for each fact.

    count_tokens: counts the tokens of a string without special tokens; pass a cached function when
    building many samples. The prompt plus its longest question and answer takes at most `length`
    tokens, and as nearly that many as whole words allow. Raises ValueError if the facts do not fit.
    """
    if num_facts < 1:
        raise ValueError(f"num_facts is {num_facts}; ask for at least 1")
    if not filler:
        raise ValueError("filler has no sentences; use load_filler()")
    pairs = draw_facts(num_facts, rng)
    facts = [FACT.format(key=key, value=value) for key, value in pairs]
    questions = tuple(QUESTION.format(key=key) for key, _ in pairs)
    answers = tuple(ANSWER.format(value=value) for _, value in pairs)
    reserved = max(
        count_tokens(q) + count_tokens(a) for q, a in zip(questions, answers, strict=True)
    )
    prompt = fit_prompt(count_tokens, facts, filler, rng, length=length, reserved=reserved)
    return NeedleSample(prompt=prompt, questions=questions, answers=answers)
