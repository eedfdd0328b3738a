"""GPT-NeoX and Pythia: q, k, v interleaved per head, partial rotary, biases."""

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention

from kvfold.layout import Geometry
from kvfold.models.adapter import Family, HFAttention, Projections, linear
from kvfold.ops.common.attention import Tables


class FoldedGPTNeoX(HFAttention, GPTNeoXAttention):
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        layer_past: Any = None,
        position_embeddings: Tables | None = None,
        **extra: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return self.run(hidden_states, position_embeddings, attention_mask, layer_past, extra)


class GPTNeoXFamily(Family):
    model_types = ("gpt_neox",)
    folded: ClassVar = {"gpt_neox": FoldedGPTNeoX}
    attention_name = "attention"
    plain_weight = "query_key_value.weight"

    @classmethod
    def geometry(cls, config: Any) -> Geometry:
        """The geometry with as many KV heads as query heads: transformers ignores
        `num_key_value_heads` in such a config."""
        return replace(super().geometry(config), num_kv_heads=config.num_attention_heads)

    @classmethod
    def layers(cls, model: Any) -> Any:
        return model.gpt_neox.layers

    @classmethod
    def rotary(cls, model: Any) -> nn.Module | None:
        return model.gpt_neox.rotary_emb

    @classmethod
    def projections(cls, attention: Any, geometry: Geometry) -> Projections:
        def split(x: Tensor) -> list[Tensor]:
            per_head = x.unflatten(0, (geometry.num_kv_heads, 3, geometry.head_dim))
            return [part.flatten(0, 1) for part in per_head.unbind(1)]

        weight, bias = linear(attention.query_key_value)
        biases = [None] * 3 if bias is None else split(bias)
        q, k, v = zip(split(weight), biases, strict=True)
        return Projections.of(q=q, k=k, v=v, o=linear(attention.dense))
