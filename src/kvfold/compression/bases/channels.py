"""Keys before RoPE and values as they are: for methods that cut bits alone.

Shapes: n numbers of a head, N sampled tokens.
"""

import torch
from torch import Tensor

from kvfold.compression.bases.base import BasisBuilder, Source
from kvfold.compression.basis import Basis
from kvfold.layout import Side
from kvfold.layout.formats.kvquant import num_outliers

FAR = 3.0  # standard deviations: about where the range of a channel ends


class Channels(BasisBuilder):
    """Numbers of a head in the order of their energy. What is not kept is dropped, which costs
    more than any other basis: it is for keep = 1.

    Attention sinks at the first token, whose keys lie beyond the ranges of many channels: KVQuant
    keeps it in 16 bits (its §3.5). Here keys are sheared, so that it differs from the mean in one
    number, which is a row's outlier and stored in 16 bits.
    """

    key_shares = ("head",)
    value_shares = ("head",)
    whole = True

    def needs(self) -> set[str]:
        return {"key_pre", "value", "first", "samples"}

    def build(self, source: Source, side: Side, heads: tuple[int, ...]) -> Basis:
        where = source.span(heads)
        energy = source["key_pre" if side == "k" else "value"].raw()[where, where].diagonal()
        order = energy.argsort(descending=True)
        up = torch.eye(len(order), dtype=energy.dtype, device=energy.device)
        if side == "k":
            sampled = source["samples"].second.chunk(6, -1)[0][:, where]
            up = sheared(sampled.to(up), source["first"].mean().chunk(3)[0][where].to(up))
        down = torch.linalg.inv(up).mT
        return Basis(
            down=down[:, order],
            up=up[:, order],
            mean=torch.zeros_like(energy),
            singular=energy[order].sqrt(),
        )


def sheared(keys: Tensor, first: Tensor) -> Tensor:
    """Axes [n, n] by which a first token's key `first` [n] differs from the mean of others' keys
    [N, n] in one number; those of the channels where it is not far from them.

    That number is the channel's in which it is furthest out, by standard deviations: so no other
    channel takes more of its spread than it has itself.
    """
    axes = torch.eye(len(first), dtype=keys.dtype, device=keys.device)
    delta, spread = first - keys.mean(0), keys.std(0).clamp(min=1e-12)
    out = delta.abs() / spread
    if int((out > FAR).sum()) > num_outliers(len(first)):
        axes[:, out.argmax()] = delta / delta[out.argmax()]
    return axes
