"""Ours after RoPE: nothing is rebuilt in decode."""

from kvfold.compression.bases.base import Source
from kvfold.compression.bases.loss_weighted import LossWeighted
from kvfold.compression.basis import Basis, weighted
from kvfold.layout import Side


class PostRope(LossWeighted):
    """Keys per head; the constant mean of rotated keys drops out of the softmax, unless scores are
    capped before it, or a sink stands beside them: then it is kept with the rest."""

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
        capped = source.geometry.softcap is not None or source.family.sinks
        basis = weighted(
            (keys.raw() if capped else keys.covariance())[head],
            weight.raw()[head],
            keys.mean()[head] * (not capped),
            first and first[2][source.span(heads)],
            fixed=capped or source.geometry.rope,  # turned keys are in no clusters: measured worse
        )
        stored = source["key_post"]
        return basis.measured((stored.raw() if capped else stored.covariance())[head])
