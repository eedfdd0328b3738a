"""vLLM's model classes with folded attention layers.

Everything else, and how a model is split over processes, stays vLLM's.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.opt import OPTForCausalLM
from vllm.model_executor.models.phi3 import Phi3ForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import extract_layer_index

from kvfold.models.families import family_of
from kvfold.models.weights import check_finite
from kvfold.vllm_plugin.guard import LogitsGuard, end_tokens
from kvfold.vllm_plugin.layer import FoldedLayer
from kvfold.vllm_plugin.model_cache import ModelCache, check_served, parse_settings
from kvfold.vllm_plugin.profiling import profile_memory
from kvfold.vllm_plugin.tensor_parallel import ProcessShare
from kvfold.vllm_plugin.weights import rotary_table


class FoldedModel(torch.nn.Module):
    """Mix-in that replaces the attention layers of a vLLM model class, the next in line, and loads
    them."""

    model_cache: ModelCache
    folded: dict[str, FoldedLayer]
    guard: LogitsGuard

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        check_served(vllm_config)
        if vllm_config.lora_config is not None:
            raise ValueError(
                "kvfold's plugin for vLLM: LoRA adapters apply to projections that this checkpoint"
                " has folded: merge them first, or serve the original model with maps"
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model_cache = model_cache_of(vllm_config)
        self.folded = replace_attentions(self, self.model_cache, vllm_config)
        profile_memory(vllm_config)
        self.guard = LogitsGuard(end_tokens(vllm_config.model_config))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load attention tensors into the folded layers, and the rest by vLLM's loader."""
        attention_tensors: dict[int, dict[str, Tensor]] = defaultdict(dict)
        family = family_of(self.model_cache.config)
        pattern = re.compile(rf"(?:^|\.)layers\.(\d+)\.{family.attention_name}\.(.+)$")

        def other_weights() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if match := pattern.search(name):
                    attention_tensors[int(match[1])][match[2]] = tensor
                else:
                    yield name, tensor

        loaded: set[str] = super().load_weights(other_weights())  # type: ignore[misc]
        for name, layer in self.folded.items():
            layer.load(attention_tensors[layer.index])
            loaded |= {f"{name}.{parameter}" for parameter, _ in layer.named_parameters()}
        check_finite(self)
        return loaded

    def compute_logits(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """vLLM's logits; rows that are not finite end their requests."""
        logits: Tensor | None = super().compute_logits(*args, **kwargs)  # type: ignore[misc]
        return None if logits is None else self.guard(logits)


def model_cache_of(vllm_config: VllmConfig) -> ModelCache:
    model = vllm_config.model_config
    settings = dict(vllm_config.additional_config or {}).get("kvfold", {})
    share = ProcessShare(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
    maps, cache = parse_settings(settings)
    if maps is not None:
        raise ValueError(
            "kvfold in --additional-config: maps: this checkpoint is folded and needs no maps:"
            " leave `maps` out, or serve the original model with them"
        )
    if cache.window:
        raise ValueError(
            f"kvfold in --additional-config: window={cache.window}: this checkpoint is folded and"
            " computes compressed keys and values: leave `window` out, or serve the original model"
            " with maps"
        )
    return ModelCache.from_checkpoint(model.hf_config, cache, model.dtype, share)


def replace_attentions(
    model: Any, model_cache: ModelCache, vllm_config: VllmConfig
) -> dict[str, FoldedLayer]:
    """Replace each attention layer that vLLM created in this process by a folded one with the same
    name. Returns the folded layers by name."""
    known = vllm_config.compilation_config.static_forward_context
    attention = family_of(model_cache.config).attention_name
    pattern = re.compile(rf"\.layers\.\d+\.{attention}$")
    names = [name for name, _ in model.named_modules() if pattern.search(name)]
    table = rotary_table(model_cache.config, torch.get_default_device())
    layers = {}
    for name in names:
        parent, _, attribute = name.rpartition(".")
        cached = f"{name}.attn"
        del known[cached]
        layer = FoldedLayer(model_cache, extract_layer_index(name), table, cached, vllm_config)
        setattr(model.get_submodule(parent), attribute, layer)
        layers[name] = layer
    return layers


class KVFoldLlamaForCausalLM(FoldedModel, LlamaForCausalLM):
    pass


class KVFoldMistralForCausalLM(FoldedModel, MistralForCausalLM):
    pass


class KVFoldQwen2ForCausalLM(FoldedModel, Qwen2ForCausalLM):
    pass


class KVFoldQwen3ForCausalLM(FoldedModel, Qwen3ForCausalLM):
    pass


class KVFoldPhi3ForCausalLM(FoldedModel, Phi3ForCausalLM):
    pass


class KVFoldOPTForCausalLM(FoldedModel, OPTForCausalLM):
    pass
