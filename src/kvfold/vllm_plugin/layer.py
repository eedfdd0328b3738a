"""A folded attention layer inside vLLM's models, and the cache that it requests from vLLM."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvfold.attention.base import LayerAttention
from kvfold.models.merged import MergedLinear
from kvfold.models.rotary import RotaryTable
from kvfold.vllm_plugin.model_cache import ModelCache
from kvfold.vllm_plugin.weights import empty_layer, fold_layer


class CachedAttention(nn.Module, AttentionLayerBase):
    """What vLLM sees of a folded layer's attention: its name, its cache and its backend.

    Shapes: N tokens of a step, Hq query heads, R numbers of a cache entry, W numbers of the output
    projection's input.
    """

    def __init__(self, model_cache: ModelCache, folded: Any, name: str, config: VllmConfig) -> None:
        from kvfold.vllm_plugin.backend import KVFoldBackend, KVFoldImpl

        super().__init__()
        self.model_cache, self.layer_name = model_cache, name
        self.folded = [folded]  # in a list, so that its parameters are not registered twice
        self.index, self.width = folded.layer_idx, folded.o_proj.in_features
        self.kv_cache = torch.tensor([])
        self.attn_backend, self.impl = KVFoldBackend, KVFoldImpl(self)
        self.num_heads = self.impl.num_heads
        config.compilation_config.static_forward_context[name] = self

    @property
    def maps(self) -> LayerAttention:
        maps: LayerAttention = self.folded[0].description
        return maps

    def get_attn_backend(self) -> type:
        return self.attn_backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        """A cache of opaque bytes per token."""
        return FullAttentionSpec(**slot_fields(self.model_cache, self.index, vllm_config))

    def forward(self, q: Tensor, entries: Tensor) -> Tensor:
        """q [Hq, N, .] and entries [N, R] -> [N, W]."""
        out = torch.empty(entries.shape[0], self.width, dtype=q.dtype, device=q.device)
        name = _encode_layer_name(self.layer_name)
        torch.ops.vllm.unified_attention_with_output(q, entries, entries, out, name)
        return out


def slot_fields(model_cache: ModelCache, index: int, vllm_config: VllmConfig) -> dict[str, Any]:
    """Fields of vLLM's cache spec of a layer."""
    block_size = vllm_config.cache_config.block_size
    return opaque_fields(block_size, model_cache.block_bytes(index, block_size))


def opaque_fields(block_size: int, block_bytes: int) -> dict[str, Any]:
    """Fields of vLLM's cache spec of blocks of `block_size` tokens: opaque bytes per token instead
    of heads."""
    return {
        "block_size": block_size,
        "num_kv_heads": 1,
        "head_size": block_bytes // block_size,
        "head_size_v": 0,
        "dtype": torch.int8,
    }


class MergedProduct(nn.Module):
    """Linear layers with the same input as one product. It shares their weights' memory."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        for name, x in MergedLinear.of(linears)._asdict().items():
            self.register_buffer(name, x, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., D] -> [.., sum of outputs]."""
        if x.is_cuda:  # for few tokens it uses kernels as fast as reading the weights
            out: Tensor = torch.ops.kvfold.linear(x, self.weight, self.bias)
            return out
        return F.linear(x, self.weight, self.bias)


class MergeAfterLoading(QuantizeMethodBase):
    """Merges a layer's products once its weights are loaded; vLLM calls it after every loader."""

    def create_weights(self, layer: nn.Module, *_: Any, **__: Any) -> None:
        raise NotImplementedError("a folded layer creates its own weights")

    def apply(self, layer: nn.Module, *_: Any, **__: Any) -> Tensor:
        raise NotImplementedError("a folded layer is called directly")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        assert isinstance(layer, FoldedLayer)
        layer.merge()


class FoldedLayer(nn.Module):
    """A folded attention layer, in place of the model's own one. table: the model's RoPE, or
    None."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        model_cache: ModelCache,
        index: int,
        table: RotaryTable | None,
        name: str,
        config: VllmConfig,
    ) -> None:
        super().__init__()
        self.model_cache, self.index = model_cache, index
        self.folded = empty_layer(model_cache.config, model_cache.local_spec, index)
        self.folded.rotary = table
        if table is not None:
            like = self.folded.o_proj.weight
            positions = torch.arange(config.model_config.max_model_len, device=like.device)
            cos, sin = table.tables(like, positions, len(positions))
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        self.attn = CachedAttention(model_cache, self.folded, name, config)
        self.quant_method = MergeAfterLoading()

    def forward(self, hidden_states: Tensor, positions: Tensor | None = None, **_: Any) -> Tensor:
        tables = None
        if positions is not None and self.folded.rotary is not None:
            tables = self.cos[positions][None], self.sin[positions][None]
        q, entries = self.folded.project(hidden_states[None], tables)
        out = self.folded.o_proj(self.attn(q[0], entries[0]))
        return tensor_model_parallel_all_reduce(out) if self.model_cache.share.size > 1 else out

    def merge(self) -> None:
        """Merge the projections of a token's hidden state into one product."""
        self.folded.merged = MergedProduct(self.folded.products)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load this process's slices of a checkpoint's tensors of this layer."""
        whole = fold_layer(self.model_cache, self.index, tensors)
        self.folded.load_state_dict(self.model_cache.share.local_tensors(whole, self.folded))
