"""Needle-in-a-haystack retrieval, phrased as in RULER.

Several facts ("One of the special magic numbers for quiet river is: 48213.") are hidden between the
sentences of ordinary prose, and the model is asked for one number at a time. The context goes
through the model's KV cache once, in chunks; each question then continues from that cache, so that
what a compressed cache has lost shows.
"""

import copy
import math
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from transformers import DynamicCache

from kvfold.data import read_text

__all__ = [
    "ANSWER",
    "FACT",
    "INTRO",
    "QUESTION",
    "NeedleResult",
    "NeedleSample",
    "build_sample",
    "evaluate_needle",
    "load_filler",
    "load_words",
]

INTRO = (
    "Some special magic numbers are hidden within the following text. "
    "Make sure to memorize it. I will quiz you about the numbers afterwards.\n"
)
FACT = "One of the special magic numbers for {key} is: {value}."
QUESTION = (
    "What is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is"
)
ANSWER = " {value}"

_ABBREVIATIONS = "".join(rf"(?<!\b{word}\.)" for word in ("Mr", "Mrs", "Dr", "St", "Sr", "No"))
_SENTENCE_GAP = re.compile(rf"(?<=[.!?]){_ABBREVIATIONS}\s+(?=[\"“‘'(]?[A-Z])")


@dataclass(frozen=True, kw_only=True)
class NeedleSample:
    """One context; `prompt + questions[i]` should be followed by `answers[i]`."""

    prompt: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NeedleResult:
    """Retrieval at one length: `exact` in [0, 1], `exact_se` clustered by context (nan for one)."""

    length: int
    exact: float
    exact_se: float
    num_questions: int


@lru_cache(maxsize=1)
def _filler() -> tuple[str, ...]:
    lines = read_text("filler.txt").splitlines()
    return tuple(s for line in lines for s in _SENTENCE_GAP.split(line.strip()) if s)


def load_filler() -> list[str]:
    """Sentences of the packaged public-domain prose, in order."""
    return list(_filler())


def load_words() -> tuple[list[str], list[str]]:
    """The packaged (adjectives, nouns) that name facts."""
    return read_text("adjectives.txt").split(), read_text("nouns.txt").split()


def _draw_facts(num_facts: int, rng: random.Random) -> list[tuple[str, int]]:
    """`num_facts` pairs (key, value) with distinct keys and distinct five-digit values."""
    adjectives, nouns = load_words()
    indices = rng.sample(range(len(adjectives) * len(nouns)), num_facts)
    keys = [f"{adjectives[i // len(nouns)]} {nouns[i % len(nouns)]}" for i in indices]
    return list(zip(keys, rng.sample(range(10_000, 100_000), num_facts), strict=True))


def _take_sentences(
    count: Callable[[str], int], filler: Sequence[str], start: int, budget: int
) -> list[str]:
    """Consecutive sentences from `start`, wrapping, of at most `budget` tokens; the last is cut."""
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


def _insert(sentences: Sequence[str], facts: Sequence[str], gaps: Sequence[int]) -> str:
    """Prompt with `facts[i]` before sentence `gaps[i]`; a gap equal to the length is the end."""
    placed = dict(zip(gaps, facts, strict=True))
    pieces: list[str] = []
    for index in range(len(sentences) + 1):
        pieces += [placed[index]] if index in placed else []
        pieces += list(sentences[index : index + 1])
    return INTRO + " ".join(pieces) + "\n"


