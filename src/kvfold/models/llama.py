"""Llama and relatives with separate q, k, v and o projections: Llama, Yi, Mistral, Qwen2."""

from typing import Any, ClassVar

from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention

from kvfold.models.adapter import Family, HFAttention, Residual
from kvfold.ops.common.attention import Tables


class RotaryForward(HFAttention):
    """The forward signature that Llama, Mistral, Qwen, Phi-3 and Gemma 2 share."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tables | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **extra: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return self.run(hidden_states, position_embeddings, attention_mask, past_key_values, extra)


class FoldedLlama(RotaryForward, LlamaAttention):
    pass


class FoldedMistral(RotaryForward, MistralAttention):
    pass


class FoldedQwen2(RotaryForward, Qwen2Attention):
    pass


def finish(layer: Any, x: Tensor, out: Tensor) -> Residual:
    """The second half of a decoder layer with a norm before attention and one before the MLP."""
    x = x + out
    return x, layer.mlp(layer.post_attention_layernorm(x))


class LlamaFamily(Family):
    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2")
    folded: ClassVar = {"llama": FoldedLlama, "mistral": FoldedMistral, "qwen2": FoldedQwen2}
    gated = "mlp"
    finish = staticmethod(finish)
