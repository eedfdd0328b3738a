"""Ours: errors of keys and values weighted by what they cost the loss, to second order.

Shapes: Hk KV heads, d head dim, K = Hk * d.
"""

import torch
from torch import Tensor

from kvfold.calibration.statistics import Moment
from kvfold.compression.bases.base import BasisBuilder, Source
from kvfold.compression.basis import Basis, weighted


class LossWeighted(BasisBuilder):
    """Values per head or shared, and what bases of keys before and after RoPE have in common."""

    predicts_loss = True

    def value_needs(self) -> set[str]:
        """Statistics that `values` reads."""
        if self.recipe.values == "head":
            return {"value"} | self.either({"out_head_felt", "grad_out"}, {"out_head"})
        return {"value"} | self.either({"value_felt", "grad_value"}, {"out"})

    def either(self, gradients: set[str], plain: set[str]) -> set[str]:
        """Statistics that are read with gradients, or without."""
        return gradients | {"first"} if self.recipe.gradients else plain

    def values(self, source: Source, heads: tuple[int, ...]) -> Basis:
        """Of one head: errors are seen through attention, C = Cov(p V), G at its outputs; so are
        those of several without gradients. Else C and G at the values themselves. Weights of
        attention sum to less than one where it has sinks: then the mean is kept with the rest."""
        where, gradients = source.span(heads, "v"), self.recipe.gradients
        if self.recipe.values == "head":
            out = self.grad_weighted(source, "out_head")
            covariance, mean = self._moments(source, out)
            covariance, mean = covariance[heads[0]], mean[heads[0]]
            gradient = (
                torch.block_diag(*source["grad_out"].raw()) if gradients else source.output_gram()
            )
        else:
            seen = self.grad_weighted(source, "value") if gradients else source["out"]
            covariance, mean = self._moments(source, seen)
            covariance, mean = covariance[where, where], mean[where]
            gradient = source["grad_value"].raw() if gradients else source.output_gram()
        first = self.first(source)
        basis = weighted(
            covariance,
            gradient[where, where],
            mean,
            first and first[1][where],
            fixed=source.family.sinks,
        )
        stored = self._moments(source, source["value"])[0]
        return basis.measured(stored[where, where])

    def _moments(self, source: Source, seen: Moment) -> tuple[Tensor, Tensor]:
        """Second moments of values, and what they are taken about."""
        if source.family.sinks:
            return seen.raw(), torch.zeros_like(seen.mean())
        return seen.covariance(), seen.mean()

    def grad_weighted(self, source: Source, name: str) -> Moment:
        """A moment in which tokens of larger gradients weigh more, where gradients are used.

        The loss of an error is E[(g . e)^2]; taking g and e as independent ignores that a few
        tokens carry most of the gradient. Weighing tokens by |g| is one step towards the nearest
        Kronecker product of E[g g^T x c c^T], and it measured 10-15 % less loss.
        """
        return source[f"{name}_felt" if self.recipe.gradients else name]

    def first(self, source: Source) -> tuple[Tensor, Tensor, Tensor] | None:
        """Keys before RoPE, values and keys after RoPE of a first token [K], with gradients."""
        if not self.recipe.gradients:
            return None
        g = source.geometry
        widths = [g.num_kv_heads * g.head_width(side) for side in ("k", "v", "k")]
        k, v, rotated = source["first"].mean().split(widths)
        return k, v, rotated
