"""Tokens through a runner's cache without a scheduler, and the short trial at an engine's start.

Shapes: B sequences, V tokens of the vocabulary.
"""

from collections.abc import Generator, Sequence
from contextlib import closing

import numpy as np
import torch
from torch import Tensor

from kvfold.cache.pool import PoolFull
from kvfold.engine.requests.request import Batch, Request
from kvfold.engine.runner.runner import ModelRunner
from kvfold.models.finite import HEAD, dtype_name, probe_ids, rows_are_finite, watched, way_out
from kvfold.models.weights import check_finite

STEPS = 2  # decoding ones of a trial
LENGTHS = {"cuda": (1, 2, 5, 12, 27, 50, 81, 127)}  # of a trial's prompts
SHORT = (16,)  # the same on other devices, where tokens cost more


def feed(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], rest: Sequence[Sequence[int]]
) -> Generator[Tensor, None, None]:
    """Read a prompt for each of B sequences, then decode the tokens that are given in `rest`, one
    of each sequence a step. Yields logits [B, V] after the prompts and after each step. The
    sequences' pages are free again when this ends or is closed.

    Raises PoolFull where the pool has no room.
    """
    pool, requests = runner.pool, list[Request]()
    try:
        for number, prompt in enumerate(prompts):
            request = Request.by_hand(pool.allocate_slot())
            request.id = number
            request.prefill_until(len(prompt))
            requests.append(request)
        yield _step(runner, requests, prompts)
        for tokens in zip(*rest, strict=True):
            yield _step(runner, requests, [[token] for token in tokens])
    finally:
        for request in requests:
            pool.free_slot(request.open_slot)


def _step(
    runner: ModelRunner, requests: Sequence[Request], tokens: Sequence[Sequence[int]]
) -> Tensor:
    """Append tokens to every sequence, in as many steps as the layout asks for: logits [B, V]."""
    for request, more in zip(requests, tokens, strict=True):
        request.token_ids += more
    logits: dict[int, Tensor] = {}
    while waiting := [x for x in requests if x.num_pending]:
        if runner.demotes:
            over = [x for x in waiting if x.prefilled and runner.needs_compression(x)]
            if over:
                runner.compress(over)
        counts = [min(x.num_pending, _most(runner, x)) for x in waiting]
        runner.pool.extend([x.open_slot for x in waiting], counts)
        chunks = tuple(x.next_chunk(n) for x, n in zip(waiting, counts, strict=True))
        batch = Batch(chunks=chunks)
        found = runner.run(batch).clone()
        runner.slide(batch)
        logits |= {x.request.id: row for x, row in zip(batch.with_logits, found, strict=True)}
        for request, count in zip(waiting, counts, strict=True):
            request.advance(count)
    return torch.stack([logits[x.id] for x in requests])


def _most(runner: ModelRunner, request: Request) -> int:
    return runner.pool.layout.max_tokens_in_step(request.num_computed)


def check_start(runner: ModelRunner) -> None:
    """A few tokens of a few sequences through the cache, before any request comes. Leaves the pool
    empty. Raises ValueError naming the parameter, or the first part of the model, that is at fault
    where logits are not finite; asks nothing where the pool has no room for the tokens."""
    lengths = _lengths(runner)
    if not lengths:
        return
    vocabulary = runner.model.get_input_embeddings().num_embeddings
    ids = probe_ids(vocabulary, max(lengths) + STEPS)
    prompts = [ids[:n] for n in lengths]
    rest = [ids[n : n + STEPS] for n in lengths]
    try:
        finite = [rows_are_finite(logits).all() for logits in feed(runner, prompts, rest)]
    except PoolFull:  # of rows that become narrow
        return
    finally:
        runner.pool.reset_high_water()
    if not bool(torch.stack(finite).all()):
        raise not_finite(runner, prompts, rest)


def not_finite(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], rest: Sequence[Sequence[int]]
) -> ValueError:
    """What is wrong where `feed` of these tokens gives logits that are not finite; runs them again
    without graphs, up to the step that does. Raises ValueError for weights that are not finite."""
    check_finite(runner.model)
    graphs, runner.graphs = runner.graphs, None
    try:
        with watched(runner.model) as first, closing(feed(runner, prompts, rest)) as steps:
            for _ in steps:
                if first() != HEAD:
                    break
            part = first()
    finally:
        runner.graphs = graphs
    return ValueError(
        f"{part} gives numbers that are not finite in {dtype_name(runner.model)} on {runner.device}"
        f", as tokens are decoded through the cache; {way_out(runner.model)}. If the original "
        "model runs in this dtype, set KVFOLD_BACKEND=reference and report it"
    )


def _lengths(runner: ModelRunner) -> list[int]:
    """Of a trial's prompts, as many as there is room for."""
    pool, found = runner.pool, list[int]()
    for length in LENGTHS.get(runner.device.type, SHORT)[: pool.num_slots]:
        longer = [*found, length]
        tokens = [x + STEPS for x in longer]
        if tokens[-1] > pool.max_tokens:
            break
        none = np.zeros((len(tokens), len(pool.layout.groups)), dtype=np.int64)
        if not pool.has_free_pages(pool.pages_needed(none, tokens)):
            break
        found = longer
    return found
