"""GPT-NeoX and Pythia: q, k, v interleaved per head, partial rotary, biases."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention

from kvfold.models.adapter import Family, HFAttention, Projections, linear
from kvfold.ops.common.attention import Tables
from kvfold.spec import Geometry


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

    @classmethod
    def layers(cls, model: Any) -> Any:
        return model.gpt_neox.layers

    @classmethod
    def rotary(cls, model: Any) -> nn.Module | None:
        return model.gpt_neox.rotary_emb

    @classmethod
    def projections(cls, attention: Any, geometry: Geometry) -> Projections:
        weight, bias = linear(attention.query_key_value)
        per_head = weight.unflatten(0, (geometry.num_kv_heads, 3, geometry.head_dim))
        q, k, v = (part.flatten(0, 1) for part in per_head.unbind(1))
        biases: tuple[Tensor | None, ...] = (None, None, None)
        if bias is not None:
            split = bias.unflatten(0, (geometry.num_kv_heads, 3, geometry.head_dim))
            biases = tuple(part.flatten() for part in split.unbind(1))
        return Projections.of(
            q=(q, biases[0]), k=(k, biases[1]), v=(v, biases[2]), o=linear(attention.dense)
        )
