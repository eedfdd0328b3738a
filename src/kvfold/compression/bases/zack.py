"""ZACK and ZDC: principal directions of rows that meet in a product."""

import torch

from kvfold.compression.bases.base import BasisBuilder, Source
from kvfold.compression.basis import Basis, orthonormal
from kvfold.layout import Side


class Zack(BasisBuilder):
    """ZACK §4.3: rows [Q; K] after RoPE, or [V; W_O^h of the group's query heads]."""

    key_shares = ("head",)
    value_shares = ("head",)
    after_rope = True
    reads_weights = True

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
