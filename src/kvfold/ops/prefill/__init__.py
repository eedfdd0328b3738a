"""Attention of many new tokens over rows laid out in one tensor: a prompt's chunk.

Shapes: B sequences, Hq query heads, Hk KV heads, T queries, S rows, G groups of the layer; dk, dv
widest key and value rank. What the heads of a layer keep may differ from head to head.
"""

from torch import Tensor

from kvfold.ops.backend import Operation
from kvfold.ops.prefill.plan import unread
from kvfold.ops.prefill.rows import KVView, Seen

__all__ = ["KVView", "Seen", "prefill", "why_not"]

# Each has `prefill`, which is called as the one below.
PREFILL = Operation(__name__, {"triton": unread})


def why_not(q: Tensor, keys: KVView, values: KVView) -> str | None:
    """Why `prefill` goes head by head, in plain PyTorch; None where it does not."""
    return PREFILL.why_not(q.device.type, *_data(q, keys, values))


def prefill(
    q: Tensor, keys: KVView, values: KVView, seen: Seen, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v over what every query may see.

    q [B, Hq, T, dk], any strides but 1 for the last, zeros beyond a head's own rank. Returns out
    [B, Hq, T, dv], 0 beyond a head's rank and where nothing is seen, and the log2-sum-exp2 of the
    scaled scores, fp32 [B, Hq, T], -inf where nothing is seen.
    """
    heads = len(seen.owner)
    assert len(keys.ranks) == len(values.ranks) == heads, "keys, values and owner are by head"
    module = PREFILL.choose(q.device.type, *_data(q, keys, values)).module
    return module.prefill(q, keys, values, seen, scale)


def _data(q: Tensor, keys: KVView, values: KVView) -> tuple[object, ...]:
    dtypes = frozenset((q.dtype, keys.data.dtype, values.data.dtype))
    return dtypes, keys.ranks, values.ranks
