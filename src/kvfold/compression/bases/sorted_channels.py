"""Basis `channels`: keys before RoPE and values without a change of basis, for methods that only
reduce bits (KVQuant).

Shapes: n numbers of a head, N sampled tokens.
"""

import torch
from torch import Tensor

from kvfold.compression.bases.base import BasisBuilder, Source
from kvfold.compression.basis import Basis
from kvfold.layout import Side
from kvfold.layout.formats.kvquant import num_outliers

FAR = 3.0  # standard deviations: about where the range of a channel ends


class SortedChannels(BasisBuilder):
    """The channels of a head, by falling energy. Meant for keep = 1: dropping channels loses more
    than any other basis does.

    The first token is an attention sink: its key lies beyond the ranges of many channels. KVQuant
    stores it in 16 bits (its §3.5). Here keys are sheared so that it differs from the mean key in
    one number, which is stored in 16 bits as an outlier.
    """

    key_shares = ("head",)
    value_shares = ("head",)
    drops_nothing = True

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
    """Axes [n, n] in which the first token's key `first` [n] differs from the mean of other keys
    [N, n] in one number. The identity where few of its channels are FAR from the mean.

    That number is the channel with the largest distance in standard deviations. With it, no other
    channel's spread grows beyond its present one.
    """
    axes = torch.eye(len(first), dtype=keys.dtype, device=keys.device)
    delta, spread = first - keys.mean(0), keys.std(0).clamp(min=1e-12)
    distance = delta.abs() / spread
    if int((distance > FAR).sum()) > num_outliers(len(first)):
        axes[:, distance.argmax()] = delta / delta[distance.argmax()]
    return axes
