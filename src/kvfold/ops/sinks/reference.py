"""Correct attention outputs for attention sinks, in plain PyTorch. Shapes as in `ops.sinks`."""

import torch
from torch import Tensor

from kvfold.ops.common.attention import LOG2_E


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Like `ops.sinks.with_sinks`."""
    total = torch.logaddexp2(lse, (sinks * LOG2_E)[:, None])
    return out.mul_((lse - total).exp2_()[..., None]), total
