"""The functions of `ops.linear` for few tokens in fp32, on CPUs. Numba kernels.

Shapes as in `ops.linear`. Rows of weights are read once, one behind another, by all threads, and
their products with all tokens are taken meanwhile. What a token gets depends on neither the tokens
beside it nor the number of threads.
"""

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

ROWS = 16  # of weights that a thread takes at a time
SHARED = 2**17  # weights from which on threads are woken

Floats = npt.NDArray[np.float32]


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether x [.., K] and weights [N, K] are few tokens in fp32, on a CPU."""
    few = 0 < x.numel() <= FEW * x.shape[-1]
    return few and x.dtype is weight.dtype is torch.float32 and weight.is_contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `ops.linear.linear`."""
    added = np.zeros(0, dtype=np.float32) if bias is None else bias.detach().numpy()
    return _each(partial(_product, added), x, weight, weight.shape[0])


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """As `ops.linear.gated`."""
    return _each(_gated, x, weight, weight.shape[0] // 2)


def _each(work: Callable[..., object], x: Tensor, weight: Tensor, outputs: int) -> Tensor:
    """Of work(x, weights, out, begin, end), ROWS numbers of every output at a time."""
    tokens = x.detach().reshape(-1, x.shape[-1]).contiguous().numpy()
    out = np.empty((len(tokens), outputs), dtype=np.float32)
    own = partial(work, tokens, weight.detach().numpy(), out)
    count = -(-outputs // ROWS)
    if weight.numel() < SHARED:
        own(0, count)
    else:
        share(own, count)
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
                small = power_of_2(-abs(gate) * np.float32(1.4426950408889634))
                share = (np.float32(1) if gate >= 0 else small) / (np.float32(1) + small)
                out[t, first + i] = gate * share * up[t, i]
