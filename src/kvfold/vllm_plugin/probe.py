"""Record the inputs of attention layers for a few tokens, before a vLLM model has a cache.

Shapes: N tokens; Hq / Hk query / KV heads of this process, d, dv head dims of keys and values.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention

from kvfold.maps.layers import TOKENS
from kvfold.models.finite import probe_ids


class AttentionInputs(NamedTuple):
    """Inputs of one attention layer for a few tokens, heads of this process: query [N, Hq, d], key
    [N, Hk, d], value [N, Hk, dv]."""

    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def random(cls, layer: Attention, device: torch.device) -> "AttentionInputs":
        """Random inputs, for layers that cannot be probed."""
        generator = torch.Generator(device).manual_seed(0)
        shapes = (
            (layer.num_heads, layer.head_size),
            (layer.num_kv_heads, layer.head_size),
            (layer.num_kv_heads, layer.head_size_v),
        )
        return cls(
            *(
                torch.randn(TOKENS, *x, generator=generator, device=device).to(layer.dtype)
                for x in shapes
            )
        )

    def all_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """Keys [heads, N, d] and values [heads, N, dv] of the KV heads of all processes.
        Collective."""
        size = get_tensor_model_parallel_world_size()
        step = max(1, size // heads)  # number of processes that have the same head
        key, value = self.key, self.value
        if size > 1:
            key, value = (tensor_model_parallel_all_gather(x, 1)[:, ::step] for x in (key, value))
        return key.transpose(0, 1), value.transpose(0, 1)


class Recorder:
    """Stands in for an attention implementation: records its inputs and returns zeros."""

    inputs: AttentionInputs

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        output: Tensor,
        **__: Any,
    ) -> Tensor:
        if key is None:  # the layer reads the keys and values of another one
            key = value = query[:, :0]
        self.inputs = AttentionInputs(query.clone(), key.clone(), value.clone())
        return output.zero_()


@torch.inference_mode()
def record_inputs(
    model: nn.Module, vllm_config: VllmConfig, layers: Mapping[int, Attention], positions: Tensor
) -> dict[int, AttentionInputs]:
    """The inputs of `layers` for the tokens `probe_ids`, by layer number. All attention outputs are
    zero.

    positions int64 [N]: of the tokens. Like `maps.layers.attention_layers` for transformers models.
    If the model cannot be probed (`can_probe`), the inputs are random.
    """
    model_config, device = vllm_config.model_config, layer_device()
    if not can_probe(vllm_config):
        return {number: AttentionInputs.random(layer, device) for number, layer in layers.items()}
    ids = torch.tensor(probe_ids(model_config.get_vocab_size(), len(positions)), device=device)
    positions = positions.to(device)
    if model_config.uses_mrope:
        positions = positions.expand(3, -1)
    original_impls = {number: layer.impl for number, layer in layers.items()}
    recorders = {number: Recorder() for number in layers}
    try:
        for number, layer in layers.items():
            layer.impl = recorders[number]
        with set_forward_context(None, vllm_config, num_tokens=len(ids), skip_compiled=True):
            model(input_ids=ids, positions=positions)
    finally:
        for number, layer in layers.items():
            layer.impl = original_impls[number]
    return {number: recorder.inputs for number, recorder in recorders.items()}


def can_probe(vllm_config: VllmConfig) -> bool:
    """Whether the model can run before it has a cache. Not with recurrent layers or pipeline
    parallelism."""
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    return num_stages == 1 and not vllm_config.model_config.is_hybrid


def layer_device() -> torch.device:
    from vllm.platforms import current_platform

    return torch.device(current_platform.device_type)
