"""Linear layers for few tokens (a decode step), limited by the time to read the weights.

Shapes: T tokens, K inputs, N outputs. Sums are in fp32; their order depends on T.
"""

from typing import Any

import torch
from torch import Tensor

from kvfold.ops.backend import no_numba
from kvfold.ops.linear import reference

__all__ = ["FEW", "gated", "linear"]

FEW = 32  # most tokens of the CPU kernel, which reads weights once; above, PyTorch reuses tiles


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [.., K] @ weight [N, K]^T + bias [N]: [.., N]."""
    if x.device.type != "cuda":
        return _on_cpu(x, weight).linear(x, weight, bias)
    result: Tensor = torch.ops.kvfold.linear(x, weight, bias)
    return result


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """Return silu(gate) * up, [.., N], where (gate, up) = x [.., K] @ weight [2 N, K]^T; gate is
    the first half."""
    if x.device.type != "cuda":
        return _on_cpu(x, weight).gated(x, weight)
    result: Tensor = torch.ops.kvfold.gated(x, weight)
    return result


def _on_cpu(x: Tensor, weight: Tensor) -> Any:
    """Return the CPU module for these tensors: Numba if it supports them, else plain PyTorch."""
    if no_numba(x.device.type) is None:
        from kvfold.ops.linear import numba

        if numba.serves(x, weight):
            return numba
    return reference


# Custom ops, since torch.compile does not trace into them: the number of tokens selects the kernel
# at run time.
@torch.library.custom_op(
    "kvfold::linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from kvfold.ops.linear import triton

    return triton.linear(x, weight, bias)


@_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


@torch.library.custom_op(
    "kvfold::gated", mutates_args=(), schema="(Tensor x, Tensor weight) -> Tensor"
)
def _gated(x: Tensor, weight: Tensor) -> Tensor:
    from kvfold.ops.linear import triton

    return triton.gated(x, weight)


@_gated.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight) // 2)
