"""Merge attention over two sets of entries in plain PyTorch. Shapes as in `ops.merge`."""

import torch
from torch import Tensor
from torch.nn import functional as F


def merged(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Like `ops.merge.merged`."""
    total = torch.logaddexp2(lse, other_lse)
    other_out = F.pad(other_out, (0, out.shape[-1] - other_out.shape[-1]))
    share, other_share = ((x - total).exp2()[..., None] for x in (lse, other_lse))
    return (out.float() * share + other_out.float() * other_share).to(out.dtype), total
