"""Products of tokens with weights: those of few tokens, as a decode step has them, by kernels whose
time is that of reading the weights.

Shapes: T tokens, K inputs, N outputs. A token's sums are in fp32; their order depends on how many
tokens there are.
"""

from typing import Any

import torch
from torch import Tensor

from kvfold.ops.backend import no_numba
from kvfold.ops.linear import reference

__all__ = ["FEW", "gated", "linear"]

FEW = 32  # tokens that CPUs multiply by reading weights once; of more PyTorch keeps tiles of them


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [.., K] by weight [N, K], plus bias [N]: [.., N]."""
    if x.device.type != "cuda":
        return _on_cpu(x, weight).linear(x, weight, bias)
    found: Tensor = torch.ops.kvfold.linear(x, weight, bias)
    return found


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up of x [.., K] by weight [2 N, K], of which gate's rows come first: [.., N]."""
    if x.device.type != "cuda":
        return _on_cpu(x, weight).gated(x, weight)
    found: Tensor = torch.ops.kvfold.gated(x, weight)
    return found


def _on_cpu(x: Tensor, weight: Tensor) -> Any:
    """The module that multiplies them."""
    if no_numba(x.device.type) is None:
        from kvfold.ops.linear import numba

        if numba.serves(x, weight):
            return numba
    return reference


# Operations of PyTorch's, so that torch.compile leaves them whole: how many tokens there are is
# known where they run.
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
