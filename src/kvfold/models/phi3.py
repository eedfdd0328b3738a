"""Phi-3: one fused projection [Q | K | V], partial rotary."""

from typing import Any, ClassVar

from transformers.models.phi3.modeling_phi3 import Phi3Attention

from kvfold.layout import Geometry
from kvfold.models.adapter import Family, Projections, linear
from kvfold.models.llama import RotaryForward, finish


class FoldedPhi3(RotaryForward, Phi3Attention):
    pass


class Phi3Family(Family):
    model_types = ("phi3",)
    folded: ClassVar = {"phi3": FoldedPhi3}
    plain_weight = "qkv_proj.weight"
    finish = staticmethod(finish)

    @classmethod
    def projections(cls, attention: Any, geometry: Geometry) -> Projections:
        sizes = [geometry.num_query_heads * geometry.head_dim, geometry.kv_width, geometry.kv_width]
        q, k, v = attention.qkv_proj.weight.split(sizes)
        return Projections.of(q=(q, None), k=(k, None), v=(v, None), o=linear(attention.o_proj))
