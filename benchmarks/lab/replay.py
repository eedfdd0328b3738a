"""What it costs to read a prompt once more for a policy that scores rows by it, beside its prefill:
time, memory and floating-point operations.

Shapes: T tokens of the prompt, n of a piece; D model width, F of the MLP.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from kvfold.bench import synthetic_engine as served
from kvfold.bench.decode import memory_shortage
from kvfold.bench.variants import SHAPES, variant_layout
from kvfold.cache.eviction.policy import Policy
from kvfold.cache.eviction.scorers.rescoring import Rescoring
from kvfold.engine.core.engine import default_chunk
from kvfold.engine.requests.request import Batch, CacheParams, Request
from kvfold.engine.runner.repair import QUERIES
from kvfold.engine.runner.runner import ModelRunner
from lab.variants import VARIANTS

RUNS = 3  # that are timed, after one that is not


@dataclass(frozen=True, kw_only=True)
class Row:
    """Milliseconds to prefill T tokens, to read them again with scores, and to select and move the
    rows that stay, repaired if so asked, medians of RUNS; most bytes allocated meanwhile beyond
    those before (None: the device does not say); tera floating-point operations of the first
    two, and of repair alone."""

    shape: str
    variant: str
    policy: str
    whole: bool
    tokens: int
    keep: float
    repair: bool
    prefill_ms: float
    score_ms: float
    evict_ms: float
    prefill_bytes: int | None
    score_bytes: int | None
    prefill_tflop: float
    score_tflop: float
    repair_tflop: float


def measure(
    shape: str,
    name: str,
    policies: list[Policy],
    tokens: int,
    keep: float,
    device: torch.device,
    repair: bool = False,
) -> Iterator[Row | str]:
    """A row for every policy, or why not. Raises what goes wrong on the way."""
    plain, tracked = VARIANTS[name], replace(VARIANTS[name], evict=2)
    if reason := memory_shortage(
        served.pool_bytes(variant_layout(SHAPES[shape], tracked), 1, tokens), device
    ):
        yield reason
        return
    model = served.random_model(shape, plain, device)
    for policy in policies:
        size = {"batch": 1, "longest": tokens}
        engine = served.build_engine(model, shape, tracked, **size, evict="kvzip", repair=repair)
        runner = served.runner_of(engine)
        assert runner.rescorer is not None
        runner.policy = runner.eviction.policy = runner.rescorer.policy = policy
        scorer = runner.rescorer.scorer
        first, found = operations(shape, tokens, scorer)
        yield Row(
            shape=shape,
            variant=name,
            policy=policy.name,
            whole=scorer.sees_suffix,
            tokens=tokens,
            keep=keep,
            repair=repair,
            prefill_tflop=first / 1e12,
            score_tflop=found / 1e12,
            repair_tflop=repair * repair_operations(shape, tokens, keep) / 1e12,
            **_costs(runner, tokens, keep),
        )


def _costs(runner: ModelRunner, tokens: int, keep: float) -> dict[str, Any]:
    """Of the three parts: times in ms, and bytes of the first two."""
    assert runner.rescorer is not None
    parts = (
        partial(_prefill, runner),
        runner.rescorer.score,
        lambda x: runner.eviction.compress([x]),
    )
    found: list[list[tuple[float, int | None]]] = []
    for _ in range(1 + RUNS):
        with _sequence(runner, tokens, keep) as sequence:
            found.append([_cost(partial(x, sequence), runner.device) for x in parts])
            assert not runner.needs_compression(sequence), "over its budget after compression"
    times = [median(ms for ms, _ in part[1:]) for part in zip(*found, strict=True)]
    ms = dict(zip(("prefill_ms", "score_ms", "evict_ms"), times, strict=True))
    return ms | {"prefill_bytes": found[-1][0][1], "score_bytes": found[-1][1][1]}


@contextmanager
def _sequence(runner: ModelRunner, tokens: int, keep: float) -> Iterator[Request]:
    sequence = Request.unscheduled(runner.pool.allocate_slot())
    sequence.token_ids = [i % 97 + 3 for i in range(tokens)]
    sequence.cache = CacheParams(keep_tokens=keep)
    sequence.prefill_until(tokens)
    try:
        yield sequence
    finally:
        runner.pool.free_slot(sequence.open_slot)


def _prefill(runner: ModelRunner, sequence: Request) -> None:
    while sequence.num_pending:
        count = min(default_chunk(runner.device.type), sequence.num_pending)
        runner.pool.extend([sequence.open_slot], [count])
        runner.run(Batch(chunks=(sequence.next_chunk(count),)))
        sequence.advance(count)


def _cost(run: Callable[[], object], device: torch.device) -> tuple[float, int | None]:
    """Milliseconds until the device is done, and most bytes allocated beyond those before."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_cuda else 0
    begin = time.perf_counter()
    run()
    if on_cuda:
        torch.cuda.synchronize()
    ms = 1e3 * (time.perf_counter() - begin)
    return ms, torch.cuda.max_memory_allocated() - before if on_cuda else None


def operations(shape: str, tokens: int, scorer: Rescoring) -> tuple[float, float]:
    """Floating-point operations to prefill T tokens, and to read them again with scores: products
    with weights, of queries with keys, of weights with values, and of a piece's queries with its
    keys once more for scores. Without the words that ask for a piece, or the output layer."""
    geometry, layers = SHAPES[shape], SHAPES[shape].num_layers
    d, heads, kv_heads = geometry.head_dim, geometry.num_query_heads, geometry.num_kv_heads
    width, mlp, _ = served.WIDTHS[shape]
    weights = width * d * 2 * (heads + kv_heads) + 3 * width * mlp
    pairs = scored = 0.0
    for start in range(0, tokens, scorer.chunk):
        stop = min(start + scorer.chunk, tokens)
        n = stop - start
        pairs += n * ((tokens if scorer.sees_suffix else stop) + (n + 1) / 2)
        scored += n * n
    own, again = 2 * weights * tokens, 2 * heads * d
    prefill = layers * (own + 2 * again * tokens * (tokens + 1) / 2)
    return prefill, layers * (own + 2 * again * pairs + again * scored)


def repair_operations(shape: str, tokens: int, keep: float) -> float:
    """To repair the share `keep` of T rows: queries and their attention to all of them, scores of
    those that stay twice, and two least squares, for weights and for values."""
    geometry = SHAPES[shape]
    d, rows = geometry.head_dim, keep * tokens
    asked = min(QUERIES, tokens * geometry.queries_per_kv)
    few, many = sorted((asked, rows))
    ask = 2 * asked * served.WIDTHS[shape][0] * d
    attend = 4 * asked * tokens * d + 4 * asked * rows * d
    solve = 2 * few**2 * many + few**3 / 3
    fit = 2 * solve + 2 * few**2 * d + 4 * asked * rows * d
    return geometry.num_layers * geometry.num_kv_heads * (ask + attend + fit)
