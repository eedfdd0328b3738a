"""Linear layers in plain PyTorch: the functions of `ops.linear`."""

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like `ops.linear.linear`."""
    return F.linear(x, weight, bias)


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """Like `ops.linear.gated`."""
    gate, up = F.linear(x, weight).chunk(2, -1)
    return F.silu(gate) * up
