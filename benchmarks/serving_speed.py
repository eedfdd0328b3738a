"""What a smaller cache gains where memory is short: engines on random weights, in a pool that is
what a 24 GB card leaves beside Llama-3.1-8B (as benchmarks/bench_throughput.py has it).

    python benchmarks/serving_speed.py --json serving-8b.json

throughput: KV-Compress §5.4, generated tokens a second of prompts that all come at once, for an
engine that keeps all, one that evicts to 1 / r (128 tokens at least), and plans of dimensions and
bits. latency: requests a second at a bound of normalised latency (ZACK Fig. 15), Poisson arrivals.
first: the time to the first token with nine tenths of a prompt cached and without. Every engine is
a process of its own, so that they get ready side by side; they are timed one after another, and
every row is written as it is done. No quality: weights are random (docs/quality.md has that of the
settings).
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

POOL = 3_529_603_481  # bytes: 0.9 of an L4 without weights and work space (docs/lab/serving.md)
FULL, EVICT = "bf16-full", "kv-compress"
SLOTS, LONGEST = 256, 12_000
SIZES = [
    1,
    2,
    4,
    8,
    *range(16, 64, 16),
    *range(64, SLOTS, 32),
    SLOTS,
]  # of graphs: fewer, to start soon
FIRST_RATES = {FULL: 5.5, EVICT: 8.0}  # a second, 12 for others; then as they do
# What is done, most telling first: kind, engine, tokens, rate, requests, most seconds, and steps
# between compressions of all that run. What keeps all serves few at once, so that few prompts
# already take turns many times.
PLAN: tuple[Any, ...] = (
    ("throughput", EVICT, 6000, 64, 192, 62, 32),
    ("throughput", FULL, 6000, 1, 8, 20, None),
    ("throughput", EVICT, 500, 2, 256, 32, None),
    ("throughput", FULL, 500, 1, 128, 26, None),
    ("latency", "planned"),
    ("latency", FULL),
    ("latency", "planned"),
    ("latency", FULL),
    ("throughput", EVICT, 10_000, 64, 64, 30, 32),
    ("throughput", FULL, 10_000, 1, 4, 16, None),
    ("throughput", EVICT, 6000, 8, 64, 28, None),
    ("throughput", EVICT, 500, 8, 256, 26, None),
    ("latency", "planned"),
    ("latency", FULL),
    ("throughput", "planned", 500, 1, 256, 26, None),
    ("throughput", EVICT, 6000, 2, 24, 28, None),
    ("first", FULL, 8192),
    ("first", "planned", 8192),
)
# Before all that, so that nothing compiles in it: tokens, prompts, outputs and tokens kept.
WARM: dict[str, tuple[tuple[int, int, int, int | None], ...]] = {
    EVICT: ((6000, 12, 60, 128), (500, 110, 60, 250), (500, 60, 30, 128), (6000, 5, 12, 3000)),
    FULL: ((6000, 5, 12, None), (500, 70, 60, None)),
}
USUAL = (500, 140, 60, None), (6000, 5, 12, None)


# -- in an engine's process -----------------------------------------------------------------------


def serve(name: str, asked: argparse.Namespace, line: Connection) -> None:
    """Get ready, then do what is sent until None is."""
    try:
        worker = Worker(name, asked)
        line.send(("engines", worker.about))
    except Exception as error:
        line.send(("failed", {"what": name, "why": f"{type(error).__name__}: {error}"[:500]}))
        return
    while (call := line.recv()) is not None:
        kind, *given = call
        try:
            line.send(("rows", getattr(worker, kind)(*given)))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:500]
            line.send(("failed", {"what": f"{name} {call}", "why": why}))


class Worker:
    """An engine, and what is measured of it."""

    def __init__(self, name: str, asked: argparse.Namespace) -> None:
        import torch

        from kvfold.bench.synthetic_engine import random_model
        from kvfold.engine.api.llm import LLM
        from kvfold.engine.core.compression import Schedule
        from kvfold.engine.runner import graphs
        from lab.variants import VARIANTS

        begun = time.perf_counter()
        graphs.sizes_up_to = lambda most: [*(x for x in SIZES if x < most), most]
        self.name, self.asked, self.device = name, asked, torch.device(asked.device)
        variant = None if name in (FULL, EVICT) else VARIANTS[name]
        model = random_model(asked.shape, variant, self.device)
        made = time.perf_counter() - begun
        settings: dict[str, Any] = {"rotate": False, "kv_bytes": asked.kv_bytes, "page": 32}
        if name == EVICT:
            settings |= {"evict": EVICT, "page": 16}
        elif variant is not None:
            settings |= {"page": variant.page, "bits": variant.bits if variant.bits < 16 else None}
        self.llm = LLM(
            model,
            owned=True,
            max_tokens=LONGEST // asked.shrink + asked.outputs,
            max_sequences=SLOTS,
            schedule=Schedule(admit_every=asked.admit_every),
            **settings,
        )
        ready = time.perf_counter() - begun
        for tokens, count in ((8, 1), (64, 3)):
            self._warm(tokens, count, 20, None)
        for tokens, count, outputs, keep in WARM.get(name, USUAL):
            self._warm(max(2, tokens // asked.shrink), max(1, count // asked.shrink), outputs, keep)
        pool, seconds = self.llm.runner.pool, time.perf_counter() - begun
        cuda = self.device.type == "cuda"
        self.about = {
            "engine": name,
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "versions": {x: version(x) for x in ("torch", "transformers")},
            "pool_bytes": pool.num_bytes,
            "token_bytes": pool.layout.page_bytes / pool.layout.page,
            "page": pool.layout.page,
            "seconds": {"model": made, "engine": ready - made, "warm": seconds - ready},
        }

    def _warm(self, tokens: int, count: int, outputs: int, keep: int | None) -> None:
        from lab import serve_engine as load

        jobs = [self._job(tokens, f"warm {tokens} {i}", outputs, keep) for i in range(count)]
        for i, job in enumerate(jobs):
            job.due = 0.01 * (i // 8)
        load.drive(self.llm.engine, jobs)

    def _job(self, tokens: int, seed: str, outputs: int, keep: int | None, due: float = 0) -> Any:
        from kvfold.engine.requests.request import CacheParams
        from lab import serve_engine as load

        (prompt,) = load.random_prompts(1, tokens, self.llm.model.config.vocab_size, seed)
        all_of_it = 1.0 if self.name == EVICT and keep is None else None
        cache = CacheParams(prefix_caching=False, max_cache_tokens=keep, keep_tokens=all_of_it)
        return load.Job(prompt=prompt, outputs=outputs, cache=cache, due=due)

    def throughput(
        self, tokens: int, rate: float, requests: int, limit: float, every: int | None
    ) -> dict[str, Any]:
        """So many prompts at once."""
        from lab import serve_engine as load
        from lab.serve_throughput import kept

        keep, outputs = kept(tokens, rate), self.asked.outputs
        jobs = [self._job(tokens, f"{tokens} {i}", outputs, keep) for i in range(requests)]
        scheduler, runner = self.llm.engine.scheduler, self.llm.runner
        turns = scheduler.compressions
        before = scheduler.num_preemptions, turns.num_done
        turns.when = replace(turns.when, every=every)
        timed = Timed(runner.compress)
        vars(runner)["compress"] = timed
        try:
            found = load.drive(self.llm.engine, jobs, limit)
        finally:
            del vars(runner)["compress"]
            turns.when = replace(turns.when, every=None)
        return self._row("throughput", found) | {
            "tokens": tokens,
            "rate": rate,
            "kept": keep,
            "tokens_per_s": found.tokens_per_s,
            "preemptions": scheduler.num_preemptions - before[0],
            "compressions": turns.num_done - before[1],
            "every": every,
            "compressing": timed.steps.summary(),
        }

    def latency(self, rate: float, span: float) -> dict[str, Any]:
        """A Poisson process for some seconds. Sustained: all served, within the bound."""
        from lab import serve_engine as load

        asked, count = self.asked, max(8, round(rate * span))
        times, tokens = load.poisson(count, rate, 0), 500 // asked.shrink
        jobs = [
            self._job(tokens, f"{rate} {i}", asked.outputs, None, due)
            for i, due in enumerate(times)
        ]
        found = load.drive(self.llm.engine, jobs, limit=span + 8)
        per_token = [1e3 * job.per_token for job in jobs if job.done] or [math.nan]
        first = [1e3 * (job.first - job.due) for job in jobs if job.first is not None]
        mean = statistics.fmean(per_token)
        return self._row("latency", found) | {
            "tokens": tokens,
            "rate": rate,
            "ms_per_token": mean,
            "ms_per_token_p90": percentile(per_token, 0.9),
            "ttft_ms_p50": percentile(first, 0.5),
            "ttft_ms_p99": percentile(first, 0.99),
            "bound_ms": asked.bound,
            "sustained": found.complete and mean <= asked.bound,
        }

    def _row(self, kind: str, found: Any) -> dict[str, Any]:
        done = sum(job.done for job in found.jobs)
        row = {"kind": kind, "engine": self.name, "requests": len(found.jobs), "ended": done}
        row |= {"outputs": self.asked.outputs, "complete": found.complete}
        row |= {"seconds": found.seconds, "largest_batch": found.decoding.largest}
        row |= {"used_bytes": found.used_bytes, "admit_every": self.asked.admit_every}
        steps = {"decoding": found.decoding.summary(), "reading": found.reading.summary()}
        return row | steps

    def first(self, tokens: int) -> dict[str, Any]:
        """Prompts that share nine tenths with one before, one at a time; and the same, not
        shared."""
        from kvfold.engine.requests.request import CacheParams
        from lab import serve_engine as load

        vocabulary = self.llm.model.config.vocab_size
        (prefix,) = load.random_prompts(1, tokens * 9 // 10, vocabulary, "prefix")
        own = load.random_prompts(21, tokens - len(prefix), vocabulary, "own")
        times: dict[bool, list[load.Job]] = {True: [], False: []}
        for number, rest in enumerate(own):
            shared = number == 0 or number % 2 == 1
            cache = CacheParams(prefix_caching=shared)
            job = load.Job(prompt=prefix + rest, outputs=2, cache=cache)
            load.drive(self.llm.engine, [job])
            if number > 2:
                times[shared].append(job)
        row: dict[str, Any] = {"kind": "first", "engine": self.name, "tokens": tokens}
        for label, shared in (("cached", True), ("computed", False)):
            ms = [1e3 * job.first for job in times[shared] if job.first is not None]
            hits = statistics.fmean(job.cached / tokens for job in times[shared])
            row |= {f"{label}_ms": statistics.median(ms), f"{label}_ms_low": min(ms)}
            row |= {f"{label}_ms_high": max(ms), f"{label}_share": hits}
        return row


class Timed:
    """Seconds of a function, the device's work with it."""

    def __init__(self, work: Any) -> None:
        from lab.serve_engine import Steps

        self.work, self.steps = work, Steps()

    def __call__(self, *given: Any) -> Any:
        import torch

        begun = time.perf_counter()
        try:
            return self.work(*given)
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.steps.add(time.perf_counter() - begun, 0)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values) or [math.nan]
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# -- in the process that asks ---------------------------------------------------------------------


