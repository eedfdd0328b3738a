"""What attention layers of a vLLM model are asked of a few tokens, before it has a cache.

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


class Seen(NamedTuple):
    """What a layer's attention is asked of a few tokens, by the heads of this process: query
    [N, Hq, d], key [N, Hk, d], value [N, Hk, dv]."""

    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def random(cls, layer: Attention, device: torch.device) -> "Seen":
        make = torch.Generator(device).manual_seed(0)
        shapes = (
            (layer.num_heads, layer.head_size),
            (layer.num_kv_heads, layer.head_size),
            (layer.num_kv_heads, layer.head_size_v),
        )
        return cls(
            *(
                torch.randn(TOKENS, *x, generator=make, device=device).to(layer.dtype)
                for x in shapes
            )
        )

    def of_all(self, heads: int) -> tuple[Tensor, Tensor]:
        """Keys [heads, N, d] and values [heads, N, dv] of all processes' KV heads."""
        size = get_tensor_model_parallel_world_size()
        every = max(1, size // heads)  # so many processes have the same head
        key, value = self.key, self.value
        if size > 1:
            key, value = (tensor_model_parallel_all_gather(x, 1)[:, ::every] for x in (key, value))
        return key.transpose(0, 1), value.transpose(0, 1)


class Recorder:
    """In the place of an attention's implementation: attention that gives nothing, and keeps what
    it was asked."""

    seen: Seen

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
        if key is None:  # another layer's
            key = value = query[:, :0]
        self.seen = Seen(query.clone(), key.clone(), value.clone())
        return output.zero_()


@torch.inference_mode()
def watch(
    model: nn.Module, vllm_config: VllmConfig, layers: Mapping[int, Attention], positions: Tensor
) -> dict[int, Seen]:
    """What layers by number are asked of the tokens `probe_ids`, where attention gives nothing in
    any layer, as `maps.layers.attention_layers` asks a model of transformers. positions
    int64 [N]: of the tokens. Random numbers stand for it where nothing can be asked."""
    model_config, device = vllm_config.model_config, layer_device()
    if not can_be_asked(vllm_config):
        return {number: Seen.random(layer, device) for number, layer in layers.items()}
    ids = torch.tensor(probe_ids(model_config.get_vocab_size(), len(positions)), device=device)
    positions = positions.to(device)
    if model_config.uses_mrope:
        positions = positions.expand(3, -1)
    stock = {number: layer.impl for number, layer in layers.items()}
    recorders = {number: Recorder() for number in layers}
    try:
        for number, layer in layers.items():
            layer.impl = recorders[number]
        with set_forward_context(None, vllm_config, num_tokens=len(ids), skip_compiled=True):
            model(input_ids=ids, positions=positions)
    finally:
        for number, layer in layers.items():
            layer.impl = stock[number]
    return {number: recorder.seen for number, recorder in recorders.items()}


def can_be_asked(vllm_config: VllmConfig) -> bool:
    """Whether a model can run before it has a cache: not one with recurrent layers, nor a part of
    one (pipeline parallelism)."""
    parts = vllm_config.parallel_config.pipeline_parallel_size
    return parts == 1 and not vllm_config.model_config.is_hybrid


def layer_device() -> torch.device:
    from vllm.platforms import current_platform

    return torch.device(current_platform.device_type)
