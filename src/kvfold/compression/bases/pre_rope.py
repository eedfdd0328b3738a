"""Ours before RoPE: keys of some heads, values of some heads, or both of all heads.

Shapes: Hk KV heads, d head dim, K = Hk * d, D width.
"""

import torch
from torch import Tensor

from kvfold.calibration.statistics import Moment
from kvfold.compression.bases.base import Source
from kvfold.compression.bases.loss_weighted import LossWeighted
from kvfold.compression.basis import Basis, weighted
from kvfold.layout import Side


class PreRope(LossWeighted):
    """Keys are rebuilt, and then rotated, for every score."""

    key_shares = ("head", "group", "joint", "kv")
    value_shares = ("head", "group", "joint", "kv")

    def needs(self) -> set[str]:
        if self.recipe.keys == "kv":
            return {"kv"} | self.either({"kv_felt", "grad_kv"}, {"query_back"})
        keys = self.either({"key_pre_felt", "grad_key_pre"}, {"query_back"})
        return {"key_pre"} | keys | self.value_needs()

    def build(self, source: Source, side: Side, heads: tuple[int, ...]) -> Basis:
        if side == "kv":
            return self._shared(source)
        if side == "v":
            return self.values(source, heads)
        where, first = source.span(heads), self.first(source)
        moment = self.grad_weighted(source, "key_pre")
        basis = weighted(
            moment.covariance()[where, where],
            self._key_gradient(source)[where, where],
            moment.mean()[where],
            first and first[0][where],
        )
        return basis.measured(source["key_pre"].covariance()[where, where])

    def _key_gradient(self, source: Source) -> Tensor:
        """How errors of keys before RoPE cost loss [K, K]; without gradients, through the scores of
        queries turned back to the key's position, one block per head."""
        if self.recipe.gradients:
            return source["grad_key_pre"].raw()
        return torch.block_diag(*source["query_back"].raw())

    def _shared(self, source: Source) -> Basis:
        """One latent for all keys and values of the layer, within what W_K and W_V can produce.

        Without gradients the two sides' weights have no common unit; each is scaled to the same
        total weighted energy.
        """
        where, moment = source.subspace, self.grad_weighted(source, "kv")
        covariance, mean = self._about(source, moment)
        gradient = (
            source["grad_kv"].raw() if self.recipe.gradients else self._balanced(source, covariance)
        )
        first = torch.cat(found[:2]) if (found := self.first(source)) else None
        if first is not None and where:
            first = where.coordinates(first[None])[0]
        basis = weighted(covariance, gradient, mean, first, fixed=source.family.sinks)
        basis = basis.measured(self._about(source, source["kv"])[0])
        return basis.lifted(where.axes, where.origin) if where else basis

    def _about(self, source: Source, moment: Moment) -> tuple[Tensor, Tensor]:
        """Second moments of keys and values, and what they are taken about: their mean, and for
        values zero where attention has sinks, whose weights sum to less than one."""
        covariance, mean = moment.covariance(), moment.mean()
        if not source.family.sinks:
            return covariance, mean
        assert source.subspace is None, "keys and values are numbers of their own"
        off = mean.clone()
        off[: source.geometry.kv_width] = 0
        return covariance + torch.outer(off, off), mean - off

    def _balanced(self, source: Source, covariance: Tensor) -> Tensor:
        """Key and value weights without gradients, each scaled to weighted energy one."""
        where, parts = source.subspace, source.geometry.kv_width
        lifted = where.axes @ covariance @ where.axes.mT if where else covariance
        blocks = []
        for i, block in enumerate((self._key_gradient(source), source.output_gram())):
            span = slice(i * parts, (i + 1) * parts)
            blocks.append(block / (block * lifted[span, span]).sum().clamp(min=1e-30))
        gradient = torch.block_diag(*blocks)
        return where.axes.mT @ gradient @ where.axes if where else gradient
