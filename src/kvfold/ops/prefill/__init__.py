"""Attention of many new tokens over rows laid out in one tensor: a prompt's chunk.

Shapes: B sequences, Hq query heads, Hk KV heads, T queries, S rows, G groups of the layer; dk, dv
widest key and value rank. What the heads of a layer keep may differ from head to head.
"""

from types import ModuleType

from torch import Tensor

from kvfold.ops.backend import Operation
from kvfold.ops.prefill.plan import unread
from kvfold.ops.prefill.rows import KVView, Seen

__all__ = ["KVView", "Seen", "peaks", "prefill", "prefill_among", "why_not"]

# Each has `prefill` and `prefill_among`, which are called as those below, or `peaks`.
PREFILL = Operation(__name__, {"triton": unread})
PEAKS = Operation(__name__, {"triton_peaks": unread})


def why_not(q: Tensor, keys: KVView, values: KVView) -> str | None:
    """Why `prefill` goes head by head, in plain PyTorch; None where it does not."""
    return PREFILL.why_not(q.device.type, *_data(q, keys, values))


def prefill(
    q: Tensor, keys: KVView, values: KVView, seen: Seen, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v over what every query may see.

    q [B, Hq, T, dk], any strides but 1 for the last, zeros beyond a head's own rank; softcap:
    scaled scores become softcap * tanh(score / softcap). Returns out [B, Hq, T, dv], 0 beyond a
    head's rank and where nothing is seen, and the log2-sum-exp2 of the scores, fp32 [B, Hq, T],
    -inf where nothing is seen.
    """
    return _module(q, keys, values, seen).prefill(q, keys, values, seen, scale, softcap)


def prefill_among(
    q: Tensor, keys: KVView, values: KVView, seen: Seen, scale: float, among: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same over rows with positions, and a log2-sum-exp2 fp32 [B, Hq, T] of the scores of those
    rows alone that a query sees and that are `among` bool [B, G, S]; -inf where there are none."""
    return _module(q, keys, values, seen).prefill_among(q, keys, values, seen, scale, among)


def peaks(
    q: Tensor, keys: KVView, bias: Tensor, counted: Tensor, owner: tuple[int, ...], scale: float,
    of_rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What rows are worth at most to any query of any of a KV head's query heads: the largest
    exp2(q k^T * scale * log2 e + bias), times of_rows; fp32 [B, Hk, S].

    q [B, Hq, T, dk] as of `prefill`; bias fp32 [B, Hq, T]: -lse of a softmax, for its largest
    weights; counted bool [B, G, S]: rows that all queries see, 0 elsewhere; owner: group of every
    KV head; of_rows fp32 [B, Hq, S].
    """
    dtypes = frozenset((q.dtype, keys.data.dtype))
    module = PEAKS.choose(q.device.type, dtypes, keys.ranks, (0,)).module
    found: Tensor = module.peaks(q, keys, bias, counted, owner, scale, of_rows)
    return found


def _module(q: Tensor, keys: KVView, values: KVView, seen: Seen) -> ModuleType:
    heads = len(seen.owner)
    assert len(keys.ranks) == len(values.ranks) == heads, "keys, values and owner are by head"
    return PREFILL.choose(q.device.type, *_data(q, keys, values)).module


def _data(q: Tensor, keys: KVView, values: KVView) -> tuple[object, ...]:
    dtypes = frozenset((q.dtype, keys.data.dtype, values.data.dtype))
    return dtypes, keys.ranks, values.ranks
