"""Merge attention over two sets of entries in plain PyTorch. Shapes as in `ops.merge`."""

import torch
from torch import Tensor
from torch.nn import functional as F


def merged(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Like `ops.merge.merged`."""
    total = torch.logaddexp2(lse, other_lse)
    other_out = F.pad(other_out, (0, out.shape[-1] - other_out.shape[-1]))
    parts = [
        (x.float() * (y - total).exp2()[..., None]).masked_fill((y == -torch.inf)[..., None], 0)
        for x, y in ((out, lse), (other_out, other_lse))
    ]
    return (parts[0] + parts[1]).to(out.dtype), total
