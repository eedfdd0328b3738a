"""Attend to prompts with the FlashAttention 3 that vLLM includes, on Hopper.

A chunk's stored tokens are gathered into one tensor, as for `attention.triton_prefill`.
FlashAttention wants keys and values of the same width. The narrower of the two are read with the
numbers that follow them in their row; queries are 0 there, and so many columns of the result are
left out.

Shapes: T queries of one request, S tokens stored, Hq query heads, Hk KV heads, D the width.
"""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvfold.attention.backend import Task, Weighed
from kvfold.attention.base import LayerAttention, LayerShape
from kvfold.attention.metadata import AttentionMetadata
from kvfold.attention.triton_prefill import TritonPrefill
from kvfold.layout.pages import Group
from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.compile_ahead import compiling_ahead
from kvfold.ops.common.launch import upload
from kvfold.ops.common.recording import compute, copy
from kvfold.ops.prefill import KVView, Seen
from kvfold.vllm_plugin.log import logger

VERSION = 3
WIDEST = 256  # of the kernel's keys and values
MULTIPLE = 8  # of widths, and of the distance of heads and tokens, in numbers

Settings = tuple[float, int | None, float | None]  # scale, window, softcap


class FlashPrefill(TritonPrefill):
    """Serves chunks of one request each whose queries are its newest tokens, as vLLM's steps have
    them."""

    @classmethod
    def unsupported_reason(
        cls, layer: LayerShape, groups: Sequence[Group], task: Task
    ) -> str | None:
        if reason := excluded(task.device_type):
            return reason
        if task.observed or groups[0].layout.tracked:
            return f"FlashAttention {VERSION} does not serve eviction"
        if layer.has_sinks:
            return f"FlashAttention {VERSION} is not used with sinks"
        return super().unsupported_reason(layer, groups, task) or why_not()

    def _attention(
        self, layer: LayerAttention, part: AttentionMetadata, q: Tensor, keys: KVView,
        values: KVView, visible: Seen,
    ) -> Tensor:  # fmt: skip
        width = shared_width(keys, values)
        if width is None:
            return super()._attention(layer, part, q, keys, values, visible)
        return attended(q, keys, values, width, visible, layer.scale, layer.softcap)


