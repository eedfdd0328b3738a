"""Measures perplexity through the cache: token windows in, loss and bytes out.

Shape legend: n windows, B windows of one batch, T tokens of a window (`ctx`), c tokens of a chunk,
V vocabulary.

Every window starts from an empty cache and is fed in chunks, so that tokens are predicted from what
the cache stores, and not from the uncompressed keys and values of one long forward.
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

AFTER = 64  # tokens per chunk after a compression
_SLICE_NUMBERS = 2**25  # fp32 logits in one log-softmax: 128 MiB


@dataclass(frozen=True, kw_only=True)
class PerplexityResult:
    """Loss over all windows, in nats per token.

    Standard errors treat windows as independent (nan for one window). tokens: number of predicted
    tokens. cache_bytes_allocated: bytes of the cache's tensors at the end of the largest batch of
    windows. cached_tokens: tokens fed to that cache, over all its sequences.
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
    """Compute the loss of `targets` int64 [B, c] under `logits` [B, c, V] in nats: fp64 [B, c] on
    the CPU.

    Log-softmax runs in fp32 over slices of positions, to avoid a second copy of all logits.
    """
    num_windows, _, vocabulary = logits.shape
    step = max(1, _SLICE_NUMBERS // (num_windows * vocabulary))
    losses = []
    for start in range(0, targets.shape[1], step):
        labels = targets[:, start : start + step].to(logits.device)
        part = logits[:, start : start + step].float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(part, labels.flatten(), reduction="none")
        losses.append(loss.view(labels.shape).cpu())
    return torch.cat(losses, dim=1).double()


def perplexity(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    chunk: int = 512,
    batch: int = 1,
    progress: Report | None = None,
) -> PerplexityResult:
    """Measure the loss of `model` on windows `ids` int64 [n, T], each fed through a fresh cache in
    chunks.

    batch: windows that share a cache. progress: called with (windows done, all). Raises ValueError
    for windows longer than the model's positions, logits that are not finite, and a model that
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
    """Measure the loss on windows ids int64 [n, T], `batch` of them in one session. Returns it with
    the footprint of the last of the largest batches.

    scored_from: the number of first tokens of a window that are only read, and then evicted from if
    the session evicts; the rest is fed AFTER tokens at a time and scored. None: half of the window
    if the session evicts, otherwise all of it is scored. Raises ValueError for windows that are too
    short and logits that are not finite.
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
    footprints: list[Footprint] = []
    for start in range(0, len(ids), batch):
        with sessions() as session:
            batch_losses, footprint = _window_losses(
                session, ids[start : start + batch], scored_from
            )
        losses += batch_losses
        footprints.append(footprint)
        if progress is not None:
            progress(len(losses), len(ids))
    largest = max(reversed(footprints), key=lambda footprint: footprint.tokens)
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
    session: Session, ids: Tensor, scored_from: int
) -> tuple[list[float], Footprint]:
    """Compute the mean loss of each window of ids [B, T] from `scored_from` on, or from its second
    token."""
    fed = ids if session.whole_windows else ids[:, :-1]
    if scored_from:
        for logits in session.chunks(ids[:, :scored_from], prompt=scored_from, last=True):
            last = logits[:, -1:]
        session.compress()
        footprint = session.footprint()
        rest = session.chunks(fed[:, scored_from:], chunk=AFTER)
        nll = _nll(chain([last], rest), ids[:, scored_from:])
    else:
        nll = _nll(session.chunks(fed, prompt=ids.shape[1]), ids[:, 1:])
        footprint = session.footprint()
    if not nll.isfinite().all():
        raise ValueError(
            "model: its logits are not finite; check its weights for NaN or load it in float32"
        )
    return nll.mean(1).tolist(), footprint


def _nll(parts: Iterable[Tensor], targets: Tensor) -> Tensor:
    """Compute the loss of targets [B, T] under logits [B, c, V] of consecutive chunks, in nats.
    Logits beyond the last target are ignored."""
    losses, start = [], 0
    for logits in parts:
        labels = targets[:, start : start + logits.shape[1]]
        if labels.shape[1]:
            losses.append(token_nll(logits[:, : labels.shape[1]], labels))
        start += logits.shape[1]
    return torch.cat(losses, 1)


def check_length(model: Any, ctx: int) -> None:
    """Raise ValueError if a model, or a config, has fewer than `ctx` positions."""
    limit = max_positions(model)
    if limit is not None and ctx > limit:
        raise SettingError(
            f"`ctx`: {ctx} tokens exceed the model's {limit} positions; use {limit} or less"
        )


def max_positions(model: Any) -> int | None:
    """The longest sequence that a model, or a config, allows, in tokens; None if unlimited."""
    return position_limit(getattr(model, "config", model))


def vocabulary(model: Any) -> int:
    """The number of tokens that a model, or a config, has embeddings for."""
    config = getattr(model, "config", model).get_text_config(decoder=True)
    return int(config.vocab_size)


def mean_and_se(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of `values`; nan where there are too few values."""
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def paired_difference(a: PerplexityResult, b: PerplexityResult) -> tuple[float, float]:
    """Mean and standard error of `a`'s loss minus `b`'s over the same windows, in nats/token."""
    if len(a.window_nll) != len(b.window_nll) or a.tokens != b.tokens:
        raise ValueError(
            f"paired difference: {len(a.window_nll)} windows of {a.tokens} tokens against"
            f" {len(b.window_nll)} of {b.tokens}; measure both on the same windows"
        )
    return mean_and_se([x - y for x, y in zip(a.window_nll, b.window_nll, strict=True)])
