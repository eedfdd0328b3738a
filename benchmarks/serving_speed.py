"""What a smaller cache gains where memory is short: engines on random weights, in a pool that is
what a 24 GB card leaves beside Llama-3.1-8B (kvfold bench throughput's figure for an L4).

    python benchmarks/serving_speed.py throughput --json throughput.json
    python benchmarks/serving_speed.py latency --json latency.json

throughput: KV-Compress §5.4, generated tokens a second of prompts that all come at once, for an
engine that keeps all, one that evicts to 1 / r (128 tokens at least), and plans of dimensions and
bits. latency: requests a second at a bound of normalised latency (ZACK Fig. 15), Poisson arrivals,
and the time to the first token with nine tenths of a prompt cached and without. Every row is
written as it is done. No quality: weights are random (docs/quality.md has that of the settings).
"""

import argparse
import gc
import json
import math
import statistics
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvfold.bench import serve_engine as load
from kvfold.bench.serve_throughput import kept
from kvfold.bench.synthetic_engine import random_model
from kvfold.bench.variants import VARIANTS
from kvfold.engine.llm import LLM
from kvfold.engine.request import CacheParams

POOL = 3_529_603_481  # bytes: 0.9 of an L4 without weights and work space (docs/serving.md)
OUTPUTS = 500
FULL, EVICT = "bf16-full", "kv-compress"
# Engine, tokens of a prompt, rate, requests, seconds at most: most telling first. What keeps all
# serves few at once, so that few prompts already take turns many times.
THROUGHPUT = (
    (FULL, 500, 1, 80, 25),
    (FULL, 6000, 1, 16, 25),
    (EVICT, 500, 2, 256, 30),
    (EVICT, 6000, 64, 160, 50),
    (EVICT, 500, 4, 256, 25),
    (EVICT, 6000, 8, 96, 35),
)
PLANNED_ROWS = ((500, 192, 25), (6000, 48, 30))
MOST_POINTS = 6  # rates of an engine
FIRST_RATES = {FULL: 5.0, "swift-4.6x-odd": 11.0, "swift-int4": 10.0}  # a second; then as they do


class Script:
    """Results, written after every row, and the time that is left."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.begun = asked, time.perf_counter()
        self.device = torch.device(asked.device)
        cuda = self.device.type == "cuda"
        about = {
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "versions": {name: version(name) for name in ("torch", "transformers")},
            "settings": vars(asked) | {"json": str(asked.json)},
        }
        self.found: dict[str, Any] = about | {"engines": [], "rows": [], "failed": []}

    @property
    def left(self) -> float:
        return self.asked.seconds - (time.perf_counter() - self.begun)

    def add(self, kind: str, row: dict[str, Any]) -> None:
        row["at"] = round(time.perf_counter() - self.begun, 1)
        self.found[kind].append(row)
        self.asked.json.write_text(json.dumps(self.found, indent=1) + "\n")
        short = {name: _short(value) for name, value in row.items() if not isinstance(value, dict)}
        print(kind, short, flush=True)

    def attempt(self, what: str, work: Any, *given: Any, **named: Any) -> Any:
        """What work gives; None where it fails, which is kept as a row: the rest goes on."""
        try:
            return work(*given, **named)
        except Exception as error:
            self.add("failed", {"what": what, "why": f"{type(error).__name__}: {error}"[:500]})
            return None

    def engine(self, name: str, model: Any, longest: int, slots: int) -> LLM:
        begun = time.perf_counter()
        settings: dict[str, Any] = {"rotate": False, "kv_bytes": self.asked.kv_bytes}
        if name == EVICT:
            settings |= {"evict": EVICT, "page": 16}
        else:
            bits = VARIANTS[name].bits
            settings |= {"page": VARIANTS[name].page, "bits": bits if bits < 16 else None}
        llm = LLM(model, max_tokens=longest, max_sequences=slots, **settings)
        probe = [_job(tokens, llm, f"probe {tokens}", outputs=4) for tokens in (longest // 2, 8)]
        load.drive(llm.engine, probe)  # what is compiled at first use
        pool, seconds = llm.runner.pool, time.perf_counter() - begun
        row = {"engine": name, "slots": slots, "pool_bytes": pool.num_bytes, "seconds": seconds}
        row |= {"token_bytes": pool.layout.page_bytes / pool.layout.page}
        self.add("engines", row | {"page": pool.layout.page})
        return llm


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _job(tokens: int, llm: LLM, seed: str, *, outputs: int, due: float = 0.0, **cache: Any) -> Any:
    (prompt,) = load.random_prompts(1, tokens, llm.model.config.vocab_size, seed)
    params = CacheParams(**({"prefix_caching": False} | cache))
    if llm.cache.evict and not params.limited:
        params = CacheParams(keep_tokens=1.0, prefix_caching=False)
    return load.Job(prompt=prompt, outputs=outputs, cache=params, due=due)


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Timed:
    """Seconds of a function, the device's work with it."""

    def __init__(self, work: Any, device: torch.device) -> None:
        self.work, self.device, self.seconds, self.count = work, device, 0.0, 0

    def __call__(self, *given: Any) -> Any:
        begun = time.perf_counter()
        try:
            return self.work(*given)
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.seconds += time.perf_counter() - begun
            self.count += 1


