"""Basis `zack`: joint principal directions of the two factors of a product (ZACK, ZDC)."""

import torch

from kvfold.compression.bases.base import BasisBuilder, Source
from kvfold.compression.basis import Basis, orthonormal
from kvfold.layout import Side


class Zack(BasisBuilder):
    """ZACK §4.3: of queries and keys after RoPE, [Q; K], and of values and the output projections
    of their query heads, [V; W_O^h]."""

    key_shares = ("head",)
    value_shares = ("head",)
    after_rope = True

    def needs(self) -> set[str]:
        rows = "rows_reduced" if self.recipe.reduce else "query"
        return {rows, "key_post", "value"}

    def build(self, source: Source, side: Side, heads: tuple[int, ...]) -> Basis:
        (head,), where, keys = heads, source.span(heads), side == "k"
        stored = source["key_post" if keys else "value"]
        place = head if keys else (where, where)
        rows, device = stored.second[place], source.weights.k.device
        if self.recipe.reduce:
            rows = source["rows_reduced"].second[head, 0 if keys else 1].to(device)
        elif keys:
            rows = source["query"].second[head] + rows
        if not keys:
            rows = rows + source.output_gram()[where, where]
        zero = torch.zeros(source.geometry.head_dim, dtype=torch.double, device=device)
        return orthonormal(rows, zero).measured(stored.raw()[place])
