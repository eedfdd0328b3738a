"""Linear layers for few fp32 tokens on CPUs: the functions of `ops.linear` as Numba kernels."""

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvfold.ops.common.codes_numba import kernel
from kvfold.ops.common.products_numba import dots, power_of_2
from kvfold.ops.common.threads import share
from kvfold.ops.linear import FEW

ROWS = 16  # rows of weights (outputs) of a block, the work that a thread takes at a time
SHARED = 2**17  # fewest weights that are shared among threads

Floats = npt.NDArray[np.float32]


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether x [.., K] and weight [N, K] are fp32, with at most FEW tokens."""
    few = 0 < x.numel() <= FEW * x.shape[-1]
    return few and x.dtype is weight.dtype is torch.float32 and weight.is_contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like `ops.linear.linear`."""
    added = np.zeros(0, dtype=np.float32) if bias is None else bias.detach().numpy()
    return _in_blocks(partial(_product, added), x, weight, weight.shape[0])


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """Like `ops.linear.gated`."""
    return _in_blocks(_gated, x, weight, weight.shape[0] // 2)


def _in_blocks(work: Callable[..., object], x: Tensor, weight: Tensor, outputs: int) -> Tensor:
    """Run work(x, weights, out, begin, end) over blocks of ROWS outputs, in threads if the weights
    are large."""
    tokens = x.detach().reshape(-1, x.shape[-1]).contiguous().numpy()
    out = np.empty((len(tokens), outputs), dtype=np.float32)
    block_work = partial(work, tokens, weight.detach().numpy(), out)
    count = -(-outputs // ROWS)
    if weight.numel() < SHARED:
        block_work(0, count)
    else:
        share(block_work, count)
    return torch.from_numpy(out).view(*x.shape[:-1], outputs)


@kernel("void(float32[::1], float32[:,::1], float32[:,::1], float32[:,::1], int64, int64)")
def _product(bias, x, weight, out, begin, end):
    rows, width = weight.reshape(-1), x.shape[1]
    for first in range(begin * ROWS, min(end * ROWS, out.shape[1]), ROWS):
        count = min(ROWS, out.shape[1] - first)
        dots(x, rows[first * width :], width, count, out[:, first:])
        if len(bias):
            for t in range(len(x)):
                for i in range(first, first + count):
                    out[t, i] += bias[i]


@kernel("void(float32[:,::1], float32[:,::1], float32[:,::1], int64, int64)")
def _gated(x, weight, out, begin, end):
    rows, width = weight.reshape(-1), x.shape[1]
    up = np.empty((len(x), ROWS), dtype=np.float32)
    for first in range(begin * ROWS, min(end * ROWS, out.shape[1]), ROWS):
        count = min(ROWS, out.shape[1] - first)
        dots(x, rows[first * width :], width, count, out[:, first:])
        dots(x, rows[(out.shape[1] + first) * width :], width, count, up)
        for t in range(len(x)):
            for i in range(count):
                gate = out[t, first + i]
                decay = power_of_2(-abs(gate) * np.float32(1.4426950408889634))
                sigmoid = (np.float32(1) if gate >= 0 else decay) / (np.float32(1) + decay)
                out[t, first + i] = gate * sigmoid * up[t, i]
