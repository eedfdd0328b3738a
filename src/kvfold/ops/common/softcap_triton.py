"""Scores within a cap. A Triton function."""
# mypy: allow-untyped-defs

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softcapped(s, cap):
    """Return cap * tanh(score / cap) of scaled scores s, fp32. Scores and result are in log2; the
    cap is not."""
    return cap * LOG2_E * (1 - 2 / (1 + tl.exp2(s * (2 / cap))))
