"""The checkpoints' format as vLLM knows it: which model class reads them. Weights that are not of
attentions are those of the original."""

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)


class KVFoldQuantization(QuantizationConfig):
    """Of a folded checkpoint. A plain model by `--quantization kvfold` is served as it is: few bits
    need no format of weights."""

    def get_name(self) -> str:
        return "kvfold"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "KVFoldQuantization":
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Name the class that serves it, in vLLM's copy of the config."""
        from kvfold.vllm_plugin.families import architecture  # only where it is served

        if getattr(hf_config, "quantization_config", None) is None:
            return
        hf_config.architectures = [architecture(hf_config)]
