"""Load on an engine in this process: requests that come at their times, and when each had its
tokens. No HTTP and no text: what a server adds is not in it.

The clock is that of the steps: while nothing is to be done it jumps to the next request's time.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from kvfold.engine.core.engine import Engine, Hooks
from kvfold.engine.requests.request import (
    CacheParams,
    Request,
    SamplingParams,
    ScheduledChunk,
    StepOutput,
)


@dataclass(kw_only=True)
class Job:
    """A request and its fate. due: seconds at which it comes. first, end: of its first and last
    token so far; tokens: so many of `outputs`. cached: of its prompt, taken from others."""

    prompt: list[int]
    outputs: int
    cache: CacheParams
    due: float = 0.0
    first: float | None = None
    end: float | None = None
    tokens: int = 0
    cached: int = 0

    @property
    def done(self) -> bool:
        return self.tokens == self.outputs

    @property
    def per_token(self) -> float:
        """Normalised latency (ZACK Fig. 15): seconds from its time to its end, a token."""
        assert self.end is not None
        return (self.end - self.due) / self.outputs


@dataclass(kw_only=True)
class Steps:
    """What steps took: seconds of each; tokens of decoding requests in them, most at once."""

    times: list[float] = field(default_factory=list)
    decodes: int = 0
    largest: int = 0

    @property
    def seconds(self) -> float:
        return sum(self.times)

    def add(self, seconds: float, decodes: int) -> None:
        self.times.append(seconds)
        self.decodes += decodes
        self.largest = max(self.largest, decodes)

    def summary(self) -> dict[str, float]:
        """The sums, and milliseconds of a step in the middle and of the slowest."""
        found: dict[str, float] = {"seconds": self.seconds, "count": len(self.times)}
        found |= {"decodes": self.decodes, "largest": self.largest}
        if self.times:
            middle, slowest = median(self.times), max(self.times)
            found |= {"median_ms": 1e3 * middle, "slowest_ms": 1e3 * slowest}
        return found


@dataclass(kw_only=True)
class Load:
    """What came of jobs. seconds: of the clock, until all ended or the limit; decoding, reading:
    steps that only decode, and that read prompts too."""

    jobs: list[Job]
    seconds: float = 0.0
    decoding: Steps = field(default_factory=Steps)
    reading: Steps = field(default_factory=Steps)
    used_bytes: int = 0

    @property
    def complete(self) -> bool:
        return all(job.done for job in self.jobs)

    @property
    def tokens_per_s(self) -> float:
        return sum(job.tokens for job in self.jobs) / self.seconds


class _Watch(Hooks):
    """Of one step: tokens that decoded, whether a prompt was read; and what requests had cached."""

    def __init__(self) -> None:
        self.decodes, self.reads = 0, False
        self.cached: dict[int, int] = {}

    def count(self, load: Load, seconds: float) -> None:
        """Of the step that is over."""
        (load.reading if self.reads else load.decoding).add(seconds, self.decodes)
        self.decodes, self.reads = 0, False

    def on_context_step_end(self, chunks: Sequence[ScheduledChunk]) -> None:
        self.reads = True

    def on_generation_step_end(self, chunks: Sequence[ScheduledChunk]) -> None:
        self.decodes += len(chunks)

    def on_request_finish(self, request: Request) -> None:
        self.cached[request.id] = request.num_cached


def random_prompts(count: int, tokens: int, vocabulary: int, seed: str) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocabulary) for _ in range(tokens)] for _ in range(count)]


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """Times of so many arrivals, `rate` a second, the first at 0."""
    rng, found = random.Random(seed), [0.0]
    while len(found) < count:
        found.append(found[-1] + rng.expovariate(rate))
    return found


def drive(engine: Engine, jobs: Sequence[Job], limit: float | None = None) -> Load:
    """Serve jobs, whose `due` ascend; after `limit` seconds of the clock cancel what is left.
    Raises RuntimeError where a request ends before its last token for another reason."""
    load, watch = Load(jobs=list(jobs)), _Watch()
    opened: dict[int, Job] = {}
    engine.hooks, coming, start = watch, 0, time.perf_counter()
    while coming < len(jobs) or opened:
        now = time.perf_counter() - start
        if not opened and jobs[coming].due > now:
            start -= jobs[coming].due - now
            now = jobs[coming].due
        if limit is not None and now > limit:
            break
        while coming < len(jobs) and jobs[coming].due <= now:
            opened[_add(engine, jobs[coming])] = jobs[coming]
            coming += 1
        begun, outputs = time.perf_counter(), engine.step()
        ended = time.perf_counter()
        watch.count(load, ended - begun)
        load.used_bytes = max(load.used_bytes, engine.scheduler.pool.used_bytes)
        for output in outputs:
            _deliver(opened, output, ended - start, watch)
    load.seconds = time.perf_counter() - start
    for number in opened:
        engine.cancel(number)
    while engine.has_work:
        engine.step()
    return load


def _deliver(opened: dict[int, Job], output: StepOutput, now: float, watch: _Watch) -> None:
    job = opened[output.id]
    if output.token_ids:
        job.end, job.tokens = now, job.tokens + len(output.token_ids)
        job.first = now if job.first is None else job.first
    if output.finish_reason is not None:
        del opened[output.id]
        job.cached = watch.cached[output.id]
        if not job.done:
            raise RuntimeError(f"a request ended by {output.finish_reason}: {output.error}")


def _add(engine: Engine, job: Job) -> int:
    sampling = SamplingParams(max_new_tokens=job.outputs, ignore_eos=True)
    return engine.add(job.prompt, sampling, job.cache)
