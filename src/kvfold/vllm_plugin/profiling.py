"""What attention needs beside the cache, allocated while vLLM measures a model's memory.

vLLM then calls the model without metadata, before there are blocks. One layer of each kind attends
in the largest steps that there can be. What they allocate follows from the lengths that the host
knows, so the host is told the longest ones, and the device short ones: that takes milliseconds. All
block tables point to one block.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from kvfold.attention.fallback import Fallback
from kvfold.ops.common.plan import cdiv
from kvfold.vllm_plugin.backend import CachedImpl, KVFoldMetadata, attention_over, cached_impls
from kvfold.vllm_plugin.blocks import BlockAttention, Step

MEASURED = ("cuda", "xpu")  # devices whose memory vLLM measures
logger = logging.getLogger("vllm.kvfold")  # which vLLM's handlers print


def profile_memory(vllm_config: VllmConfig) -> None:
    """Let a model's layers attend while vLLM measures memory."""
    profile = MemoryProfile(vllm_config)
    for impl in cached_impls(vllm_config):
        impl.profile = profile


class MemoryProfile:
    """Of one model. waiting: layers that are still to attend, and how; held: what a step's layers
    share, which is there until its last one has attended."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.config = vllm_config
        self.waiting: dict[CachedImpl, BlockAttention] | None = None
        self.held: list[KVFoldMetadata] = []

    def steps(
        self, impl: CachedImpl, tokens: int, device: torch.device
    ) -> Iterator[tuple[Tensor, KVFoldMetadata]]:
        """Steps of at most so many tokens that a layer shall attend in, each with blocks uint8
        [2, bytes]. Nothing for layers like others before them, and none a second time."""
        if device.type not in MEASURED:
            return
        if self.waiting is None:
            self.waiting = self._one_of_each(device)
        attention = self.waiting.pop(impl, None)
        if attention is None:
            return
        page = attention.view.layout.page
        size = impl.stored.block_bytes(impl.maps.index, page)
        blocks = torch.zeros(2, size, dtype=torch.uint8, device=device)
        for decodes in sorted({0, self._decodes(impl, attention, tokens)}):
            step = self._step(tokens, decodes, page, device)
            metadata = KVFoldMetadata(tokens, step, attention)
            yield blocks, metadata
        self.held.append(metadata)
        if not self.waiting:
            self.held.clear()

    def _one_of_each(self, device: torch.device) -> dict[CachedImpl, BlockAttention]:
        """The layer with the widest entries of all that share a builder of metadata, the same in
        all processes."""
        block, kinds = self.config.cache_config.block_size, defaultdict(list)
        for impl in cached_impls(self.config):
            if not impl.reads_only:
                size = impl.stored.block_bytes(impl.maps.index, block)
                kinds[id(impl.stored), size, impl.maps.window].append(impl)
        found = {}
        for impls in kinds.values():
            widest = max(impls, key=lambda x: x.stored.spec.layers[x.maps.index].row_width)
            attention = attention_over(impls, block, self.config, device)
            if device.type != "cpu" and attention.prefill[widest.maps.index] is Fallback:
                logger.warning(
                    "kvfold: plain PyTorch attends to prompts in layer %d, and what it needs for"
                    " long ones is not part of the memory that vLLM measures: lower"
                    " --gpu-memory-utilization, or serve the model with --dtype bfloat16",
                    widest.maps.index,
                )
            else:
                found[widest] = attention
        return found

    def _decodes(self, impl: CachedImpl, attention: BlockAttention, tokens: int) -> int:
        """Requests that decode in the largest step. None where plain PyTorch decodes on a GPU: it
        needs as much as the entries of all of them, decoded."""
        if attention.view.device.type != "cpu" and attention.decode[impl.maps.index] is Fallback:
            return 0
        return min(self.config.scheduler_config.max_num_seqs, tokens - 1)

    def _step(self, tokens: int, decodes: int, page: int, device: torch.device) -> Step:
        """So many requests that decode, and chunks of prompts: all as long as a request can be, and
        those that decode as they fit the device's memory together."""
        longest = self.config.model_config.max_model_len
        chunks = [min(longest, tokens - x) for x in range(decodes, tokens, longest)]
        counts = [1] * decodes + chunks
        stored = min(longest, max(1, self._most_cached() // max(1, decodes)))
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        table = torch.ones(1, cdiv(longest, page), dtype=torch.int32, device=device)
        return Step(
            tables=table.expand(len(counts), -1),
            lengths=torch.tensor(counts, dtype=torch.int32, device=device),
            slots=page + torch.arange(tokens, device=device) % page,
            decodes=decodes,
            starts=starts,
            most=[stored] * decodes + [longest] * len(chunks),
        )

    def _most_cached(self) -> int:
        """Tokens whose entries fit the whole device, those within windows not counted."""
        block = self.config.cache_config.block_size
        impls = [x for x in cached_impls(self.config) if not x.reads_only]
        whole = [x for x in impls if x.maps.window is None] or impls
        size = sum(x.stored.block_bytes(x.maps.index, block) for x in whole)
        return current_platform.get_device_total_memory() * block // size
