"""Registers folded checkpoints with vLLM, as the quantization method "kvfold". It selects the model
class; weights outside of attention are loaded unquantised."""

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)


class KVFoldQuantization(QuantizationConfig):
    """vLLM's config of a folded checkpoint."""

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
        """Set the model class in vLLM's copy of the config. Raises ValueError for a model that is
        not a folded checkpoint."""
        from kvfold.vllm_plugin.families import architecture  # only if such a model is served

        if hf_config is None:
            return
        if getattr(hf_config, "quantization_config", None) is None:
            raise ValueError(
                "--quantization kvfold is for folded checkpoints, whose config sets it: leave it"
                " out; bits and maps are set in --additional-config"
            )
        hf_config.architectures = [architecture(hf_config)]