def _find_start(
    count: Callable[[str], int],
    filler: Sequence[str],
    rng: random.Random,
    num_sentences: int,
    budget: int,
) -> tuple[int, int]:
    """The first sentence, from a random one on, that begins a run of at most `budget` tokens.

    Returns it with the tokens of that run of `num_sentences`; if none fits, the shortest run.
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


def _fit_prompt(
    count: Callable[[str], int],
    facts: Sequence[str],
    filler: Sequence[str],
    rng: random.Random,
    *,
    length: int,
    asked: int,
) -> str:
    """The prompt of at most `length - asked` tokens, counted once per sentence and then as a whole.

    Most tokenizers count the whole as the sum of its sentences, and the first pass fits; where
    they do not, the difference goes into the next pass.
    """
    fixed = asked + count(INTRO) + sum(count(" " + fact) for fact in facts) + 1
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
        prompt = _insert(sentences, facts, gaps)
        slack = length - asked - count(prompt)
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
    """A context of filler with facts hidden in it, and one question for each fact.

    `count_tokens` gives the tokens of a string (without special tokens); pass a cached one when
    building many samples. The prompt plus its longest question and answer takes at most `length`
    tokens and as near that as whole words allow. Raises ValueError if the facts do not fit.
    """
    if num_facts < 1:
        raise ValueError(f"num_facts is {num_facts}; ask for at least 1")
    if not filler:
        raise ValueError("filler has no sentences; use load_filler()")
    pairs = _draw_facts(num_facts, rng)
    facts = [FACT.format(key=key, value=value) for key, value in pairs]
    questions = tuple(QUESTION.format(key=key) for key, _ in pairs)
    answers = tuple(ANSWER.format(value=value) for _, value in pairs)
    asked = max(count_tokens(q) + count_tokens(a) for q, a in zip(questions, answers, strict=True))
    prompt = _fit_prompt(count_tokens, facts, filler, rng, length=length, asked=asked)
    return NeedleSample(prompt=prompt, questions=questions, answers=answers)


class _Reader:
    """Greedy reading of one context through a KV cache, batch of one, on the model's device."""

    def __init__(self, model: Any, chunk: int) -> None:
        self.model, self.chunk = model, chunk
        self.cache: Any = None

    def _forward(self, ids: list[int], cache: Any) -> int:
        """Append `ids` to `cache`; returns the most likely next token."""
        tokens = torch.tensor([ids], device=self.model.device)
        out = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    def prefill(self, ids: list[int]) -> None:
        """Read the context in chunks into a new cache."""
        self.cache = DynamicCache(config=self.model.config)
        for begin in range(0, len(ids), self.chunk):
            self._forward(ids[begin : begin + self.chunk], self.cache)

    def answer(self, question: list[int], num_tokens: int) -> list[int]:
        """Greedy continuation of the context and `question`; the cache is left as it was."""
        # A full sliding window has already dropped what a crop would have to bring back.
        sliding = any(getattr(layer, "is_sliding", False) for layer in self.cache.layers)
        cache = copy.deepcopy(self.cache) if sliding else self.cache
        generated = [self._forward(question, cache)]
        while len(generated) < num_tokens:
            generated.append(self._forward(generated[-1:], cache))
        if not sliding:
            cache.crop(-(len(question) + num_tokens - 1))
        return generated


def _check_lengths(model: Any, lengths: Sequence[int]) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and max(lengths) > limit:
        raise ValueError(
            f"lengths asks for {max(lengths)} tokens, but the model's max_position_embeddings is "
            f"{limit}: leave out the lengths above {limit}"
        )


def _summarise(length: int, hits: list[list[bool]]) -> NeedleResult:
    """Mean over questions and its standard error over contexts (equal numbers of questions)."""
    means = [sum(context) / len(context) for context in hits]
    exact = sum(means) / len(means)
    spread = sum((mean - exact) ** 2 for mean in means)
    num = len(means)
    error = math.sqrt(spread / (num - 1) / num) if num > 1 else math.nan
    return NeedleResult(
        length=length, exact=exact, exact_se=error, num_questions=sum(map(len, hits))
    )


@torch.no_grad()
def evaluate_needle(
    model: Any,
    tokenizer: Any,
    *,
    lengths: Sequence[int] = (512, 1024, 2048, 4096),
    num_contexts: int = 25,
    facts_per_context: int = 4,
    chunk: int = 512,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[NeedleResult]:
    """Exact-match retrieval by greedy decoding, one result for each of `lengths` (tokens).

    Every context is prefilled once, `chunk` tokens at a time; every question continues from that
    cache and is then removed from it. `progress` is called with (contexts done, contexts in all).
    Raises ValueError for a length beyond the model's positions or too short for the facts.
    """
    _check_lengths(model, lengths)
    filler, reader = load_filler(), _Reader(model, chunk)
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    @cache
    def count(text: str) -> int:
        return len(encode(text))

    def ask(question: str, answer: str) -> bool:
        generated = reader.answer(encode(question), count(answer))
        return tokenizer.decode(generated).strip() == answer.strip()

    results = []
    for number, length in enumerate(lengths):
        rng = random.Random(f"{seed}/{length}")
        hits: list[list[bool]] = []
        for context in range(num_contexts):
            sample = build_sample(
                count,
                length=length - len(bos),
                num_facts=facts_per_context,
                filler=filler,
                rng=rng,
            )
            reader.prefill(bos + encode(sample.prompt))
            hits.append([ask(*pair) for pair in zip(sample.questions, sample.answers, strict=True)])
            if progress is not None:
                progress(number * num_contexts + context + 1, len(lengths) * num_contexts)
        results.append(_summarise(length, hits))
    return results
