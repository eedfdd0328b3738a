"""vLLM's models with folded attentions: all else of them, and how they are split, stays vLLM's."""

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
from kvfold.vllm_plugin.model_cache import StoredCache, check_served, settings
from kvfold.vllm_plugin.profiling import profile_memory
from kvfold.vllm_plugin.tensor_parallel import Share
from kvfold.vllm_plugin.weights import rotary_table


class FoldedModel(torch.nn.Module):
    """Puts folded attentions into one of vLLM's models, the next in line, and loads them."""

    stored: StoredCache
    folded: dict[str, FoldedLayer]
    guard: LogitsGuard

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        check_served(vllm_config)
        if vllm_config.lora_config is not None:
            raise ValueError(
                "kvfold's plugin for vLLM: LoRA adapters are of projections that this checkpoint"
                " has folded: merge them first, or serve the original model with maps"
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.stored = stored_of(vllm_config)
        self.folded = replace_attentions(self, self.stored, vllm_config)
        profile_memory(vllm_config)
        self.guard = LogitsGuard(end_tokens(vllm_config.model_config))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Attentions take theirs; vLLM's own loader has the rest."""
        mine: dict[int, dict[str, Tensor]] = defaultdict(dict)
        family = family_of(self.stored.config)
        pattern = re.compile(rf"(?:^|\.)layers\.(\d+)\.{family.attention_name}\.(.+)$")

        def others() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if found := pattern.search(name):
                    mine[int(found[1])][found[2]] = tensor
                else:
                    yield name, tensor

        loaded: set[str] = super().load_weights(others())  # type: ignore[misc]
        for name, layer in self.folded.items():
            layer.load(mine[layer.index])
            loaded |= {f"{name}.{own}" for own, _ in layer.named_parameters()}
        check_finite(self)
        return loaded

    def compute_logits(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """vLLM's, of which rows that are not finite end their requests."""
        logits: Tensor | None = super().compute_logits(*args, **kwargs)  # type: ignore[misc]
        return None if logits is None else self.guard(logits)


def stored_of(vllm_config: VllmConfig) -> StoredCache:
    model = vllm_config.model_config
    given = dict(vllm_config.additional_config or {}).get("kvfold", {})
    share = Share(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
    maps, cache = settings(given)
    if maps is not None:
        raise ValueError(
            "kvfold in --additional-config: maps: this checkpoint is folded already, and stores"
            " what its own maps leave; leave `maps` out, or serve the original model with them"
        )
    return StoredCache.of(model.hf_config, cache, model.dtype, share)


def replace_attentions(
    model: Any, stored: StoredCache, vllm_config: VllmConfig
) -> dict[str, FoldedLayer]:
    """Put a folded layer in the place of each attention that vLLM made in this process, under its
    name."""
    known = vllm_config.compilation_config.static_forward_context
    attention = family_of(stored.config).attention_name
    pattern = re.compile(rf"\.layers\.\d+\.{attention}$")
    found = [name for name, _ in model.named_modules() if pattern.search(name)]
    table = rotary_table(stored.config, torch.get_default_device())
    layers = {}
    for name in found:
        parent, _, own = name.rpartition(".")
        cached = f"{name}.attn"
        del known[cached]
        layer = FoldedLayer(stored, extract_layer_index(name), table, cached, vllm_config)
        setattr(model.get_submodule(parent), own, layer)
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
