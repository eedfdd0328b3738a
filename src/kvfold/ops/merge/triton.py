"""Merge attention over two sets of entries in one launch. Triton.

Shapes as in `ops.merge`. A program handles the output of one query.
"""
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.common.launch import launch_options
from kvfold.ops.common.plan import power_of_two
from kvfold.ops.common.recording import contiguous, launch
from kvfold.ops.decode.kernels import after_launch

STRIDES = ("T", "a_b", "a_h", "a_t", "b_b", "b_h", "b_t")


@triton.jit(do_not_specialize=STRIDES)
def merge_kernel(
    a, a_b, a_h, a_t, b, b_b, b_h, b_t, lse_a, lse_b, out, total, T,
    HQ: tl.constexpr, DV: tl.constexpr, DB: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """One program per query, (b * HQ + h) * T + t. lse_a, lse_b, total fp32 [B, HQ, T]; out
    [B, HQ, T, DV]."""
    item = tl.program_id(0).to(tl.int64)
    t, h, s = item % T, item // T % HQ, item // T // HQ
    column = tl.arange(0, BLOCK)
    after_launch(PDL)
    old_a, old_b = tl.load(lse_a + item), tl.load(lse_b + item)
    has_a, has_b = old_a > float("-inf"), old_b > float("-inf")
    peak = tl.maximum(old_a, old_b)
    share_a = tl.where(has_a, tl.exp2(old_a - peak), 0.0)
    share_b = tl.where(has_b, tl.exp2(old_b - peak), 0.0)
    mass = tl.where(has_a | has_b, share_a + share_b, 1.0)
    x = tl.load(a + s * a_b + h * a_h + t * a_t + column, column < DV, 0.0).to(tl.float32)
    y = tl.load(b + s * b_b + h * b_h + t * b_t + column, column < DB, 0.0).to(tl.float32)
    x, y = tl.where(has_a, x, 0.0), tl.where(has_b, y, 0.0)
    tl.store(out + item * DV + column, x * (share_a / mass) + y * (share_b / mass), column < DV)
    tl.store(total + item, peak + tl.log2(mass))


def merged(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Like `ops.merge.merged`, in one launch."""
    assert out.stride(-1) == other_out.stride(-1) == 1 and lse.shape == other_lse.shape
    assert lse.dtype is other_lse.dtype is torch.float32
    assert lse.shape == out.shape[:3] == other_out.shape[:3]
    width, other_width = out.shape[-1], other_out.shape[-1]
    assert other_width <= width, f"{other_width} numbers to merge into {width}"
    result, total = out.new_empty(out.shape), lse.new_empty(lse.shape)
    launch(
        merge_kernel, (lse.numel(),),
        out, *out.stride()[:3], other_out, *other_out.stride()[:3],
        contiguous(lse), contiguous(other_lse), result, total, lse.shape[2],
        HQ=lse.shape[1], DV=width, DB=other_width, BLOCK=power_of_two(width), num_warps=1,
        **launch_options(out.device),
    )  # fmt: skip
    return result, total
