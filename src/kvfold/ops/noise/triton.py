"""Add Gumbel noise on the device, in one pass over the values. Triton.

Shapes as in `ops.noise`. A program handles BLOCK tokens of a row.
"""
# mypy: allow-untyped-defs

import triton
import triton.language as tl
from torch import Tensor, float32, int64

from kvfold.ops.common.plan import cdiv
from kvfold.ops.common.recording import launch_once
from kvfold.ops.common.step_kernel import step_kernel

BLOCK = 1024


@triton.jit
def splitmix(start, number):
    """Like `reference.splitmix`, but uint64, so that shifts to the right do not repeat the sign."""
    bits = start.to(tl.uint64) + (number.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def gumbel_of(bits):
    """Like `reference.gumbel_of`, to within rounding.

    log1p(-w) is log(u), where u = 1 - w as rounded, plus the rounding error of u to first order;
    the second order is below fp32's precision. Triton's interpreter has no log1p.
    """
    w = ((bits >> 12).to(tl.float32) + 0.5) * 2.0**-52
    w = tl.minimum(w, 1 - 2.0**-24)
    u = 1 - w
    return -tl.log(w - (1 - u) - tl.log(u))


@step_kernel
def gumbel_kernel(values, keys, ids, num_tokens, BLOCK: tl.constexpr):
    """Program (row, i): tokens i * BLOCK ..; values fp32 and ids int64 [r, num_tokens] or None."""
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_range, offset = column < num_tokens, row.to(tl.int64) * num_tokens + column
    token = column if ids is None else tl.load(ids + offset, in_range, 0)
    noise = gumbel_of(splitmix(tl.load(keys + row), token))
    tl.store(values + offset, tl.load(values + offset, in_range, 0.0) + noise, in_range)


def add_gumbel(values: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor:
    """Like `ops.noise.add_gumbel`."""
    assert values.dtype is float32 and values.is_contiguous(), "values are fp32, row behind row"
    assert keys.shape == values.shape[:1] and keys.dtype is int64, "a key a row"
    assert ids is None or (ids.shape == values.shape and ids.dtype is int64), "an id a value"
    rows, tokens = values.shape
    launch_once(
        gumbel_kernel, (rows, cdiv(tokens, BLOCK)),
        values, keys.contiguous(), ids if ids is None else ids.contiguous(), tokens, BLOCK=BLOCK,
    )  # fmt: skip
    return values
