"""A kernel that does nothing but read."""

# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, STEPS = 2048, 8  # numbers a load, loads a program


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _read(x, out, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    largest = tl.load(x + start + tl.arange(0, BLOCK))
    for i in tl.static_range(1, STEPS):
        largest = tl.maximum(largest, tl.load(x + start + i * BLOCK + tl.arange(0, BLOCK)))
    tl.store(out + tl.program_id(0), tl.reduce(largest, 0, _larger))


def read(x: Tensor) -> Tensor:
    """The largest of every BLOCK * STEPS numbers of x int64 [n], n a multiple of it."""
    programs, rest = divmod(x.numel(), BLOCK * STEPS)
    assert x.dtype is torch.int64 and x.is_contiguous() and rest == 0, f"{x.dtype} [{x.numel()}]"
    out = x.new_empty(programs)
    _read[(programs,)](x, out, BLOCK=BLOCK, STEPS=STEPS, num_warps=8)
    return out
