"""Add Gumbel noise for sampling that depends only on the request's key and the token.

There is no generator state, so other requests, retries and pre-emption do not change the noise.

Shapes: r rows of logits, m candidate tokens of each.
"""

from torch import Tensor

from kvfold.ops.backend import Operation
from kvfold.ops.noise.reference import keys_of

__all__ = ["add_gumbel", "keys_of"]

# Each module has `add_gumbel`, which supports all data.
NOISE = Operation(__name__, {"triton": lambda: None})


def add_gumbel(values: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor:
    """Add standard Gumbel noise to values fp32 [r, m], in place, and return them.

    keys int64 [r]: see `keys_of`; ids int64 [r, m]: the token of each value, None: tokens 0 to m.
    If values are log-probabilities, the token with the largest sum is a sample. The random bits are
    the same on every device and in every implementation; their logarithms agree to within rounding.
    """
    module = NOISE.choose(values.device.type).module
    return module.add_gumbel(values, keys, ids)
