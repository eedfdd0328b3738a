"""Measures what maps lose before they are saved.

It runs in the engine, since plans may have bits to which transformers' cache does not quantise; in
transformers' cache if the engine does not serve the model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from kvfold.compression.compressor import Compressor
from kvfold.compression.work import CheckWork
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation.answers import CHECK_ANSWER, ENGINE, FLOOR, ReferenceAnswer, num_tokens
from kvfold.evaluation.budget import held_out
from kvfold.evaluation.dense import DenseSession, inference
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.perplexity import max_positions, paired_difference, window_perplexity
from kvfold.evaluation.session import Sessions
from kvfold.maps.attach import attach
from kvfold.maps.sidecar import Sidecar
from kvfold.utils.errors import SettingError
from kvfold.utils.files import finite
from kvfold.utils.progress import Progress, counter

CTX, WINDOWS = 512, 4  # of held-out text
ANSWERS = 3  # the original's, with maps in transformers, and with maps in the engine


def check_work(model: Any) -> CheckWork:
    """What `measured` computes, if there is held-out text."""
    ctx = min(CTX, max_positions(model) or CTX)
    return CheckWork(ctx=ctx, windows=2 * WINDOWS, steps=ANSWERS * num_tokens(model))


def measured(compressor: Compressor, sidecar: Sidecar, progress: Progress | None = None) -> Sidecar:
    """Return the same maps, with what they lose in their provenance: nats per token on held-out
    text, if there is some, and the divergence from the original's answer to a short prompt. The
    compressor's model is not changed.

    Raises SettingError if logits are not finite, or the divergence is larger than the same maps in
    transformers and the predicted loss explain.
    """
    model = compressor.model
    step = counter(progress, CHECK_ANSWER, ANSWERS * num_tokens(model))
    answer = ReferenceAnswer.of(model, compressor.tokenizer, step=step)
    windows = _held_out(compressor)
    original = partial(DenseSession, model)
    figures: dict[str, Any] = {"answer_tokens": len(answer.tokens)}
    with inference(model):
        with _attached(model, sidecar):
            dense = _divergence(original, answer, step)
        longest = max(len(answer.read) + 1, CTX)
        with _sessions(model, sidecar, longest) as (figures["through"], sessions):
            figures["divergence"] = divergence = _divergence(sessions, answer, step)
            _check(divergence, dense, sidecar)
            if windows is not None:
                window = counter(progress, "check loss", 2 * len(windows))
                after = window_perplexity(sessions, windows, progress=lambda *_: window())[0]
        if windows is not None:
            before = window_perplexity(original, windows, progress=lambda *_: window())[0]
            lost, error = paired_difference(after, before)
            figures |= {"lost": lost, "lost_se": error, "tokens": after.tokens}
    return replace(sidecar, provenance={**sidecar.provenance, "measured": finite(figures)})


@contextmanager
def _attached(model: Any, sidecar: Sidecar) -> Iterator[None]:
    detach = attach(model, sidecar)
    try:
        yield
    finally:
        detach()


@contextmanager
def _sessions(model: Any, sidecar: Sidecar, longest: int) -> Iterator[tuple[str, Sessions]]:
    """Open sessions with the maps, of at most `longest` tokens, and say whose cache they use."""
    most = min(longest, max_positions(model) or longest)
    try:
        runner = build_runner(model, CacheConfig(), num_slots=1, max_tokens=most, maps=sidecar)
    except SettingError:  # the engine does not serve such a model
        with _attached(model, sidecar):
            yield "transformers", partial(DenseSession, model)
        return
    yield "kvfold's engine", partial(PagedSession, runner)


def _divergence(sessions: Sessions, answer: ReferenceAnswer, step: Callable[[], object]) -> float:
    """Compute KL(original || with maps) in nats per token, feeding the answer token by token. step:
    is called after each token."""
    prompt = answer.prompt
    with sessions() as session:
        logits = [session.read(prompt, prompt=len(prompt)).float().cpu()]
        step()
        for token in answer.tokens[:-1]:
            logits.append(session.read([token]).float().cpu())
            step()
    return answer.divergence(torch.stack(logits))


def _check(divergence: float, dense: float, sidecar: Sidecar) -> None:
    limit = FLOOR + ENGINE * max(dense, sidecar.provenance.get("predicted") or 0.0)
    if not isfinite(limit) or not divergence <= limit:
        raise SettingError(
            f"with these maps the model answers otherwise than the original: {divergence:.2f} nats"
            f" a token through the cache, where {dense:.2f} in transformers explain {limit:.2f} at"
            " most; nothing was saved. Try a larger cache or another dtype; `check=False` saves"
            " the maps all the same"
        )


def _held_out(compressor: Compressor) -> Tensor | None:
    """Return windows [n, CTX] of held-out text; None if calibration reads all text."""
    ctx = min(CTX, max_positions(compressor.model) or CTX)
    try:
        return held_out(compressor, ctx, WINDOWS)
    except SettingError:
        return None
