"""Ours after RoPE: nothing is rebuilt in decode."""

from kvfold.compression.bases.base import Source
from kvfold.compression.bases.loss_weighted import LossWeighted
from kvfold.compression.basis import Basis, weighted
from kvfold.spec import Side


class PostRope(LossWeighted):
    """Keys per head; the constant mean of rotated keys drops out of the softmax."""

    key_shares = ("head",)
    after_rope = True

    def needs(self) -> set[str]:
        keys = self.either({"key_post_felt", "grad_key_post"}, {"key_seen", "query"})
        return {"key_post"} | keys | self.value_needs()

    def build(self, source: Source, side: Side, heads: tuple[int, ...]) -> Basis:
        if side == "v":
            return self.values(source, heads)
        (head,), gradients = heads, self.recipe.gradients
        keys = source["key_post_felt" if gradients else "key_seen"]
        weight = source["grad_key_post" if gradients else "query"]
        first = self.first(source)
        basis = weighted(
            keys.covariance()[head],
            weight.raw()[head],
            keys.mean()[head],
            first and first[2][source.span(heads)],
        )
        return basis.measured(source["key_post"].covariance()[head])
