"""A folded attention as a layer of vLLM's models, and its cache as vLLM asks for it."""

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
from kvfold.vllm_plugin.model_cache import StoredCache
from kvfold.vllm_plugin.weights import empty_layer, fold_layer


class CachedAttention(nn.Module, AttentionLayerBase):
    """What vLLM knows of a layer's attention: its name, its blocks, and who runs it.

    Shapes: N tokens of a step, Hq query heads, R numbers of a row, W numbers that W_O takes.
    """

    def __init__(self, stored: StoredCache, folded: Any, name: str, config: VllmConfig) -> None:
        from kvfold.vllm_plugin.backend import KVFoldBackend, KVFoldImpl

        super().__init__()
        self.stored, self.layer_name = stored, name
        self.folded = [folded]  # whose parameters are not counted twice
        self.index, self.width = folded.layer_idx, folded.o_proj.in_features
        self.kv_cache = torch.tensor([])
        self.attn_backend, self.impl = KVFoldBackend, KVFoldImpl(self)
        self.num_heads = self.impl.num_heads
        known = config.compilation_config.static_forward_context
        known[name] = self

    @property
    def maps(self) -> LayerAttention:
        maps: LayerAttention = self.folded[0].description
        return maps

    def get_attn_backend(self) -> type:
        return self.attn_backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        """A slot of bytes a token."""
        return FullAttentionSpec(**slot_of(self.stored, self.index, vllm_config))

    def forward(self, q: Tensor, rows: Tensor) -> Tensor:
        """q [Hq, N, .] and rows [N, R]: [N, W]."""
        out = torch.empty(rows.shape[0], self.width, dtype=q.dtype, device=q.device)
        name = _encode_layer_name(self.layer_name)
        torch.ops.vllm.unified_attention_with_output(q, rows, rows, out, name)
        return out


def slot_of(stored: StoredCache, index: int, vllm_config: VllmConfig) -> dict[str, Any]:
    """Fields of vLLM's cache spec of a layer: opaque bytes a token, in place of heads."""
    block = vllm_config.cache_config.block_size
    return {
        "block_size": block,
        "num_kv_heads": 1,
        "head_size": stored.block_bytes(index, block) // block,
        "head_size_v": 0,
        "dtype": torch.int8,
    }


class OneProduct(nn.Module):
    """Linear layers of the same inputs as one, over weights that are theirs."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        for name, x in MergedLinear.of(linears)._asdict().items():
            self.register_buffer(name, x, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., D] -> [.., sum of outputs]."""
        if x.is_cuda:  # few tokens by kernels whose time is that of reading the weights
            found: Tensor = torch.ops.kvfold.linear(x, self.weight, self.bias)
            return found
        return F.linear(x, self.weight, self.bias)


class Merging(QuantizeMethodBase):
    """vLLM calls it when a layer has its weights, whoever loaded them."""

    def create_weights(self, layer: nn.Module, *_: Any, **__: Any) -> None:
        raise NotImplementedError("a folded layer makes its own")

    def apply(self, layer: nn.Module, *_: Any, **__: Any) -> Tensor:
        raise NotImplementedError("a folded layer is called")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        assert isinstance(layer, FoldedLayer)
        layer.merge()


class FoldedLayer(nn.Module):
    """In place of a model's attention. table: the model's RoPE, or None."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        stored: StoredCache,
        index: int,
        table: RotaryTable | None,
        name: str,
        config: VllmConfig,
    ) -> None:
        super().__init__()
        self.stored, self.index = stored, index
        self.folded = empty_layer(stored.config, stored.own, index)
        self.folded.rotary = table
        if table is not None:
            like = self.folded.o_proj.weight
            positions = torch.arange(config.model_config.max_model_len, device=like.device)
            cos, sin = table.tables(like, positions, len(positions))
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        self.attn = CachedAttention(stored, self.folded, name, config)
        self.quant_method = Merging()

    def forward(self, hidden_states: Tensor, positions: Tensor | None = None, **_: Any) -> Tensor:
        tables = None
        if positions is not None and self.folded.rotary is not None:
            tables = self.cos[positions][None], self.sin[positions][None]
        q, rows = self.folded.project(hidden_states[None], tables)
        out = self.folded.o_proj(self.attn(q[0], rows[0]))
        return tensor_model_parallel_all_reduce(out) if self.stored.share.size > 1 else out

    def merge(self) -> None:
        """One product for all that a token's hidden state goes into."""
        self.folded.merged = OneProduct(self.folded.products)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take this process's share of a checkpoint's tensors of this layer."""
        whole = fold_layer(self.stored, self.index, tensors)
        self.folded.load_state_dict(self.stored.share.of_tensors(whole, self.folded))
