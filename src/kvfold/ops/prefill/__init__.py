"""Attention of many new tokens (a prefill chunk) over keys and values in contiguous tensors.

Shapes: B sequences, Hq query heads, Hk KV heads, T queries, S tokens of keys and values, G groups
of the layer; dk, dv widest key and value rank. Ranks and stored tokens may differ from head to
head.
"""

from types import ModuleType

from torch import Tensor

from kvfold.ops.backend import Operation
from kvfold.ops.prefill.plan import unsupported_reason
from kvfold.ops.prefill.rows import KVView, Seen

__all__ = ["KVView", "Seen", "peaks", "prefill", "prefill_among", "why_not"]

# Modules of PREFILL have `prefill` and `prefill_among`, those of PEAKS have `peaks`, with the
# arguments of the functions below.
PREFILL = Operation(__name__, {"triton": unsupported_reason})
PEAKS = Operation(__name__, {"triton_peaks": unsupported_reason})


def why_not(q: Tensor, keys: KVView, values: KVView) -> str | None:
    """Why `prefill` falls back to plain PyTorch, one head after another; None if a kernel runs."""
    return PREFILL.why_not(q.device.type, *_data(q, keys, values))


def prefill(
    q: Tensor, keys: KVView, values: KVView, seen: Seen, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return softmax(q k^T * scale) v over the tokens that each query sees.

    q: [B, Hq, T, dk], last stride 1, zeros beyond a head's rank.
    softcap: scaled scores become softcap * tanh(score / softcap).

    Returns out [B, Hq, T, dv], 0 beyond a head's rank and for queries that see no token, and the
    log2-sum-exp2 of the scores, fp32 [B, Hq, T], -inf for queries that see no token.
    """
    return _module(q, keys, values, seen).prefill(q, keys, values, seen, scale, softcap)


def prefill_among(
    q: Tensor, keys: KVView, values: KVView, seen: Seen, scale: float, among: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `prefill`, for tokens with positions. Also returns the log2-sum-exp2, fp32 [B, Hq, T],
    of the scores of those visible tokens that `among` bool [B, G, S] selects, -inf if there are
    none."""
    return _module(q, keys, values, seen).prefill_among(q, keys, values, seen, scale, among)


def peaks(
    q: Tensor, keys: KVView, bias: Tensor, counted: Tensor, owner: tuple[int, ...], scale: float,
    of_rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the largest attention weight of every token over all queries of all query heads of a
    KV head: max exp2(q k^T * scale * log2 e + bias) * of_rows; fp32 [B, Hk, S].

    q: [B, Hq, T, dk] as in `prefill`.
    bias: fp32 [B, Hq, T]; -lse of a softmax gives its largest weights.
    counted: bool [B, G, S], tokens that all queries see; the result is 0 for the others.
    owner: group of every KV head. of_rows: fp32 [B, Hq, S].
    """
    dtypes = frozenset((q.dtype, keys.data.dtype))
    module = PEAKS.choose(q.device.type, dtypes, keys.ranks, (0,)).module
    result: Tensor = module.peaks(q, keys, bias, counted, owner, scale, of_rows)
    return result


def _module(q: Tensor, keys: KVView, values: KVView, seen: Seen) -> ModuleType:
    heads = len(seen.owner)
    assert len(keys.ranks) == len(values.ranks) == heads, "keys, values and owner are by head"
    return PREFILL.choose(q.device.type, *_data(q, keys, values)).module


def _data(q: Tensor, keys: KVView, values: KVView) -> tuple[object, ...]:
    dtypes = frozenset((q.dtype, keys.data.dtype, values.data.dtype))
    return dtypes, keys.ranks, values.ranks
