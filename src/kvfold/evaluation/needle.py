"""Measures needle-in-a-haystack retrieval, phrased as in RULER.

Several facts ("One of the special magic numbers for quiet river is: 48213.") are hidden between the
sentences of ordinary prose, and the model is asked for one number at a time. The context goes
through the model's KV cache once, in chunks. Each question then continues from that cache, and
shows what a compressed cache has lost.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from kvfold.evaluation.dense import DenseSession
from kvfold.evaluation.haystack import build_sample, load_filler
from kvfold.evaluation.perplexity import max_positions, vocabulary
from kvfold.evaluation.reader import Reader
from kvfold.utils.progress import Report
from kvfold.utils.tokens import check_ids, leading_tokens


@dataclass(frozen=True, kw_only=True)
class NeedleResult:
    """The results at one context length. exact: fraction of questions answered exactly; exact_se:
    its standard error, clustered by context (nan for one context)."""

    length: int
    exact: float
    exact_se: float
    num_questions: int


def _summarise(length: int, hits: list[list[bool]]) -> NeedleResult:
    """Average over questions, with the standard error over contexts of equally many questions."""
    means = [sum(context) / len(context) for context in hits]
    num, num_questions = len(means), sum(map(len, hits))
    exact = sum(means) / num
    spread = sum((mean - exact) ** 2 for mean in means)
    error = math.sqrt(spread / (num - 1) / num) if num > 1 else math.nan
    return NeedleResult(length=length, exact=exact, exact_se=error, num_questions=num_questions)


def evaluate_needle(
    model: Any,
    tokenizer: Any,
    *,
    lengths: Sequence[int] = (512, 1024, 2048, 4096),
    num_contexts: int = 25,
    facts_per_context: int = 4,
    chunk: int = 512,
    seed: int = 0,
    reader: Reader | None = None,
    progress: Report | None = None,
) -> list[NeedleResult]:
    """Measure exact-match retrieval by greedy decoding, at each of `lengths` (tokens).

    Each context is prefilled once, `chunk` tokens at a time; each question continues from that
    cache and is then removed from it. reader: of another cache than transformers'. progress: called
    with (contexts done, all). Raises ValueError for a length beyond the model's positions or too
    short for the facts.
    """
    limit = max_positions(model)
    if limit is not None and max(lengths) > limit:
        raise ValueError(
            f"lengths asks for {max(lengths)} tokens, but the model's max_position_embeddings is "
            f"{limit}: leave out the lengths above {limit}"
        )
    filler, reader = load_filler(), reader or Reader(partial(DenseSession, model, chunk))
    leading, size = leading_tokens(tokenizer), vocabulary(model)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        check_ids(ids, size)
        return ids

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
                length=length - len(leading),
                num_facts=facts_per_context,
                filler=filler,
                rng=rng,
            )
            reader.prefill(leading + encode(sample.prompt))
            hits.append([ask(*pair) for pair in zip(sample.questions, sample.answers, strict=True)])
            if progress is not None:
                progress(number * num_contexts + context + 1, len(lengths) * num_contexts)
        results.append(_summarise(length, hits))
    return results
