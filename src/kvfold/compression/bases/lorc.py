"""Basis `lorc`: truncated SVD of the projection weights (LoRC §4.1)."""

from kvfold.compression.bases.base import BasisBuilder, Source
from kvfold.compression.basis import Basis, weight_svd
from kvfold.layout import Side


class LoRC(BasisBuilder):
    """Left singular vectors of W_K and W_V. Reads no statistics."""

    factors_weights = True

    def needs(self) -> set[str]:
        return set()

    def build(self, source: Source, side: Side, heads: tuple[int, ...]) -> Basis:
        where, w = source.span(heads), source.weights
        weight, bias = (w.k, w.k_bias) if side == "k" else (w.v, w.v_bias)
        return weight_svd(weight[where], bias[where])
