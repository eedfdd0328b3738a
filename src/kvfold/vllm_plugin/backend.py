"""kvfold's attention backend for vLLM: turns vLLM's metadata into steps of `BlockAttention`."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
from kvfold.attention.window import ExactTokens
from kvfold.vllm_plugin.block_window import decoders_of
from kvfold.vllm_plugin.blocks import BlockAttention, BlockContext, BlockStep, BlockView
from kvfold.vllm_plugin.layer import CachedAttention
from kvfold.vllm_plugin.model_cache import ModelCache
from kvfold.vllm_plugin.trial import check_attention

if TYPE_CHECKING:
    from kvfold.vllm_plugin.profiling import MemoryProfile

MIN_BLOCK_SIZE = 16  # tokens; with a multiple of it every part of a block is aligned
PREFERRED_BLOCK_SIZE = 32
# Scale of random hidden states. Weights of the norms before attention are about it, or larger.
HIDDEN_SCALE = 0.25


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
        """Shape of a layer's cache in bytes; used by vLLM before 0.28."""
        return num_blocks, block_size * num_kv_heads * head_size

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(MIN_BLOCK_SIZE)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return max(default_block_size, PREFERRED_BLOCK_SIZE)


@dataclass(frozen=True, eq=False)
class ExactBlocks:
    """Blocks of exact tokens in a step: tables and slots, and the blocks of all layers."""

    step: BlockStep
    cache: Tensor


@dataclass
class KVFoldMetadata:
    """Metadata of a step. context: created by the step's first layer, so that a CUDA graph captures
    what it computes. attention: None if layers attend with other metadata of the same step.
    exact: blocks of exact tokens, if there is a window."""

    num_tokens: int
    step: BlockStep
    attention: BlockAttention | None = None
    context: BlockContext | None = None
    exact: ExactBlocks | None = None

    def begin(self, exact: Callable[[], ExactBlocks] | None = None) -> BlockContext:
        """The step's context, created at the first call. exact: returns the step's exact blocks,
        if there is a window."""
        assert self.attention is not None
        if self.context is None:
            step = self.step
            if exact is not None:
                self.exact = self.exact or exact()
                step = replace(step, exact=self.exact.step)
            self.context = self.attention.begin(step)
        return self.context


