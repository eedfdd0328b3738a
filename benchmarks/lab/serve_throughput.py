"""Throughput of an engine under a rate of compression, all prompts at once (KV-Compress §5.4): what
it writes a second, and how many requests decode together.

L prompt tokens, r rate of compression: a request keeps max(128, L / r) tokens.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvfold.engine.api.llm import LLM
from kvfold.engine.core.engine import Hooks
from kvfold.engine.requests.request import CacheParams, SamplingParams, ScheduledChunk

LEAST = 128  # tokens that a request keeps whatever the rate (KV-Compress §5.1; its "min" is a max)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measurement. tokens_per_s: generated; total_per_s: with those of prompts; largest_batch:
    requests that decoded in one step, at most; used_bytes: of pages, at most."""

    tokens: int
    rate: float
    kept: int | None
    requests: int
    outputs: int
    seconds: float
    tokens_per_s: float
    total_per_s: float
    largest_batch: int
    used_bytes: int
    pool_bytes: int
    preemptions: int
    compressions: int


class Watch(Hooks):
    """The largest decode batch, and the most bytes in use after one."""

    def __init__(self, llm: LLM) -> None:
        self.pool, self.batch, self.used = llm.runner.pool, 0, 0

    def on_generation_step_end(self, chunks: Sequence[ScheduledChunk]) -> None:
        self.batch = max(self.batch, len(chunks))
        self.used = max(self.used, self.pool.used_bytes)


def kept(tokens: int, rate: float) -> int | None:
    """Tokens that a request keeps; None at a rate of 1, which evicts nothing."""
    return None if rate == 1 else max(LEAST, round(tokens / rate))


def build(model: Any, rate: float, *, evict: str, longest: int, **settings: Any) -> LLM:
    """An engine for a rate: without a policy where it evicts nothing, as nothing is then kept for
    one. model: a name or a loaded model; longest: tokens of a request."""
    policy = None if rate == 1 else evict
    return LLM(model, evict=policy, max_tokens=longest, **settings)


def measure(llm: LLM, tokens: int, rate: float, *, requests: int, outputs: int, seed: int) -> Row:
    """So many prompts of `tokens` random tokens at once, `outputs` tokens each. Raises RuntimeError
    where a request ends before that, ValueError where one can never be served."""
    rng, vocabulary = random.Random(f"{seed} {tokens}"), llm.model.config.vocab_size
    prompts = [[rng.randrange(vocabulary) for _ in range(tokens)] for _ in range(requests)]
    budget = kept(tokens, rate)
    cache = CacheParams() if budget is None else CacheParams(max_cache_tokens=budget)
    scheduler, watch = llm.engine.scheduler, Watch(llm)
    llm.engine.hooks, before = watch, (scheduler.num_preemptions, scheduler.compressions.num_done)
    start = time.perf_counter()
    sampling = SamplingParams(max_new_tokens=outputs, ignore_eos=True)
    found = llm.generate(prompts, sampling, cache=cache)
    seconds = time.perf_counter() - start
    if short := next((x for x in found if x.finish_reason != "length"), None):
        raise RuntimeError(f"a request ended by {short.finish_reason}: {short.error or 'too long'}")
    return Row(
        tokens=tokens,
        rate=rate,
        kept=budget,
        requests=requests,
        outputs=outputs,
        seconds=seconds,
        tokens_per_s=requests * outputs / seconds,
        total_per_s=requests * (tokens + outputs) / seconds,
        largest_batch=watch.batch,
        used_bytes=watch.used,
        pool_bytes=llm.runner.pool.num_bytes,
        preemptions=scheduler.num_preemptions - before[0],
        compressions=scheduler.compressions.num_done - before[1],
    )
