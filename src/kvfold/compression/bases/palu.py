"""Basis `palu`: SVD of the projections, whitened by the second moments of their outputs."""

from kvfold.compression.bases.base import BasisBuilder, Source
from kvfold.compression.basis import Basis, whitened_svd
from kvfold.layout import Side


class Palu(BasisBuilder):
    """Palu §3.2: one latent per head, per group of heads, or for all heads."""

    factors_weights = True

    def needs(self) -> set[str]:
        return {"key_pre", "value"}

    def build(self, source: Source, side: Side, heads: tuple[int, ...]) -> Basis:
        where, w = source.span(heads), source.weights
        moment, bias = (source["key_pre"], w.k_bias) if side == "k" else (source["value"], w.v_bias)
        width = min(where.stop - where.start, source.geometry.hidden_size)
        basis = whitened_svd(moment.raw()[where, where], moment.mean()[where], bias[where], width)
        return basis.measured(moment.covariance()[where, where])