class KVFoldBuilder(AttentionMetadataBuilder[KVFoldMetadata]):
    """Builds the metadata of layers with the same block layout. CUDA graphs are used for steps in
    which every request decodes one token."""

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
        self.attention = make_block_attention(
            impls, kv_cache_spec.block_size, vllm_config, torch.device(device)
        )
        if self.attention.view.device.type == "cuda":
            self.attention.warm_up(vllm_config.scheduler_config.max_num_seqs)
        check_attention(self.attention, [x for x in impls if not x.reads_only])

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        """CUDA graphs are supported only if kernels decode all layers."""
        for impl in cached_impls(vllm_config):
            layout = impl.model_cache.layout(kv_cache_spec.block_size)
            device_type = vllm_config.device_config.device_type
            chosen = decoders_of(impl.maps, layout, device_type, impl.model_cache.dtype)
            if not all(backend.supports_graphs for backend in chosen):
                return AttentionCGSupport.NEVER
        return cls._cudagraph_support

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> KVFoldMetadata:
        metadata = common_attn_metadata
        bounds = metadata.seq_lens_cpu_upper_bound
        return self._build(
            metadata, None if bounds is None else bounds[: metadata.num_reqs].tolist()
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> KVFoldMetadata:
        return self._build(common_attn_metadata, None)

    def _build(
        self, metadata: CommonAttentionMetadata, max_lengths: list[int] | None
    ) -> KVFoldMetadata:
        num_decodes, _, _, _ = split_decodes_and_prefills(metadata, decode_threshold=1)
        starts = metadata.query_start_loc_cpu[: metadata.num_reqs + 1].tolist()
        step = block_step(metadata, num_decodes, starts, max_lengths)
        return KVFoldMetadata(metadata.num_actual_tokens, step, self.attention)


def block_step(
    metadata: CommonAttentionMetadata,
    num_decodes: int,
    starts: Sequence[int],
    max_lengths: Sequence[int] | None,
) -> BlockStep:
    """A step with vLLM's tables, lengths and slots."""
    num_requests = metadata.num_reqs
    return BlockStep(
        tables=metadata.block_table_tensor[:num_requests],
        lengths=metadata.seq_lens[:num_requests],
        slots=metadata.slot_mapping[: metadata.num_actual_tokens],
        num_decodes=num_decodes,
        starts=starts,
        max_lengths=max_lengths,
    )


class CachedImpl(AttentionImpl[KVFoldMetadata]):
    """Base of kvfold's attention implementations: one layer over a compressed cache.

    model_cache: the model's cache.
    maps: the layer's description for attention backends.
    reads_only: whether another layer stores its keys and values.
    profile: of the model's memory, while vLLM measures it.
    """

    model_cache: ModelCache
    maps: LayerAttention
    reads_only = False
    profile: "MemoryProfile | None" = None
    kv_cache_dtype = "auto"

    @abstractmethod
    def sample_inputs(self, positions: Tensor) -> tuple[Tensor, Tensor, ExactTokens | None]:
        """Inputs for a trial: queries [Hq, N, .] in score space, cache entries [N, R] and, with a
        window, exact tokens, of N tokens at positions int64 [N], with magnitudes like the
        model's."""

    def project_output(self, out: Tensor) -> Tensor:
        """What the model continues with: a function of the attention output [N, W]."""
        return out

    def profiling_steps(
        self, output: Tensor, kv_cache: Tensor
    ) -> "Iterable[tuple[Tensor, KVFoldMetadata]]":
        """(blocks, metadata) of steps to run when vLLM passes no metadata. It does so while it
        measures memory; once there is a cache, there are no such steps. output [N, ..]: of the
        step's tokens."""
        if self.profile is None or kv_cache.numel():
            return ()
        return self.profile.steps(self, len(output), output.device)


def make_block_attention(
    impls: Sequence[CachedImpl], block_size: int, vllm_config: VllmConfig, device: torch.device
) -> BlockAttention:
    """Attention of layers that share a cache. block_size: tokens of a block."""
    model_cache = impls[0].model_cache
    longest = vllm_config.model_config.max_model_len
    view = BlockView(model_cache.layout(block_size), model_cache.dtype, device, longest)
    return BlockAttention([x.maps for x in impls if not x.reads_only], view)


def cached_impls(vllm_config: VllmConfig, names: list[str] | None = None) -> list[CachedImpl]:
    """The implementations of the layers with these names (None: all layers), in order."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, names)
    impls = [getattr(layer, "impl", None) for layer in layers.values()]
    return [impl for impl in impls if isinstance(impl, CachedImpl)]


class KVFoldImpl(CachedImpl):
    """Attention of a folded layer. vLLM's attention operation passes its q [Hq, N, .] and entries
    [N, R] through unchanged."""

    def __init__(self, layer: CachedAttention) -> None:
        self.model_cache, self.maps, self.folded = layer.model_cache, layer.maps, layer.folded
        self.num_heads, self.head_size = (
            layer.maps.geometry.num_query_heads,
            layer.maps.geometry.head_dim,
        )
        self.num_kv_heads, self.scale = layer.maps.geometry.num_kv_heads, layer.maps.scale

    def sample_inputs(self, positions: Tensor) -> tuple[Tensor, Tensor, None]:
        """The layer's projections of random hidden states."""
        folded = self.folded[0]
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, len(positions), folded.geometry.hidden_size, generator=generator)
        x = (HIDDEN_SCALE * x).to(positions.device, self.model_cache.dtype)
        rotary = folded.rotary
        tables = (
            None if rotary is None else rotary.tables(x, positions[None], int(positions.max()) + 1)
        )
        q, entries = folded.project(x, tables)
        return q[0], entries[0], None

    def project_output(self, out: Tensor) -> Tensor:
        projected: Tensor = self.folded[0].o_proj(out)
        return projected

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
            for blocks, metadata in self.profiling_steps(output, kv_cache):
                self.forward(layer, query, key, value, blocks, metadata, output)
            return output.zero_()
        tokens, context = attn_metadata.num_tokens, attn_metadata.begin()
        context.attend(layer.maps, kv_cache, query[:, :tokens], key[:tokens], output)
        return output