# -- throughput -----------------------------------------------------------------------------------


def throughput(script: Script) -> None:
    asked = script.asked
    longest = max(tokens for _, tokens, *_ in THROUGHPUT) // asked.shrink + asked.outputs
    model = random_model(asked.shape, None, script.device)
    engines = {name: script.engine(name, model, longest, 256) for name in (FULL, EVICT)}
    for name, tokens, rate, requests, most in THROUGHPUT:
        script.attempt(
            f"{name} {tokens} at {rate}", together, script, engines[name], name,
            tokens // asked.shrink, rate, requests // asked.shrink, most,
        )  # fmt: skip
    del engines, model
    _release()
    for name in asked.planned.split(","):
        if script.left > 30:
            script.attempt(name, planned, script, name, longest)


def planned(script: Script, name: str, longest: int) -> None:
    asked = script.asked
    model = random_model(asked.shape, VARIANTS[name], script.device)
    llm = script.engine(name, model, longest, 256)
    for tokens, requests, most in PLANNED_ROWS:
        together(script, llm, name, tokens // asked.shrink, 1, requests // asked.shrink, most)


def together(
    script: Script, llm: LLM, name: str, tokens: int, rate: float, requests: int, most: float
) -> None:
    """A row: so many prompts at once. Skipped where no time is left."""
    limit = min(most, script.left - 2)
    if limit < 5:
        return script.add("failed", {"what": f"{name} {tokens} at {rate}", "why": "no time left"})
    keep, outputs = kept(tokens, rate), script.asked.outputs
    cache = {} if keep is None else {"max_cache_tokens": keep}
    jobs = [_job(tokens, llm, f"{tokens} {i}", outputs=outputs, **cache) for i in range(requests)]
    scheduler, runner = llm.engine.scheduler, llm.runner
    before = scheduler.num_preemptions, scheduler.num_compressions
    timed = _Timed(runner.compress, script.device)
    vars(runner)["compress"] = timed
    try:
        found = load.drive(llm.engine, jobs, limit)
    finally:
        del vars(runner)["compress"]
    row = {"engine": name, "tokens": tokens, "rate": rate, "kept": keep, "requests": requests}
    row |= {"outputs": outputs, "complete": found.complete, "seconds": found.seconds}
    row |= {"tokens_per_s": found.tokens_per_s, "largest_batch": found.decoding.largest}
    row |= {"ended": sum(job.done for job in jobs), "used_bytes": found.used_bytes}
    row |= {"preemptions": scheduler.num_preemptions - before[0]}
    row |= {"compressions": scheduler.num_compressions - before[1]}
    row |= {"compress_s": timed.seconds, "compress_calls": timed.count}
    row |= {"decoding": asdict(found.decoding), "reading": asdict(found.reading)}
    script.add("rows", row)
    return None


# -- latency --------------------------------------------------------------------------------------


def latency(script: Script) -> None:
    """First tokens of both engines, then rates of both, in turns as time is left."""
    asked = script.asked
    names = (FULL, *asked.planned.split(","))
    share = (asked.seconds - 15) / len(names)
    for number, name in enumerate(names):
        until = script.left - share
        last = number + 1 == len(names)
        script.attempt(name, one_engine, script, name, 4.0 if last else max(4.0, until))
        _release()


def one_engine(script: Script, name: str, leave: float) -> None:
    """An engine's figures, until `leave` seconds are left."""
    asked = script.asked
    model = random_model(asked.shape, VARIANTS[name] if name != FULL else None, script.device)
    length = 8192 // asked.shrink
    llm = script.engine(name, model, length + 64, 256)
    script.attempt(f"first token {name}", first_tokens, script, llm, name, length)
    rate, good, bad = FIRST_RATES.get(name, 8.0), 0.0, math.inf
    for _ in range(MOST_POINTS):
        if script.left - leave < 14:
            return
        row = script.attempt(f"{name} at {rate:.2f}/s", arriving, script, llm, name, rate, leave)
        if row is None:
            return
        if row["sustained"]:
            good = max(good, rate)
        else:
            bad = min(bad, rate)
        rate = good * 1.3 if bad == math.inf else bad / 1.3 if not good else math.sqrt(good * bad)
        if good and bad / good < 1.06:
            return


def arriving(script: Script, llm: LLM, name: str, rate: float, leave: float) -> dict[str, Any]:
    """A row: a Poisson process for some seconds. Sustained: all served, within the bound."""
    asked = script.asked
    span = min(asked.span, max(6.0, script.left - leave - 8))
    count = max(8, round(rate * span))
    times = load.poisson(count, rate, 0)
    tokens, outputs = 500 // asked.shrink, asked.outputs
    jobs = [
        _job(tokens, llm, f"{rate} {i}", outputs=outputs, due=due) for i, due in enumerate(times)
    ]
    found = load.drive(llm.engine, jobs, limit=span + 10)
    done = [job for job in jobs if job.done]
    row = {"engine": name, "tokens": tokens, "outputs": outputs, "rate": rate, "requests": count}
    row |= {"complete": found.complete, "seconds": found.seconds, "ended": len(done)}
    per_token = [1e3 * job.per_token for job in done] or [math.nan]
    first = [1e3 * (job.first - job.due) for job in jobs if job.first is not None]
    row |= {"ms_per_token": statistics.fmean(per_token), "bound_ms": asked.bound}
    row |= {"ms_per_token_p90": _percentile(per_token, 0.9)}
    row |= {"ttft_ms_p50": _percentile(first, 0.5), "ttft_ms_p99": _percentile(first, 0.99)}
    row |= {"largest_batch": found.decoding.largest, "used_bytes": found.used_bytes}
    row |= {"decoding": asdict(found.decoding), "reading": asdict(found.reading)}
    row["sustained"] = found.complete and row["ms_per_token"] <= asked.bound
    script.add("rows", row)
    return row


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def first_tokens(script: Script, llm: LLM, name: str, tokens: int) -> None:
    """Prompts that share nine tenths with one before, one at a time; and the same, not shared."""
    vocabulary = llm.model.config.vocab_size
    (prefix,) = load.random_prompts(1, tokens * 9 // 10, vocabulary, "prefix")
    own = load.random_prompts(17, tokens - len(prefix), vocabulary, "own")
    times: dict[bool, list[load.Job]] = {True: [], False: []}
    for number, rest in enumerate(own):
        shared = number == 0 or number % 2 == 1
        cache = CacheParams(prefix_caching=shared)
        job = load.Job(prompt=prefix + rest, outputs=2, cache=cache)
        load.drive(llm.engine, [job])
        if number:
            times[shared].append(job)
    row: dict[str, Any] = {"engine": name, "tokens": tokens, "kind": "first token"}
    for label, shared in (("cached", True), ("computed", False)):
        ms = [1e3 * job.first for job in times[shared] if job.first is not None]
        hits = statistics.fmean(job.cached / tokens for job in times[shared])
        row |= {f"{label}_ms": statistics.median(ms), f"{label}_ms_low": min(ms)}
        row |= {f"{label}_ms_high": max(ms), f"{label}_share": hits}
    script.add("rows", row)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("part", choices=("throughput", "latency"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-bytes", type=int, default=POOL)
    parser.add_argument("--seconds", type=float, default=150, help="for all of it")
    parser.add_argument("--outputs", type=int, default=OUTPUTS)
    parser.add_argument("--planned", default="swift-4.6x-odd", help="variants beside the full one")
    parser.add_argument("--span", type=float, default=12, help="seconds of arrivals")
    parser.add_argument("--bound", type=float, default=15, help="ms a token, normalised latency")
    parser.add_argument("--shrink", type=int, default=1, help="lengths and counts so much smaller")
    asked = parser.parse_args()
    {"throughput": throughput, "latency": latency}[asked.part](Script(asked))


if __name__ == "__main__":
    main()
