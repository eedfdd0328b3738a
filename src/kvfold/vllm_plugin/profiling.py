"""Allocate attention's working memory while vLLM measures a model's memory.

vLLM then calls the model without metadata, before there are blocks. One layer of each kind runs the
largest possible steps. Working memory depends on the lengths that the host knows, so the host gets
the largest ones, and the device short ones, which takes only milliseconds. All block tables point
to one block.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from kvfold.attention.fallback import Fallback
from kvfold.ops.common.plan import cdiv
from kvfold.vllm_plugin.backend import (
    CachedImpl,
    ExactBlocks,
    KVFoldMetadata,
    cached_impls,
    make_block_attention,
)
from kvfold.vllm_plugin.blocks import MAX_PROMPT_TOKENS, BlockAttention, BlockStep
from kvfold.vllm_plugin.log import logger
from kvfold.vllm_plugin.model_cache import EXACT_BLOCK
from kvfold.vllm_plugin.trial import compile_kernels

MEASURED = ("cuda", "xpu")  # devices whose memory vLLM measures


def profile_memory(vllm_config: VllmConfig) -> None:
    """Let a model's attention layers allocate their working memory while vLLM measures memory."""
    profile = MemoryProfile(vllm_config)
    for impl in cached_impls(vllm_config):
        impl.profile = profile


class MemoryProfile:
    """The profiling steps of one model.

    pending: layers that are still to run, with their attention; None: not begun.
    held_metadata: of the layers that have run. In a real step it exists until the last layer has
        run, so it is held as long here.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.config = vllm_config
        self.pending: dict[CachedImpl, BlockAttention] | None = None
        self.held_metadata: list[KVFoldMetadata] = []

    def steps(
        self, impl: CachedImpl, tokens: int, device: torch.device
    ) -> Iterator[tuple[Tensor, KVFoldMetadata]]:
        """The profiling steps of a layer, of `tokens` tokens at most: (blocks uint8 [2, bytes],
        metadata).

        Empty for all layers of a kind but one, and after the first call.
        """
        if device.type not in MEASURED:
            return
        if self.pending is None:
            self.pending = self._one_per_kind(device)
        attention = self.pending.pop(impl, None)
        if attention is None:
            return
        page, has_window = attention.view.layout.page, attention.window is not None
        size = impl.model_cache.block_bytes(impl.maps.index, page)
        if has_window:
            size = impl.model_cache.shared_block_bytes(page)
        blocks = torch.zeros(2, size, dtype=torch.uint8, device=device)
        num_decodes = self._num_decodes(impl, attention, tokens)
        for decodes, chunks in sorted({(0, 1), (num_decodes, 1), (num_decodes, self._chunks())}):
            step = self._step(tokens, decodes, chunks, page, device)
            exact = self._exact_blocks(step, blocks) if has_window else None
            metadata = KVFoldMetadata(tokens, step, attention, exact=exact)
            yield blocks, metadata
        self.held_metadata.append(metadata)
        if not self.pending:
            self.held_metadata.clear()

    def _exact_blocks(self, step: BlockStep, blocks: Tensor) -> ExactBlocks:
        """Blocks of exact tokens for a step: of its blocks of entries, whose bytes do not count."""
        columns = cdiv(self.config.model_config.max_model_len, EXACT_BLOCK)
        tables = step.tables[:, :1].expand(-1, columns)
        slots = EXACT_BLOCK + torch.arange(len(step.slots), device=blocks.device) % EXACT_BLOCK
        return ExactBlocks(replace(step, tables=tables, slots=slots), blocks)

    def _one_per_kind(self, device: torch.device) -> dict[CachedImpl, BlockAttention]:
        """The layer with the widest entries of all that share a metadata builder; the same in all
        processes."""
        kinds = defaultdict(list)
        for impl in cached_impls(self.config):
            if not impl.reads_only:
                block_size = impl.model_cache.block_size(self.config.cache_config.block_size)
                size = impl.model_cache.block_bytes(impl.maps.index, block_size)
                kinds[id(impl.model_cache), size, impl.maps.window].append(impl)
        layers = {}
        for impls in kinds.values():
            widest = max(impls, key=lambda x: x.model_cache.spec.layers[x.maps.index].row_width)
            block_size = widest.model_cache.block_size(self.config.cache_config.block_size)
            attention = make_block_attention(impls, block_size, self.config, device)
            if device.type == "cuda":
                compile_kernels(attention, impls, self.config.scheduler_config.max_num_seqs)
            if device.type != "cpu" and attention.prefill.kinds[widest.maps.index] is Fallback:
                logger.warning(
                    "kvfold: plain PyTorch attends to prompts in layer %d, and what it needs for"
                    " long ones is not part of the memory that vLLM measures: lower"
                    " --gpu-memory-utilization, or serve the model with --dtype bfloat16",
                    widest.maps.index,
                )
            else:
                layers[widest] = attention
        return layers

    def _num_decodes(self, impl: CachedImpl, attention: BlockAttention, tokens: int) -> int:
        """Decoding requests of the largest step. 0 if plain PyTorch decodes on a GPU, because it
        needs as much memory as the decoded entries of all of them."""
        decoder = attention.decode.kinds[impl.maps.index]
        if attention.view.device.type != "cpu" and decoder is Fallback:
            return 0
        return min(self.config.scheduler_config.max_num_seqs, tokens - 1)

    def _chunks(self) -> int:
        """Prompts of the maximum length in the largest step whose launches are recorded. Until it
        ends, a recording keeps what it has gathered of all of them."""
        longest = MAX_PROMPT_TOKENS // self.config.model_config.max_model_len
        return max(1, min(longest, self.config.scheduler_config.max_num_seqs))

    def _step(
        self, tokens: int, num_decodes: int, least_chunks: int, page: int, device: torch.device
    ) -> BlockStep:
        """A step of decoding requests and prefill chunks. Chunks are of requests of the maximum
        length; the decoding requests are as long as fit the device's memory together."""
        longest = self.config.model_config.max_model_len
        most = min(longest, cdiv(tokens - num_decodes, least_chunks))
        chunks = [min(most, tokens - x) for x in range(num_decodes, tokens, most)]
        counts = [1] * num_decodes + chunks
        cached = min(longest, max(1, self._max_cached_tokens() // max(1, num_decodes)))
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        table = torch.ones(1, cdiv(longest, page), dtype=torch.int32, device=device)
        return BlockStep(
            tables=table.expand(len(counts), -1),
            lengths=torch.tensor(counts, dtype=torch.int32, device=device),
            slots=page + torch.arange(tokens, device=device) % page,
            num_decodes=num_decodes,
            starts=starts,
            max_lengths=[cached] * num_decodes + [longest] * len(chunks),
        )

    def _max_cached_tokens(self) -> int:
        """Tokens whose entries fit in the device's memory, not counting layers with a window."""
        block_size = self.config.cache_config.block_size
        impls = [x for x in cached_impls(self.config) if not x.reads_only]
        whole = [x for x in impls if x.maps.window is None] or impls
        size = sum(x.model_cache.block_bytes(x.maps.index, block_size) for x in whole)
        return current_platform.get_device_total_memory() * block_size // size
