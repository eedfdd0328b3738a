"""What tests of quantize share with others."""

import math

from torch import Tensor

U = 2.0**-11  # unit round-off of fp16


def bound(x: Tensor, bits: int, zeros: bool) -> Tensor:
    """What `quantize` promises for |x - x_hat|, [..., 1]."""
    top, n = 2**bits - 1, x.shape[-1]
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    if zeros:
        return (high - low) / (2 * top) + U * (low.abs() + high - low) + (top + 1) * 2.0**-25
    peak = x.abs().amax(-1, keepdim=True)
    return (1 + 2 * U) * math.sqrt(n) * peak / top + top * 2.0**-26
