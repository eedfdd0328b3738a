"""What maps beside the weights lose, measured before they are saved.

Through the engine where it serves the model, as plans may have bits that transformers' cache does
not round to; else through transformers' cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from kvfold.compression.compressor import Compressor
from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation.answers import ENGINE, FLOOR, Answer
from kvfold.evaluation.budget import held_out
from kvfold.evaluation.dense import DenseSession, inference
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.perplexity import max_positions, paired_difference, window_perplexity
from kvfold.evaluation.session import Sessions
from kvfold.maps.attach import attach
from kvfold.maps.sidecar import Sidecar
from kvfold.utils.errors import SettingError
from kvfold.utils.files import finite

CTX, WINDOWS = 512, 4  # of text that calibration did not read


def measured(compressor: Compressor, sidecar: Sidecar) -> Sidecar:
    """The same maps, with what they lose in their provenance: nats a token on text that calibration
    did not read, where there is some, and from the original's answer to a short prompt. The
    compressor's model stays as it is.

    Raises SettingError where logits are not finite, or the engine is further from the original than
    the same maps in transformers, and the predicted loss, explain.
    """
    model = compressor.model
    answer = Answer.of(model, compressor.tokenizer)
    windows = _held_out(compressor)
    original = partial(DenseSession, model)
    figures: dict[str, Any] = {"answer_tokens": len(answer.tokens)}
    with inference(model):
        with _attached(model, sidecar):
            dense = _divergence(original, answer)
        longest = max(len(answer.read) + 1, CTX)
        with _sessions(model, sidecar, longest) as (figures["through"], sessions):
            figures["divergence"] = found = _divergence(sessions, answer)
            _check(found, dense, sidecar)
            if windows is not None:
                after = window_perplexity(sessions, windows)[0]
        if windows is not None:
            before = window_perplexity(original, windows)[0]
            lost, error = paired_difference(after, before)
            figures |= {"lost": lost, "lost_se": error, "tokens": after.tokens}
    return replace(sidecar, provenance={**sidecar.provenance, "measured": finite(figures)})


@contextmanager
def _attached(model: Any, sidecar: Sidecar) -> Iterator[None]:
    take_away = attach(model, sidecar)
    try:
        yield
    finally:
        take_away()


@contextmanager
def _sessions(model: Any, sidecar: Sidecar, longest: int) -> Iterator[tuple[str, Sessions]]:
    """Sessions with the maps, of at most `longest` tokens, and whose cache they are of."""
    most = min(longest, max_positions(model) or longest)
    try:
        runner = build_runner(model, CacheConfig(), num_slots=1, max_tokens=most, maps=sidecar)
    except SettingError:  # the engine does not serve such a model
        with _attached(model, sidecar):
            yield "transformers", partial(DenseSession, model)
        return
    yield "kvfold's engine", partial(PagedSession, runner)


def _divergence(sessions: Sessions, answer: Answer) -> float:
    """KL(original || with maps) of an answer that is read token by token, nats a token."""
    prompt = answer.prompt
    with sessions() as session:
        logits = [session.read(prompt, prompt=len(prompt)).float().cpu()]
        logits += [session.read([token]).float().cpu() for token in answer.tokens[:-1]]
    return answer.divergence(torch.stack(logits))


def _check(found: float, dense: float, sidecar: Sidecar) -> None:
    limit = FLOOR + ENGINE * max(dense, sidecar.provenance.get("predicted") or 0.0)
    if not isfinite(limit) or not found <= limit:
        raise SettingError(
            f"with these maps the model answers otherwise than the original: {found:.2f} nats a"
            f" token through the cache, where {dense:.2f} in transformers explain {limit:.2f} at"
            " most; nothing was saved. Try a larger cache or another dtype; `check=False` saves"
            " the maps all the same"
        )


def _held_out(compressor: Compressor) -> Tensor | None:
    """Windows [n, CTX] of the calibration's text that it did not read; None where it read all."""
    ctx = min(CTX, max_positions(compressor.model) or CTX)
    try:
        return held_out(compressor, ctx, WINDOWS)
    except SettingError:
        return None
