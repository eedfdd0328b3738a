"""Perplexity measured through the cache: token windows to loss and bytes.

Shape legend: n windows, B windows of one batch, T tokens of a window (`ctx`), c tokens of a chunk,
V vocabulary.

Every window starts from an empty `DynamicCache` and is fed in chunks, so that a token is predicted
from what the cache stores and not from keys and values that one long forward kept in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

Progress = Callable[[int, int], None]

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


def cache_bytes(cache: Any) -> int:
    """Bytes of memory behind all tensors of a transformers cache.

    Whole storages count, each once: a small view that keeps a large tensor alive costs the latter.
    """
    storages = {}
    for layer in cache.layers:
        for tensor in _tensors(vars(layer)):
            storage = tensor.untyped_storage()
            storages[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


@contextmanager
def inference(model: PreTrainedModel) -> Iterator[None]:
    """Without gradients or dropout; the model's training mode is put back afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def forward_chunks(
    model: PreTrainedModel, ids: Tensor, cache: DynamicCache, chunk: int
) -> Iterator[tuple[int, Tensor]]:
    """Append `ids` [B, T] to `cache` by chunks; yields (first position, logits [B, c, V])."""
    if chunk < 1:
        raise ValueError(f"chunk: {chunk} is not positive; feed at least 1 token at a time")
    for start in range(0, ids.shape[1], chunk):
        piece = ids[:, start : start + chunk].to(model.device)
        yield start, model(input_ids=piece, past_key_values=cache, use_cache=True).logits


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
    progress: Progress | None = None,
) -> PerplexityResult:
    """Loss of `model` on windows `ids` int64 [n, T], each fed through a fresh cache in chunks.

    `batch` windows share one cache. `progress(done, total)` counts windows. Raises ValueError for
    windows longer than the model's positions, logits that are not finite, and a model that
    stores nothing in the cache.
    """
    if ids.ndim != 2 or len(ids) == 0 or ids.shape[1] < 2:
        raise ValueError(f"ids: shape {tuple(ids.shape)}; give [n, ctx] with n >= 1 and ctx >= 2")
    check_length(model, ids.shape[1])
    if batch < 1:
        raise ValueError(f"batch: {batch} is not positive; run at least 1 window at a time")
    window_nll: list[float] = []
    allocated = 0
    with inference(model):
        for start in range(0, len(ids), batch):
            rows = ids[start : start + batch]
            cache = DynamicCache(config=model.config)
            window_nll += _window_losses(model, rows, cache, chunk)
            allocated = max(allocated, _stored_bytes(cache, model))
            if progress:
                progress(len(window_nll), len(ids))
    tokens = ids.shape[0] * (ids.shape[1] - 1)
    return summarize(window_nll, tokens, allocated, min(batch, len(ids)) * ids.shape[1])


def _window_losses(
    model: PreTrainedModel, rows: Tensor, cache: DynamicCache, chunk: int
) -> list[float]:
    """Mean loss of each window of `rows` [B, T]."""
    total = torch.zeros(len(rows), dtype=torch.float64)
    for start, logits in forward_chunks(model, rows, cache, chunk):
        end = start + logits.shape[1]
        targets = rows[:, start + 1 : end + 1]
        if targets.shape[1]:
            total += token_nll(logits[:, : targets.shape[1]], targets).sum(1)
    if not total.isfinite().all():
        raise ValueError(
            "model: its logits are not finite; check its weights for NaN or load it in float32"
        )
    return (total / (rows.shape[1] - 1)).tolist()


def _stored_bytes(cache: Any, model: PreTrainedModel) -> int:
    size = cache_bytes(cache)
    if size == 0:
        kind = type(model).__name__
        raise ValueError(f"model: {kind} stored nothing in its DynamicCache, so it has no KV cache")
    return size


def check_length(model: PreTrainedModel, ctx: int) -> None:
    """Raise ValueError if the model has fewer than `ctx` positions."""
    limit = max_positions(model)
    if limit is not None and ctx > limit:
        raise ValueError(
            f"ctx: {ctx} tokens exceed the model's {limit} positions; use {limit} or less"
        )


def max_positions(model: PreTrainedModel) -> int | None:
    """Longest sequence the model's config allows, in tokens; None where it sets no limit."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None)


def mean_and_se(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of `values`; the error is nan for one value, both for none."""
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def summarize(
    window_nll: list[float], tokens: int, allocated: int, cached_tokens: int
) -> PerplexityResult:
    """The result over windows of equal length; `tokens` predicted in all."""
    nll, nll_se = mean_and_se(window_nll)
    value = math.exp(nll) if nll < 700 else math.inf
    return PerplexityResult(
        nll=nll,
        nll_se=nll_se,
        perplexity=value,
        perplexity_se=value * nll_se,  # delta method: d exp(x) = exp(x) dx
        tokens=tokens,
        window_nll=tuple(window_nll),
        cache_bytes_allocated=allocated,
        cached_tokens=cached_tokens,
    )


def paired_difference(a: PerplexityResult, b: PerplexityResult) -> tuple[float, float]:
    """Mean and standard error of `a`'s loss less `b`'s over the same windows, nats per token."""
    if len(a.window_nll) != len(b.window_nll) or a.tokens != b.tokens:
        raise ValueError(
            f"paired difference: {len(a.window_nll)} windows of {a.tokens} tokens against"
            f" {len(b.window_nll)} of {b.tokens}; measure both on the same windows"
        )
    return mean_and_se([x - y for x, y in zip(a.window_nll, b.window_nll, strict=True)])
