"""ZACK and ZDC: principal directions of rows that meet in a product."""

import torch

from kvfold.compression.bases.base import BasisBuilder, Source
from kvfold.compression.basis import Basis, orthonormal
from kvfold.spec import Side


class Zack(BasisBuilder):
    """ZACK §4.3: rows [Q; K] after RoPE, or [V; W_O^h of the group's query heads]."""

    key_shares = ("head",)
    value_shares = ("head",)
    after_rope = True

    def needs(self) -> set[str]:
        rows = "rows_reduced" if self.recipe.reduce else "query"
        return {rows, "key_post", "value"}

    def build(self, source: Source, side: Side, heads: tuple[int, ...]) -> Basis:
        (head,) = heads
        device = source.weights.k.device
        zero = torch.zeros(source.geometry.head_dim, dtype=torch.double, device=device)
        reduced = source["rows_reduced"].second[head] if self.recipe.reduce else None
        if side == "k":
            keys = source["key_post"]
            rows = (
                source["query"].second[head] + keys.second[head]
                if reduced is None
                else reduced[0].to(device)
            )
            return orthonormal(rows, zero).measured(keys.raw()[head])
        values, where = source["value"], source.span(heads)
        rows = values.second[where, where] if reduced is None else reduced[1].to(device)
        basis = orthonormal(rows + source.output_gram()[where, where], zero)
        return basis.measured(values.raw()[where, where])
