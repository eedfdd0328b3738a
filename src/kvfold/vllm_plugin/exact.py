"""Blocks of exact tokens in vLLM: a window of a model with maps or few bits.

vLLM gets two cache-only layers in place of the model's attention layers. One has a block of
compressed entries of all layers, the other, with a sliding window, a block of their exact keys and
values. Both blocks have the same bytes, so that vLLM takes them from one pool. It frees exact
blocks that leave the window, and finds a cached prefix only where the window before its end is
cached too. The model's attention layers share the blocks of entries, in vLLM's words.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from kvfold.ops.common.plan import cdiv
from kvfold.vllm_plugin.backend import (
    ExactBlocks,
    KVFoldBackend,
    KVFoldBuilder,
    KVFoldMetadata,
    block_step,
)
from kvfold.vllm_plugin.layer import opaque_fields
from kvfold.vllm_plugin.log import logger
from kvfold.vllm_plugin.model_cache import EXACT_BLOCK, ModelCache

# Names of the cache-only layers. vLLM orders caches by the number in their layers' names.
ENTRIES, EXACT = "kvfold.0.entries", "kvfold.0.exact"


class ExactBuilder(KVFoldBuilder):
    """Builds the metadata of exact blocks: their tables, and where a step's tokens are stored."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        super(KVFoldBuilder, self).__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> Any:
        return cls._cudagraph_support  # the builder of entries decides

    def _build(
        self, metadata: CommonAttentionMetadata, max_lengths: list[int] | None
    ) -> KVFoldMetadata:
        step = block_step(metadata, num_decodes=0, starts=(), max_lengths=None)
        return KVFoldMetadata(metadata.num_actual_tokens, step)


class ExactBackend(KVFoldBackend):
    @staticmethod
    def get_builder_cls() -> type[KVFoldBuilder]:
        return ExactBuilder


class CacheLayer(AttentionLayerBase):
    """A layer with cache blocks that other layers use. num_heads: query heads of those."""

    def __init__(
        self, backend: type[KVFoldBackend], num_heads: int, model_cache: ModelCache, window: int
    ) -> None:
        self.backend, self.num_heads = backend, num_heads
        self.model_cache, self.window = model_cache, window
        self.tokens = self.entries_block = 0  # of the longest request, and of a block of entries
        self._kv_cache = torch.tensor([])

    @property
    def kv_cache(self) -> Tensor:
        """Set by vLLM."""
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, blocks: Tensor) -> None:
        self._kv_cache = blocks
        if self.window and blocks.numel():
            self._log_capacity(len(blocks))

    def _log_capacity(self, blocks: int) -> None:
        entries, exact = cdiv(self.tokens, self.entries_block), cdiv(self.window, EXACT_BLOCK) + 1
        requests = blocks / (entries + exact)
        logger.info(
            "kvfold: window=%d: a request of %d tokens takes %d blocks for its entries (%d tokens"
            " each) and %d for its exact tokens (%d each). The cache holds %.1f of them, or %d"
            " tokens. vLLM's own figure is lower: it adds the exact tokens of a prompt's whole"
            " chunk to each request.",
            self.window, self.tokens, entries, self.entries_block, exact, EXACT_BLOCK, requests,
            requests * self.tokens,
        )  # fmt: skip

    def get_attn_backend(self) -> type[KVFoldBackend]:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Opaque bytes per token. window: tokens after which they are freed; 0: never."""
        cache = self.model_cache
        self.tokens = vllm_config.model_config.max_model_len
        self.entries_block = entries_block = cache.block_size(vllm_config.cache_config.block_size)
        block_size = EXACT_BLOCK if self.window else entries_block
        fields = opaque_fields(block_size, cache.shared_block_bytes(entries_block))
        if self.window:
            # With a window of 1, vLLM caches none of its blocks, and then finds no prefix.
            return SlidingWindowSpec(sliding_window=max(2, self.window), **fields)
        return FullAttentionSpec(**fields)


def check_window(window: int, layers: Iterable[Attention], vllm_config: VllmConfig) -> None:
    """Raises ValueError for a model or a setting of vLLM that cannot have an exact window."""
    config, parallel = vllm_config, vllm_config.parallel_config
    speculative, transfer = config.speculative_config, config.kv_transfer_config
    layers, method = list(layers), getattr(speculative, "method", None)
    problem = None
    if transfer is not None and transfer.kv_connector is not None:
        problem = f"KV connector {transfer.kv_connector} does not move exact tokens"
    elif config.scheduler_config.disable_hybrid_kv_cache_manager:
        problem = "--disable-hybrid-kv-cache-manager would keep all tokens exactly"
    elif parallel.pipeline_parallel_size > 1:
        problem = "it was not tried with pipeline parallelism"
    elif getattr(parallel, "enable_dbo", False):
        problem = "it does not work with --enable-dbo"
    elif config.model_config.is_hybrid:
        problem = "this model has recurrent states beside attention"
    elif method not in (None, "ngram"):
        problem = f"speculative decoding by {method!r} has a KV cache of its own"
    elif getattr(config.cache_config, "kv_sharing_fast_prefill", False):
        problem = "it does not work with --kv-sharing-fast-prefill"
    elif any(x.sliding_window is not None for x in layers):
        problem = "this model has layers with a sliding window, which exact windows do not support"
    elif any(getattr(x.impl, "logits_soft_cap", None) for x in layers):
        problem = "this model has layers with capped scores, which exact windows do not support"
    elif any(x.kv_sharing_target_layer_name is not None for x in layers):
        problem = "this model has layers that read the keys and values of others"
    if problem is not None:
        raise ValueError(
            f"kvfold's plugin for vLLM: window={window}: {problem}: leave one of them out, or use"
            " kvfold.LLM"
        )


def share_blocks(
    layers: dict[str, Attention], model_cache: ModelCache, vllm_config: VllmConfig
) -> None:
    """Give all attention layers of a model the blocks of two cache-only layers.

    Raises ValueError for layers that store keys and values in another way.
    """
    known = vllm_config.compilation_config.static_forward_context
    others = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    if other := sorted(set(others) - set(layers)):
        raise ValueError(
            f"kvfold's plugin for vLLM: window={model_cache.cache.window}: {other[0]} has a KV"
            " cache of its own, and with an exact window all layers must share blocks: leave"
            " `window` out"
        )
    first, window = next(iter(layers.values())), model_cache.cache.window
    known[ENTRIES] = CacheLayer(first.attn_backend, first.num_heads, model_cache, 0)
    known[EXACT] = CacheLayer(ExactBackend, first.num_heads, model_cache, window)
    for layer in layers.values():
        layer.kv_sharing_target_layer_name = ENTRIES


def exact_blocks() -> ExactBlocks:
    """Those of the current step."""
    context = get_forward_context()
    metadata: Any = context.attn_metadata
    if isinstance(metadata, list):  # of several micro-batches; kvfold allows one
        metadata = metadata[0]
    cache: Tensor = context.no_compile_layers[EXACT].kv_cache
    return ExactBlocks(metadata[EXACT].step, cache)