class Rates:
    """The rates that an engine is asked for: up until one is not sustained, then between."""

    def __init__(self, first: float) -> None:
        self.next, self.good, self.bad = first, 0.0, math.inf

    def learn(self, rate: float, sustained: bool) -> None:
        if sustained:
            self.good = max(self.good, rate)
        else:
            self.bad = min(self.bad, rate)
        between = math.sqrt(self.good * self.bad) if self.good else self.bad / 1.3
        self.next = self.good * 1.3 if self.bad == math.inf else between


class Script:
    """Results, written after every row, and the time that is left."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.begun = asked, time.perf_counter()
        settings = vars(asked) | {"json": str(asked.json)}
        self.found: dict[str, Any] = {"settings": settings, "engines": [], "rows": [], "failed": []}
        self.lines: dict[str, Connection] = {}
        self.children: dict[str, Any] = {}

    @property
    def left(self) -> float:
        return self.asked.seconds - (time.perf_counter() - self.begun)

    def add(self, kind: str, row: dict[str, Any]) -> None:
        row["at"] = round(time.perf_counter() - self.begun, 1)
        self.found[kind].append(row)
        self.asked.json.write_text(json.dumps(self.found, indent=1) + "\n")
        flat = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        print(kind, flat, flush=True)

    def start(self) -> None:
        """All engines, side by side; those that are ready in time stay."""
        context = get_context("spawn")
        for name in self.asked.engines.split(","):
            line, other = context.Pipe()
            child = context.Process(target=serve, args=(name, self.asked, other), daemon=True)
            child.start()
            other.close()
            self.lines[name], self.children[name] = line, child
        until = self.left - self.asked.start
        for name in tuple(self.lines):
            if self.receive(name, max(1.0, self.left - until)) is None:
                self.drop(name)

    def receive(self, name: str, seconds: float) -> dict[str, Any] | None:
        """An answer, noted; None where it is an error, or does not come."""
        try:
            if self.lines[name].poll(seconds):
                kind, row = self.lines[name].recv()
                self.add(kind, row)
                return None if kind == "failed" else row
            self.add("failed", {"what": name, "why": f"no answer in {seconds:.0f} s"})
        except EOFError:
            self.add("failed", {"what": name, "why": "its process ended"})
        self.drop(name)
        return None

    def drop(self, name: str) -> None:
        self.lines.pop(name, None)
        self.children[name].kill()

    def run(self) -> None:
        self.start()
        rates = {name: Rates(FIRST_RATES.get(name, 12.0)) for name in self.lines}
        for kind, name, *given in self.steps():
            if name not in self.lines or self.left < 8:
                continue
            limit = self.left - 3
            if kind == "throughput":
                tokens, rate, requests, most, every = given
                limit = min(limit, most)
                number = max(1, requests // self.asked.shrink)
                call: tuple[Any, ...] = tokens // self.asked.shrink, rate, number, limit, every
            elif kind == "latency":
                if limit < 14:
                    continue
                span = min(self.asked.span, limit - 9)
                call, limit = (rates[name].next, span), span + 8
            else:
                call = (given[0] // self.asked.shrink,)
            self.lines[name].send((kind, *call))
            row = self.receive(name, limit + 6)
            if kind == "latency" and row is not None:
                rates[name].learn(row["rate"], row["sustained"])
        for name in tuple(self.lines):
            self.drop(name)

    def steps(self) -> Iterator[tuple[Any, ...]]:
        only = self.asked.only.split(",") if self.asked.only else ()
        others = [x for x in self.asked.engines.split(",") if x not in (FULL, EVICT)]
        for kind, name, *given in PLAN:
            if only and kind not in only:
                continue
            for own in others if name == "planned" else [name]:
                yield (kind, own, *given)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--engines", default=f"{FULL},{EVICT},swift-4.6x-odd")
    parser.add_argument("--only", default="", help="throughput, latency, first; all by default")
    parser.add_argument("--kv-bytes", type=int, default=POOL)
    parser.add_argument("--seconds", type=float, default=270, help="for all of it")
    parser.add_argument("--start", type=float, default=100, help="seconds to get ready")
    parser.add_argument("--outputs", type=int, default=500)
    parser.add_argument("--span", type=float, default=12, help="seconds of arrivals")
    parser.add_argument("--bound", type=float, default=15, help="ms a token, normalised latency")
    parser.add_argument("--admit-every", type=int, default=8, help="steps, as of Schedule")
    parser.add_argument("--shrink", type=int, default=1, help="lengths and counts so much smaller")
    Script(parser.parse_args()).run()


if __name__ == "__main__":
    main()