def attended(
    q: Tensor, keys: KVView, values: KVView, width: int, visible: Seen, scale: float,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """The attention output [1, Hq, T, dv] of queries q [1, Hq, T, dk], which are the newest of the
    visible tokens. width: D, of `shared_width`."""
    assert visible.positions is None, "the newest tokens"
    lengths = visible.counts[:, 0].contiguous()
    settings = scale, visible.window, softcap
    queries = _queries(q, width)
    out = compute(_flash, queries, _spread(keys, width), _spread(values, width), lengths, settings)
    return out[None, ..., : values.ranks[0]].transpose(1, 2)


def weigh(
    q: Tensor, keys: KVView, values: KVView, width: int, lengths: Tensor, scale: float,
    window: int | None = None, sees_none: Tensor | None = None,
) -> Weighed:  # fmt: skip
    """The attention output [1, Hq, T, dv] of q [1, Hq, T, dk] and the log2-sum-exp2 of its scores,
    fp32 [1, Hq, T].

    lengths: int32 [1], tokens that the last query sees; each query before it sees one less.
    sees_none: bool [T], queries that see none, if there are any: they get -inf, and an output
        without a meaning.
    """
    queries = _queries(q, width)
    sums = q.new_empty(q.shape[1:3], dtype=torch.float32)
    settings = scale, window, None
    parts = queries, _spread(keys, width), _spread(values, width), lengths
    out = compute(_flash_and_sums, *parts, settings, sees_none, sums)
    return out[None, ..., : values.ranks[0]].transpose(1, 2), sums[None]


def _queries(q: Tensor, width: int) -> Tensor:
    """q [1, Hq, T, dk] as [T, Hq, D], with zeros beyond dk."""
    assert len(q) == 1, "one request"
    _, heads, count, rank = q.shape
    queries = q[0].transpose(0, 1)
    if rank < width:
        padded = q.new_zeros(count, heads, width)
        copy(padded[..., :rank], queries)
        return padded
    return queries


def _flash(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, settings: Settings, out: Tensor | None = None
) -> Tensor:
    """Attention of the newest tokens q [T, Hq, D] among the first lengths int32 [1] of k, v
    [1, S, Hk, D]: [T, Hq, D]."""
    if compiling_ahead() is not None:  # there is nothing to compile
        return torch.zeros_like(q)
    result: Tensor = _call(q, k, v, lengths, settings, out=out)
    return result


def _flash_and_sums(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, settings: Settings,
    sees_none: Tensor | None, sums: Tensor, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Like `_flash`, and writes to sums fp32 [Hq, T], as in `weigh`."""
    if compiling_ahead() is not None:
        sums.zero_()
        return torch.zeros_like(q)
    result, lse = _call(q, k, v, lengths, settings, out=out, return_softmax_lse=True)
    torch.mul(lse, LOG2_E, out=sums)
    if sees_none is not None:
        sums.masked_fill_(sees_none, -torch.inf)
    output: Tensor = result
    return output


def _call(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, settings: Settings, **options: Any
) -> Any:
    function, (scale, window, softcap) = _function(), settings
    assert function is not None
    return function(
        q, k, v,
        cu_seqlens_q=_bounds(len(q), q.device), max_seqlen_q=len(q),
        seqused_k=lengths, max_seqlen_k=k.shape[1],
        softmax_scale=scale, causal=True, softcap=softcap or 0.0,
        window_size=None if window is None else [window - 1, 0],
        fa_version=VERSION, **options,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _bounds(count: int, device: torch.device) -> Tensor:
    """Where one request of so many tokens begins and ends: int32 [2]."""
    return upload(np.array([0, count], dtype=np.int32), device)


def shared_width(keys: KVView, values: KVView) -> int | None:
    """The width D with which both can be read, or None."""
    width = -(-max(*keys.ranks, *values.ranks) // MULTIPLE) * MULTIPLE
    if width > WIDEST:
        return None
    return width if all(_readable(x, width) for x in (keys, values)) else None


def _readable(view: KVView, width: int) -> bool:
    """Whether heads are equally wide and equally far apart, and no head of `width` numbers reaches
    beyond the row."""
    steps = {b - a for a, b in zip(view.starts, view.starts[1:], strict=False)} or {0}
    aligned = (*steps, *view.starts, *view.data.stride()[:2], view.data.storage_offset())
    return (
        len(set(view.ranks)) == len(steps) == 1
        and not any(x % MULTIPLE for x in aligned)
        and max(view.starts) + width <= view.data[0, 0].numel()
    )


def _spread(view: KVView, width: int) -> Tensor:
    """Keys or values by head, with `width` numbers each: a view [1, S, Hk, D]."""
    data, starts = view.data, view.starts
    step = starts[1] - starts[0] if len(starts) > 1 else width
    return data.as_strided(
        (*data.shape[:2], len(starts), width),
        (*data.stride()[:2], step, 1),
        data.storage_offset() + starts[0],
    )


def excluded(device_type: str) -> str | None:
    """Why vLLM's FlashAttention is never used on such devices, or by the user's choice; or None."""
    if device_type != "cuda":
        return f"FlashAttention {VERSION} runs on cuda"
    wanted = os.environ.get("KVFOLD_BACKEND", "auto")
    return None if wanted == "auto" else f"KVFOLD_BACKEND is {wanted}"


@lru_cache
def why_not() -> str | None:
    """Why vLLM's FlashAttention is not used on this machine's GPU, or None. It is tried on small
    examples first, so that another version with other rules gives no wrong answers."""
    if torch.cuda.get_device_capability()[0] != 9:
        return f"FlashAttention {VERSION} runs on Hopper"
    try:
        if _function() is None:
            return f"vLLM has no FlashAttention {VERSION} here"
        right = _is_right()
    except Exception as error:  # whatever another version raises
        logger.warning("kvfold: vLLM's FlashAttention cannot be called as expected: %s", error)
        return f"FlashAttention {VERSION} cannot be called"
    if not right:
        logger.warning("kvfold: vLLM's FlashAttention gives unexpected numbers and is not used")
    return None if right else f"FlashAttention {VERSION} gives unexpected numbers"


@lru_cache
def _function() -> Callable[..., Any] | None:
    """vLLM's function, if it has the version."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
    except ImportError:
        return None
    return flash_attn_varlen_func if is_fa_version_supported(VERSION) else None


@torch.inference_mode()
def _is_right() -> bool:
    """Whether it attends as PyTorch does, with 4 query heads for 2 KV heads and keys of 120 numbers
    among values of 128, of 48 tokens in memory: the last 5 of 37 tokens to all before them; 12
    queries of which the last sees 7 tokens, and 5 none; the last 5 of 37 to 6 each."""

    def drawn(*shape: int) -> Tensor:
        make = torch.Generator("cpu").manual_seed(sum(shape))
        return torch.randn(*shape, generator=make, device="cpu").to("cuda", torch.bfloat16)

    rows = drawn(1, 48, 2 * 120 + 2 * 128)
    keys, values = KVView(rows, (0, 120), (120,) * 2), KVView(rows, (240, 368), (128,) * 2)
    k, v = rows[..., :240].unflatten(-1, (2, 120)), rows[..., 240:].unflatten(-1, (2, 128))
    k, v = (x[0].transpose(0, 1).repeat_interleave(2, 0).float() for x in (k, v))
    token = torch.arange(48, device="cuda")
    right = []
    for queries, count, window in ((5, 37, None), (12, 7, None), (5, 37, 6)):
        q, last = drawn(1, 4, queries, 120), torch.arange(count - queries, count, device="cuda")
        counts = torch.full((1, 1), count, dtype=torch.int32, device="cuda")
        hidden = (token > last[:, None]) | (token <= last[:, None] - (window or count + 1))
        sees = last >= 0
        scores = (q[0].float() @ k.mT * 0.1).masked_fill(hidden, -torch.inf)[:, sees]
        expected = scores.softmax(-1) @ v, scores.logsumexp(-1) * LOG2_E
        result = weigh(q, keys, values, 128, counts[0], 0.1, window)
        pairs = [(x[0][:, sees], y) for x, y in zip(result, expected, strict=True)]
        if count >= queries:
            visible = Seen(
                counts=counts, owner=(0, 0), positions=None, queries=last[None], window=window
            )
            out = attended(q, keys, values, 128, visible, 0.1, None)
            pairs.append((out[0], expected[0]))
        right += [(x.float() - y).norm() < 0.01 * y.norm() for x, y in pairs]
    return bool(torch.stack(right).all())
