"""Perplexity measured through the cache: token windows to loss and bytes.

Shape legend: n windows, B windows of one batch, T tokens of a window (`ctx`), c tokens of a chunk,
V vocabulary.

Every window starts from an empty cache and is fed in chunks, so that a token is predicted from what
the cache stores and not from keys and values that one long forward kept in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.evaluation.dense import DenseSession, inference
from kvfold.evaluation.session import Footprint, Session, Sessions
from kvfold.models.rotary import position_limit
from kvfold.utils.errors import SettingError
from kvfold.utils.progress import Report

AFTER = 64  # tokens fed at a time after a compression
_SLICE_NUMBERS = 2**25  # fp32 logits taken to log-probabilities at once: 128 MiB


@dataclass(frozen=True, kw_only=True)
class PerplexityResult:
    """Loss over all windows, in nats per token.

    Standard errors treat windows as independent (nan for one window). `tokens` counts predicted
    tokens. `cache_bytes_allocated` is what the cache's tensors took at the end of the largest batch
    of windows and `cached_tokens` the tokens fed to that cache, over all its sequences.
    """

    nll: float
    nll_se: float
    perplexity: float
    perplexity_se: float
    tokens: int
    window_nll: tuple[float, ...]
    cache_bytes_allocated: int
    cached_tokens: int


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats of `targets` int64 [B, c] under `logits` [B, c, V]: fp64 [B, c] on the CPU.

    Log-softmax runs in fp32 over slices of positions, so that a large vocabulary costs no second
    copy of all logits.
    """
    num_windows, _, vocabulary = logits.shape
    step = max(1, _SLICE_NUMBERS // (num_windows * vocabulary))
    losses = []
    for start in range(0, targets.shape[1], step):
        wanted = targets[:, start : start + step].to(logits.device)
        part = logits[:, start : start + step].float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(part, wanted.flatten(), reduction="none")
        losses.append(loss.view(wanted.shape).cpu())
    return torch.cat(losses, dim=1).double()


def perplexity(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    chunk: int = 512,
    batch: int = 1,
    progress: Report | None = None,
) -> PerplexityResult:
    """Loss of `model` on windows `ids` int64 [n, T], each fed through a fresh cache in chunks.

    `batch` windows share one cache. `progress(done, total)` counts windows. Raises ValueError for
    windows longer than the model's positions, logits that are not finite, and a model that
    stores nothing in the cache.
    """
    check_length(model, ids.shape[-1])
    with inference(model):
        sessions = partial(DenseSession, model, chunk)
        return window_perplexity(sessions, ids, batch=batch, progress=progress)[0]


def window_perplexity(
    sessions: Sessions,
    ids: Tensor,
    *,
    batch: int = 1,
    scored_from: int | None = None,
    progress: Report | None = None,
) -> tuple[PerplexityResult, Footprint]:
    """Loss on windows ids int64 [n, T], `batch` of them in one session.

    scored_from: tokens of a window that are only read, then compressed where the session evicts;
    the rest is fed AFTER tokens at a time and scored. None: half where the session evicts, else all
    is scored. Footprint of the last of the largest batches. Raises ValueError for too short windows
    and logits that are not finite.
    """
    if ids.ndim != 2 or len(ids) == 0 or ids.shape[1] < 2:
        raise ValueError(f"ids: shape {tuple(ids.shape)}; give [n, ctx] with n >= 1 and ctx >= 2")
    if batch < 1:
        raise ValueError(f"batch: {batch} is not positive; run at least 1 window at a time")
    if scored_from is None:
        scored_from = ids.shape[1] // 2 if sessions().evicts else 0
    if not 0 <= scored_from <= ids.shape[1] - 2:
        raise ValueError(
            f"scored_from must leave 2 of a window's {ids.shape[1]} tokens, got {scored_from}; use "
            "longer windows"
        )
    losses: list[float] = []
    held: list[Footprint] = []
    for start in range(0, len(ids), batch):
        with sessions() as session:
            found, footprint = _window_losses(session, ids[start : start + batch], scored_from)
        losses += found
        held.append(footprint)
        if progress is not None:
            progress(len(losses), len(ids))
    largest = max(reversed(held), key=lambda footprint: footprint.tokens)
    nll, nll_se = mean_and_se(losses)
    value = math.exp(nll) if nll < 700 else math.inf
    result = PerplexityResult(
        nll=nll,
        nll_se=nll_se,
        perplexity=value,
        perplexity_se=value * nll_se,  # delta method: d exp(x) = exp(x) dx
        tokens=len(ids) * (ids.shape[1] - max(scored_from, 1)),
        window_nll=tuple(losses),
        cache_bytes_allocated=largest.cache_bytes,
        cached_tokens=largest.tokens,
    )
    return result, largest


def _window_losses(
    session: Session, rows: Tensor, scored_from: int
) -> tuple[list[float], Footprint]:
    """Mean loss of each row of rows [B, T] from `scored_from` on, or from its second token."""
    fed = rows if session.whole_windows else rows[:, :-1]
    if scored_from:
        for logits in session.chunks(rows[:, :scored_from], prompt=scored_from, last=True):
            last = logits[:, -1:]
        session.compress()
        held = session.footprint()
        rest = session.chunks(fed[:, scored_from:], chunk=AFTER)
        nll = _nll(chain([last], rest), rows[:, scored_from:])
    else:
        nll = _nll(session.chunks(fed, prompt=rows.shape[1]), rows[:, 1:])
        held = session.footprint()
    if not nll.isfinite().all():
        raise ValueError(
            "model: its logits are not finite; check its weights for NaN or load it in float32"
        )
    return nll.mean(1).tolist(), held


def _nll(parts: Iterable[Tensor], targets: Tensor) -> Tensor:
    """Nats of targets [B, T] under logits [B, c, V] of consecutive chunks; more logits are idle."""
    found, start = [], 0
    for logits in parts:
        wanted = targets[:, start : start + logits.shape[1]]
        if wanted.shape[1]:
            found.append(token_nll(logits[:, : wanted.shape[1]], wanted))
        start += logits.shape[1]
    return torch.cat(found, 1)


def check_length(model: Any, ctx: int) -> None:
    """Raise ValueError if the model has fewer than `ctx` positions; model: it, or its config."""
    limit = max_positions(model)
    if limit is not None and ctx > limit:
        raise SettingError(
            f"`ctx`: {ctx} tokens exceed the model's {limit} positions; use {limit} or less"
        )


def max_positions(model: Any) -> int | None:
    """Longest sequence that a model, or a config, allows, in tokens; None where none says."""
    return position_limit(getattr(model, "config", model))


def vocabulary(model: Any) -> int:
    """Tokens that a model, or a config, has embeddings of."""
    config = getattr(model, "config", model).get_text_config(decoder=True)
    return int(config.vocab_size)


def mean_and_se(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of `values`; the error is nan for one value, both for none."""
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def paired_difference(a: PerplexityResult, b: PerplexityResult) -> tuple[float, float]:
    """Mean and standard error of `a`'s loss less `b`'s over the same windows, nats per token."""
    if len(a.window_nll) != len(b.window_nll) or a.tokens != b.tokens:
        raise ValueError(
            f"paired difference: {len(a.window_nll)} windows of {a.tokens} tokens against"
            f" {len(b.window_nll)} of {b.tokens}; measure both on the same windows"
        )
    return mean_and_se([x - y for x, y in zip(a.window_nll, b.window_nll, strict=True)])
