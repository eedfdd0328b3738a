"""Qwen3: RMS norms of queries and keys per head before RoPE, explicit head_dim."""

from typing import Any, ClassVar

from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RMSNorm

from kvfold.layout import Geometry, LayerSpec
from kvfold.models.llama import LlamaFamily, RotaryForward


class FoldedQwen3(RotaryForward, Qwen3Attention):
    def __init__(self, config: Any, geometry: Geometry, spec: LayerSpec, layer_idx: int) -> None:
        super().__init__(config, geometry, spec, layer_idx)
        self.q_norm = Qwen3RMSNorm(geometry.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(geometry.head_dim, eps=config.rms_norm_eps)

    def normalize_queries(self, q: Tensor) -> Tensor:
        return self.q_norm(q)

    def normalize_keys(self, k: Tensor) -> Tensor:
        return self.k_norm(k)


class Qwen3Family(LlamaFamily):
    model_types = ("qwen3",)
    folded: ClassVar = {"qwen3": FoldedQwen3}
    key_norm = True

    @classmethod
    def norms(cls, attention: Any) -> dict[str, Tensor]:
        return {
            "q_norm.weight": attention.q_norm.weight,
            "k_norm.weight": attention.k_norm.weight,
        }
