"""Run tokens through a runner without a scheduler, and check a runner so before the engine starts.

Shapes: B sequences, V tokens of the vocabulary.
"""

from collections.abc import Generator, Sequence
from contextlib import closing, suppress

import numpy as np
import torch
from torch import Tensor

from kvfold.cache.pool import PoolFull
from kvfold.engine.requests.request import Batch, Request
from kvfold.engine.runner.runner import ModelRunner
from kvfold.models.finite import HEAD, dtype_name, probe_ids, rows_are_finite, watched, way_out
from kvfold.models.weights import check_finite
from kvfold.ops.common.compile_ahead import CompileAhead

STEPS = 2  # decode steps of the check
LENGTHS = {"cuda": (1, 2, 5, 12, 27, 50, 81, 127)}  # prompt lengths of the check, by device type
SHORT = (16,)  # the same on other devices, which are slower


def compile_kernels(runner: ModelRunner) -> None:
    """Compile what the first steps need, in parallel, before anything is launched or captured."""
    if runner.demotes:  # which decides by numbers that kernels compute
        return
    ids = probe_ids(runner.model.get_input_embeddings().num_embeddings, STEPS)
    with runner.eager() as graphs:
        with CompileAhead(runner.device), torch.inference_mode(), suppress(PoolFull):
            for _ in run_tokens(runner, [ids], [ids]):
                pass
            runner.dry_demotion()
            if graphs is not None:
                runner.dry_decodes(graphs)
        runner.pool.reset_high_water()


def run_tokens(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], rest: Sequence[Sequence[int]]
) -> Generator[Tensor, None, None]:
    """Prefill a prompt for each of B sequences, then decode the tokens `rest`, one per sequence and
    step. Yields logits [B, V] after the prompts and after each step. The pages are freed when this
    ends or is closed.

    Raises PoolFull if there are too few free pages.
    """
    pool, requests = runner.pool, list[Request]()
    try:
        for number, prompt in enumerate(prompts):
            request = Request.unscheduled(pool.allocate_slot())
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
    """Append tokens to each sequence, in as many steps as the layout needs. Returns logits [B,
    V]."""
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
        logits_of_step = runner.run(batch).clone()
        runner.free_outside_windows(batch)
        logits |= {
            x.request.id: row for x, row in zip(batch.with_logits, logits_of_step, strict=True)
        }
        for request, count in zip(waiting, counts, strict=True):
            request.advance(count)
    return torch.stack([logits[x.id] for x in requests])


def _most(runner: ModelRunner, request: Request) -> int:
    return runner.pool.layout.max_tokens_in_step(request.num_computed)


def check_start(runner: ModelRunner) -> None:
    """Run a few tokens of a few sequences before any request comes, and check that logits are
    finite. Leaves the pool empty. Does nothing if the pool has too few pages.

    Raises ValueError that names the parameter or the first part of the model that is not finite.
    """
    lengths = _lengths(runner)
    if not lengths:
        return
    vocabulary = runner.model.get_input_embeddings().num_embeddings
    ids = probe_ids(vocabulary, max(lengths) + STEPS)
    prompts = [ids[:n] for n in lengths]
    rest = [ids[n : n + STEPS] for n in lengths]
    try:
        finite = [rows_are_finite(logits).all() for logits in run_tokens(runner, prompts, rest)]
    except PoolFull:  # for low-rank entries
        return
    finally:
        runner.pool.reset_high_water()
    if not bool(torch.stack(finite).all()):
        raise not_finite(runner, prompts, rest)


def not_finite(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], rest: Sequence[Sequence[int]]
) -> ValueError:
    """The error for `run_tokens` of these tokens giving logits that are not finite. Runs them again
    eagerly, up to the first bad step. Raises ValueError for weights that are not finite."""
    check_finite(runner.model)
    steps = run_tokens(runner, prompts, rest)
    with runner.eager(), watched(runner.model) as first, closing(steps):
        for _ in steps:
            if first() != HEAD:
                break
        part = first()
    return ValueError(
        f"{part} gives numbers that are not finite in {dtype_name(runner.model)} on {runner.device}"
        f", as tokens are decoded through the cache; {way_out(runner.model)}. If the original "
        "model runs in this dtype, set KVFOLD_BACKEND=reference and report it"
    )


def _lengths(runner: ModelRunner) -> list[int]:
    """Prompt lengths of the check: as many as fit in the pool."""
    pool, lengths = runner.pool, list[int]()
    for length in LENGTHS.get(runner.device.type, SHORT)[: pool.num_slots]:
        candidates = [*lengths, length]
        tokens = [x + STEPS for x in candidates]
        if tokens[-1] > pool.max_tokens:
            break
        none = np.zeros((len(tokens), len(pool.layout.groups)), dtype=np.int64)
        if not pool.make_room(pool.pages_needed(none, tokens)):
            break
        lengths = candidates
    return lengths
