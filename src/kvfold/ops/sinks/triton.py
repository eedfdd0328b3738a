"""Correct attention outputs for attention sinks, in one launch. Triton.

Shapes as in `ops.sinks`. A program handles the output of one query.
"""
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.ops.common.attention import LOG2_E
from kvfold.ops.common.launch import launch_options
from kvfold.ops.common.plan import power_of_two
from kvfold.ops.common.recording import launch
from kvfold.ops.decode.kernels import after_launch

STRIDES = ("T", "o_b", "o_h", "o_t")


@triton.jit(do_not_specialize=STRIDES)
def sinks_kernel(
    out, o_b, o_h, o_t, lse, total, sinks, T,
    HQ: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, LOG2_E: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """One program per query, (b * HQ + h) * T + t. lse, total fp32 [B, HQ, T]."""
    item = tl.program_id(0).to(tl.int64)
    t, h, b = item % T, item // T % HQ, item // T // HQ
    column = tl.arange(0, BLOCK)
    sink = tl.load(sinks + h) * LOG2_E
    after_launch(PDL)
    old_lse = tl.load(lse + item)
    peak = tl.maximum(old_lse, sink)
    share = tl.exp2(old_lse - peak)
    mass = share + tl.exp2(sink - peak)
    target = out + b * o_b + h * o_h + t * o_t + column
    x = tl.load(target, column < DV, 0.0).to(tl.float32)
    tl.store(target, x * (share / mass), column < DV)
    tl.store(total + item, peak + tl.log2(mass))


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Like `ops.sinks.with_sinks`, in one launch."""
    assert out.stride(-1) == 1 and lse.is_contiguous() and lse.shape == out.shape[:3]
    assert sinks.dtype is lse.dtype is torch.float32 and sinks.shape == lse.shape[1:2]
    total, width = torch.empty_like(lse), out.shape[-1]
    launch(
        sinks_kernel, (lse.numel(),),
        out, *out.stride()[:3], lse, total, sinks.contiguous(), lse.shape[2],
        HQ=len(sinks), DV=width, BLOCK=power_of_two(width), LOG2_E=LOG2_E, num_warps=1,
        **launch_options(out.device),
    )  # fmt: skip
    return out, total
