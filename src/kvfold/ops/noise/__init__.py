"""Gumbel noise for sampling that depends only on the request's key and the token.

There is no generator state, so other requests, retries and pre-emption do not change it.

Shapes: r rows of logits, m candidate tokens of each.
"""

from torch import Tensor

from kvfold.ops.backend import Operation
from kvfold.ops.noise.reference import keys_of

__all__ = ["add_gumbel", "keys_of"]

# Each has `add_gumbel`, which serves all data.
NOISE = Operation(__name__, {"triton": lambda: None})


def add_gumbel(values: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor:
    """Add standard Gumbel noise to values fp32 [r, m], in place, and return them.

    keys int64 [r]: see `keys_of`; ids int64 [r, m]: whose values they are, None: of tokens 0 to m.
    Where values are log-probabilities the largest sum is a draw. Bits are the same on every device
    and by every implementation, their logarithms to within rounding.
    """
    module = NOISE.choose(values.device.type).module
    return module.add_gumbel(values, keys, ids)
