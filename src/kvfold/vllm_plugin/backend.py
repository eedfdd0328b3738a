"""Attention under vLLM: its metadata to steps over blocks, and nothing else."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec

from kvfold.attention.base import LayerAttention
from kvfold.vllm_plugin.blocks import BlockAttention, BlockContext, BlockView, Step, choose
from kvfold.vllm_plugin.layer import CachedAttention
from kvfold.vllm_plugin.model_cache import StoredCache
from kvfold.vllm_plugin.trial import check_attention

if TYPE_CHECKING:
    from kvfold.vllm_plugin.profiling import MemoryProfile

SMALLEST = 16  # tokens of a block, of which every part is then aligned
PREFERRED = 32
SIZE = 0.25  # of hidden states, as weights of norms in front of attention have it or exceed it


class KVFoldBackend(AttentionBackend):
    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "KVFOLD"

    @staticmethod
    def get_impl_cls() -> "type[KVFoldImpl]":
        return KVFoldImpl

    @staticmethod
    def get_builder_cls() -> "type[KVFoldBuilder]":
        return KVFoldBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any, **__: Any
    ) -> tuple[int, ...]:
        """Of a layer's bytes, which vLLM before 0.28 asks for."""
        return num_blocks, block_size * num_kv_heads * head_size

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(SMALLEST)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return max(default_block_size, PREFERRED)


@dataclass
class KVFoldMetadata:
    """A step; context: made when its first layer asks, so that a graph holds what it computes."""

    num_tokens: int
    step: Step
    attention: BlockAttention
    context: BlockContext | None = None

    def begin(self) -> BlockContext:
        if self.context is None:
            self.context = self.attention.begin(self.step)
        return self.context


class KVFoldBuilder(AttentionMetadataBuilder[KVFoldMetadata]):
    """Of layers with blocks alike. Graphs hold steps in which every request decodes one token."""

    _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        impls = cached_impls(vllm_config, layer_names)
        self.attention = attention_over(
            impls, kv_cache_spec.block_size, vllm_config, torch.device(device)
        )
        if self.attention.view.device.type == "cuda":
            self.attention.warm_up(vllm_config.scheduler_config.max_num_seqs)
        check_attention(self.attention, [x for x in impls if not x.reads_only])

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        """Graphs only where kernels decode all layers."""
        for impl in cached_impls(vllm_config):
            layout = impl.stored.layout(kv_cache_spec.block_size)
            device_type = vllm_config.device_config.device_type
            found = choose([impl.maps], layout, device_type, impl.stored.dtype, decode=True)
            if not all(backend.supports_graphs for backend in found.values()):
                return AttentionCGSupport.NEVER
        return cls._cudagraph_support

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> KVFoldMetadata:
        found = common_attn_metadata
        most = found.seq_lens_cpu_upper_bound
        return self._build(found, None if most is None else most[: found.num_reqs].tolist())

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> KVFoldMetadata:
        return self._build(common_attn_metadata, None)

    def _build(self, found: CommonAttentionMetadata, most: list[int] | None) -> KVFoldMetadata:
        decodes, _, _, _ = split_decodes_and_prefills(found, decode_threshold=1)
        requests = found.num_reqs
        step = Step(
            tables=found.block_table_tensor[:requests],
            lengths=found.seq_lens[:requests],
            slots=found.slot_mapping[: found.num_actual_tokens],
            decodes=decodes,
            starts=found.query_start_loc_cpu[: requests + 1].tolist(),
            most=most,
        )
        return KVFoldMetadata(found.num_actual_tokens, step, self.attention)


class CachedImpl(AttentionImpl[KVFoldMetadata]):
    """Attention of one layer over a cache of kvfold's. maps: the layer as attention sees it;
    reads_only: whether another layer stores its keys and values; profile: of the model's memory."""

    stored: StoredCache
    maps: LayerAttention
    reads_only = False
    profile: "MemoryProfile | None" = None
    kv_cache_dtype = "auto"

    @abstractmethod
    def sample(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [Hq, N, .] in score space and cache entries [N, R] of some tokens at positions
        int64 [N], as large as the model's own are."""

    def finish(self, out: Tensor) -> Tensor:
        """What a model goes on with, of what attention gives [N, W]."""
        return out

    def profiled(
        self, output: Tensor, kv_cache: Tensor
    ) -> "Iterable[tuple[Tensor, KVFoldMetadata]]":
        """Blocks and steps to attend in where vLLM gives no metadata: some while it measures
        memory, none once there is a cache. output [N, ..]: of the step's tokens."""
        if self.profile is None or kv_cache.numel():
            return ()
        return self.profile.steps(self, len(output), output.device)


def attention_over(
    impls: Sequence[CachedImpl], block: int, vllm_config: VllmConfig, device: torch.device
) -> BlockAttention:
    """Of layers of one cache, over blocks of so many tokens."""
    stored = impls[0].stored
    longest = vllm_config.model_config.max_model_len
    view = BlockView(stored.layout(block), stored.dtype, device, longest)
    return BlockAttention([x.maps for x in impls if not x.reads_only], view)


def cached_impls(vllm_config: VllmConfig, names: list[str] | None = None) -> list[CachedImpl]:
    """Of the layers by these names, or of all, in order."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, names)
    impls = [getattr(layer, "impl", None) for layer in layers.values()]
    return [impl for impl in impls if isinstance(impl, CachedImpl)]


class KVFoldImpl(CachedImpl):
    """Of a folded layer, whose q [Hq, N, .] and rows [N, R] vLLM's operation passes on as they
    are."""

    def __init__(self, layer: CachedAttention) -> None:
        self.stored, self.maps, self.folded = layer.stored, layer.maps, layer.folded
        self.num_heads, self.head_size = (
            layer.maps.geometry.num_query_heads,
            layer.maps.geometry.head_dim,
        )
        self.num_kv_heads, self.scale = layer.maps.geometry.num_kv_heads, layer.maps.scale

    def sample(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """By the layer's own projections of random hidden states, as a norm gives them."""
        folded = self.folded[0]
        make = torch.Generator().manual_seed(0)
        x = torch.randn(1, len(positions), folded.geometry.hidden_size, generator=make)
        x = (SIZE * x).to(positions.device, self.stored.dtype)
        rotary = folded.rotary
        tables = (
            None if rotary is None else rotary.tables(x, positions[None], int(positions.max()) + 1)
        )
        q, rows = folded.project(x, tables)
        return q[0], rows[0]

    def finish(self, out: Tensor) -> Tensor:
        found: Tensor = self.folded[0].o_proj(out)
        return found

    def forward(
        self,
        layer: CachedAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: KVFoldMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:
            for blocks, metadata in self.profiled(output, kv_cache):
                self.forward(layer, query, key, value, blocks, metadata, output)
            return output.zero_()
        tokens, context = attn_metadata.num_tokens, attn_metadata.begin()
        context.attend(layer.maps, kv_cache, query[:, :tokens], key[:tokens], output)
        return output
