"""Basis `post_rope`: keys are stored after RoPE, so decode reconstructs nothing."""

from kvfold.compression.bases.base import Source
from kvfold.compression.bases.loss_weighted import LossWeighted
from kvfold.compression.basis import Basis, weighted
from kvfold.layout import Side


class PostRope(LossWeighted):
    """One latent of rotated keys per head.

    The mean of a head's rotated keys adds the same to all scores of a query, so the softmax cancels
    it and it is not stored. With capped scores or sinks it does not cancel, and is stored.
    """

    key_shares = ("head",)
    after_rope = True

    def needs(self) -> set[str]:
        keys = self.either({"key_post_weighted", "grad_key_post"}, {"key_seen", "query"})
        return {"key_post"} | keys | self.value_needs()

    def build(self, source: Source, side: Side, heads: tuple[int, ...]) -> Basis:
        if side == "v":
            return self.values(source, heads)
        (head,), gradients = heads, self.recipe.gradients
        keys = source["key_post_weighted" if gradients else "key_seen"]
        weight = source["grad_key_post" if gradients else "query"]
        first = self.first(source)
        capped = source.geometry.softcap is not None or source.family.sinks
        basis = weighted(
            (keys.raw() if capped else keys.covariance())[head],
            weight.raw()[head],
            keys.mean()[head] * (not capped),
            first and first[2][source.span(heads)],
            fixed=capped or source.geometry.rope,  # rotated keys form no clusters: measured worse
        )
        stored = source["key_post"]
        return basis.measured((stored.raw() if capped else stored.covariance())[head])
