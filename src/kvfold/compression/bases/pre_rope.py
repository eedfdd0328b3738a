"""Basis `pre_rope`: keys are stored before RoPE; decode reconstructs and rotates them.

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
    """Latents per head, per group or per layer, or one latent of both keys and values per layer."""

    key_shares = ("head", "group", "joint", "kv")
    value_shares = ("head", "group", "joint", "kv")

    def needs(self) -> set[str]:
        if self.recipe.keys == "kv":
            return {"kv"} | self.either({"kv_weighted", "grad_kv"}, {"query_back"})
        keys = self.either({"key_pre_weighted", "grad_key_pre"}, {"query_back"})
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
        """Second moments [K, K] by which errors of keys before RoPE are weighted.

        They are those of the keys' gradients; without gradients, those of queries rotated back by
        the key's position, one block per head.
        """
        if self.recipe.gradients:
            return source["grad_key_pre"].raw()
        return torch.block_diag(*source["query_back"].raw())

    def _shared(self, source: Source) -> Basis:
        """One latent for all keys and values of the layer, in what W_K and W_V span."""
        where, moment = source.subspace, self.grad_weighted(source, "kv")
        covariance, mean = self._centred(source, moment)
        gradient = (
            source["grad_kv"].raw() if self.recipe.gradients else self._balanced(source, covariance)
        )
        parts = self.first(source)
        first = torch.cat(parts[:2]) if parts else None
        if first is not None and where:
            first = where.coordinates(first[None])[0]
        basis = weighted(covariance, gradient, mean, first, fixed=source.family.sinks)
        basis = basis.measured(self._centred(source, source["kv"])[0])
        return basis.lifted(where.axes, where.origin) if where else basis

    def _centred(self, source: Source, moment: Moment) -> tuple[Tensor, Tensor]:
        """Second moments of keys and values, and the centre of these moments: the mean, but zero
        for values in models with sinks, whose attention weights sum to less than one."""
        covariance, mean = moment.covariance(), moment.mean()
        if not source.family.sinks:
            return covariance, mean
        assert source.subspace is None, "models with sinks have no subspace"
        value_mean = mean.clone()
        value_mean[: source.geometry.kv_width] = 0
        return covariance + torch.outer(value_mean, value_mean), mean - value_mean

    def _balanced(self, source: Source, covariance: Tensor) -> Tensor:
        """Error weights of keys and of values without gradients. The two have no common unit, so
        each is scaled to a total weighted energy of 1."""
        where, width = source.subspace, source.geometry.kv_width
        lifted = where.axes @ covariance @ where.axes.mT if where else covariance
        blocks = []
        for i, block in enumerate((self._key_gradient(source), source.output_gram())):
            span = slice(i * width, (i + 1) * width)
            blocks.append(block / (block * lifted[span, span]).sum().clamp(min=1e-30))
        gradient = torch.block_diag(*blocks)
        return where.axes.mT @ gradient @ where.axes if where else gradient
