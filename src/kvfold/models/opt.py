"""OPT: learned positions, biases, no RoPE, so all projections can be folded into weights."""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers.models.opt.modeling_opt import OPTAttention

from kvfold.models.adapter import Family, HFAttention


class FoldedOPT(HFAttention, OPTAttention):
    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
        **extra: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return self.run(hidden_states, None, attention_mask, past_key_values, extra)


class OPTFamily(Family):
    model_types = ("opt",)
    folded: ClassVar = {"opt": FoldedOPT}
    output_name = "out_proj"
    rope = False

    @classmethod
    def layers(cls, model: Any) -> Any:
        return model.model.decoder.layers

    @classmethod
    def rotary(cls, model: Any) -> nn.Module | None:
        return None
