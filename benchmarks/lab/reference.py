"""Decode attention written out, one sequence and head at a time.

Shapes: Hq query heads, Hk KV heads, d head dim, dk, dv widest key and value rank, T rows, G groups
of the layer, R numbers of a row.
"""

import torch
from torch import Tensor

from kvfold.layout import Side
from kvfold.layout.pages import Group
from kvfold.ops.common.pages import LayerPages, owner_of
from kvfold.ops.store.reference import gather


def decode_one(q: Tensor, pages: LayerPages, slot: int, scale: float, width: int) -> Tensor:
    """Outputs of one sequence, fp32 [Hq, width], zero beyond a head's value rank.

    q [Hq, dk] zero-padded.
    """
    groups, lengths = pages.groups, pages.lengths
    slots = torch.tensor([slot], device=q.device)
    quantized = all(x.quantized for group in groups for x in group.layout.segments)
    dtype = torch.float32 if quantized else q.dtype  # else rounding decides between close scores
    rows = gather(pages, slots, lengths[slots], dtype).rows[0]
    out = torch.zeros(q.shape[0], width, device=q.device)
    owner = owner_of(groups)
    per_head = q.shape[0] // len(owner)
    for head, g in enumerate(owner):
        mine, own = slice(head * per_head, (head + 1) * per_head), rows[: int(lengths[slot, g])]
        k, v = (own[:, _columns(groups[g], side, head)] for side in ("k", "v"))
        out[mine, : v.shape[-1]] = attend(q[mine, : k.shape[-1]], k, v, scale)
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of one KV head in fp32: q [G, dk], k [T, dk], v [T, dv] -> [G, dv]; 0 for T = 0."""
    weights = (q.float() @ k.float().T * scale).softmax(-1)
    return weights @ v.float()


def _columns(group: Group, side: Side, head: int) -> slice:
    """Columns of the layer's row that hold a head's keys, or its values."""
    own = [x for x in group.layout.segments if x.side == side and head in x.heads]
    return slice(own[0].start, own[-1].start + own[-1].width) if own else slice(0, 0)
