"""Bases `post_rope` and `pre_rope` share this: errors weighted by their second-order loss.

Shapes: Hk KV heads, d head dim, K = Hk * d.
"""

import torch
from torch import Tensor

from kvfold.calibration.statistics import Moment
from kvfold.compression.bases.base import BasisBuilder, Source
from kvfold.compression.basis import Basis, weighted


class LossWeighted(BasisBuilder):
    """Builds the basis of values, and provides what the bases of keys share.

    With `Recipe.gradients` errors are weighted by gradients of the loss; without, by what queries
    and W_O make of them.
    """

    predicts_loss = True
    makes_maps = True

    def value_needs(self) -> set[str]:
        """Names of the statistics that `values` reads."""
        if self.recipe.values == "head":
            return {"value"} | self.either({"out_head_weighted", "grad_out"}, {"out_head"})
        return {"value"} | self.either({"value_weighted", "grad_value"}, {"out"})

    def either(self, gradients: set[str], plain: set[str]) -> set[str]:
        """The names to use with `Recipe.gradients`, or those to use without."""
        return gradients | {"first"} if self.recipe.gradients else plain

    def values(self, source: Source, heads: tuple[int, ...]) -> Basis:
        """The basis of the values of `heads`, from a covariance C and a gradient moment G.

        One head: C and G are taken at the attention outputs, C = Cov(p V). Several heads: at the
        values with gradients, at the attention outputs without. In models with sinks, attention
        weights sum to less than one, so the mean is stored like the rest.
        """
        where, gradients = source.span(heads, "v"), self.recipe.gradients
        if self.recipe.values == "head":
            out = self.grad_weighted(source, "out_head")
            covariance, mean = self._moments(source, out)
            covariance, mean = covariance[heads[0]], mean[heads[0]]
            gradient = (
                torch.block_diag(*source["grad_out"].raw()) if gradients else source.output_gram()
            )
        else:
            moment = self.grad_weighted(source, "value") if gradients else source["out"]
            covariance, mean = self._moments(source, moment)
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

    def _moments(self, source: Source, moment: Moment) -> tuple[Tensor, Tensor]:
        """Second moments of values, and the centre of these moments: zero in models with sinks,
        else the mean."""
        if source.family.sinks:
            return moment.raw(), torch.zeros_like(moment.mean())
        return moment.covariance(), moment.mean()

    def grad_weighted(self, source: Source, name: str) -> Moment:
        """The statistic `name`, with tokens weighted by the norm of their gradient where the recipe
        uses gradients.

        The loss of an error e is E[(g . e)^2]. Treating g and e as independent ignores that a few
        tokens carry most of the gradient. Weighting tokens by |g| is one step towards the nearest
        Kronecker product of E[g g^T x c c^T]; it lost 10-15 % less when measured.
        """
        return source[f"{name}_weighted" if self.recipe.gradients else name]

    def first(self, source: Source) -> tuple[Tensor, Tensor, Tensor] | None:
        """The first token's keys before RoPE, values, and keys after RoPE, [K] each. None without
        gradients, whose statistics do not leave the first token out."""
        if not self.recipe.gradients:
            return None
        g = source.geometry
        widths = [g.num_kv_heads * g.head_width(side) for side in ("k", "v", "k")]
        k, v, rotated = source["first"].mean().split(widths)
        return k, v, rotated
