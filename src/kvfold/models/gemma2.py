"""Gemma 2: capped scores with their own scale, sliding windows in every other layer, capped
logits."""

from typing import Any, ClassVar

from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention

from kvfold.models.adapter import Residual
from kvfold.models.llama import LlamaFamily, RotaryForward
from kvfold.ops.common.attention import capped


class FoldedGemma2(RotaryForward, Gemma2Attention):
    pass


def finish(layer: Any, x: Tensor, out: Tensor) -> Residual:
    """The second half of a decoder layer with norms before and after both attention and MLP."""
    x = x + layer.post_attention_layernorm(out)
    fed = layer.mlp(layer.pre_feedforward_layernorm(x))
    return x, layer.post_feedforward_layernorm(fed)


class Gemma2Family(LlamaFamily):
    model_types = ("gemma2",)
    folded: ClassVar = {"gemma2": FoldedGemma2}
    finish = staticmethod(finish)
    not_in_gguf = "how scores are scaled and capped"

    @classmethod
    def scaling(cls, config: Any, head_dim: int) -> float:
        return float(config.query_pre_attn_scalar**-0.5)

    @classmethod
    def softcap(cls, config: Any) -> float | None:
        bound: float | None = config.attn_logit_softcapping
        return bound

    @classmethod
    def logits(cls, model: Any, hidden: Tensor) -> Tensor:
        return capped(super().logits(model, hidden), model.config.final_logit_softcapping)
