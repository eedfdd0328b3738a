"""Keys before RoPE and values as they are: for methods that cut bits alone."""

import torch

from kvfold.compression.bases.base import BasisBuilder, Source
from kvfold.compression.basis import Basis
from kvfold.spec import Side


class Channels(BasisBuilder):
    """Numbers of a head in the order of their energy. What is not kept is dropped, which costs
    more than any other basis: it is for keep = 1."""

    key_shares = ("head",)
    value_shares = ("head",)
    whole = True

    def needs(self) -> set[str]:
        return {"key_pre", "value"}

    def build(self, source: Source, side: Side, heads: tuple[int, ...]) -> Basis:
        where = source.span(heads)
        energy = source["key_pre" if side == "k" else "value"].raw()[where, where].diagonal()
        order = energy.argsort(descending=True)
        axes = torch.eye(len(order), dtype=energy.dtype, device=energy.device)[:, order]
        return Basis(
            down=axes, up=axes, mean=torch.zeros_like(energy), singular=energy[order].sqrt()
        )
