"""Which blocks of a step are restored from files and which are stored: the scheduler's half of the
disk connector. It imports neither torch nor vLLM.

bs is the number of tokens of a block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfold.vllm_plugin.block_files import BlockFiles, block_keys


@dataclass
class BlockTransfer:
    """Blocks of one request that move between files and the cache. keys[i] is the key of block
    block_ids[i]."""

    request_id: str
    keys: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


@dataclass
class CachedSequence:
    """A request that is served.

    keys: of its whole blocks, as far as its tokens are known.
    block_ids: of its blocks in the cache.
    num_stored: blocks that were stored or found in files.
    offered: first block and number of blocks that were last found in files for it.
    loading: blocks that are being restored.
    """

    request: Any
    keys: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_stored: int = 0
    offered: tuple[int, int] = (0, 0)
    loading: set[int] = field(default_factory=set)
    load_failed: bool = False


def cacheable(request: Any) -> bool:
    """Whether tokens alone decide a request's cache: no adapter, image or embedding does."""
    return (
        request.lora_request is None
        and not request.mm_features
        and getattr(request, "prompt_embeds", None) is None
    )


class DiskScheduler:
    """Plans loads and stores of whole blocks. files: of each process; empty: not connected yet."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.files: list[BlockFiles] = []
        self.sequences: dict[str, CachedSequence] = {}
        self.loads: list[BlockTransfer] = []

    def connect(self, folder: Path, num_bytes: Sequence[int]) -> None:
        """Begin to find blocks. num_bytes: of a block in each process."""
        self.files = [BlockFiles(folder, size, rank) for rank, size in enumerate(num_bytes)]

    def num_matched_tokens(self, request: Any, num_computed: int) -> int:
        """Tokens in whole blocks that follow the first `num_computed` ones and can be restored.
        At least the request's last token is left to compute."""
        if not self.files or not cacheable(request) or num_computed % self.block_size:
            return 0
        sequence = self._sequence(request)
        if sequence.load_failed:
            return 0
        self._extend_keys(sequence)
        first = end = num_computed // self.block_size
        limit = min((request.num_tokens - 1) // self.block_size, len(sequence.keys))
        while end < limit and self._is_stored(sequence.keys[end]):
            end += 1
        sequence.offered = first, end - first
        return (end - first) * self.block_size

    def allocated(self, request: Any, block_ids: Sequence[int], num_external: int) -> None:
        """A request got blocks. num_external: tokens of those to be restored."""
        if not self.files or not cacheable(request):
            return
        sequence = self._sequence(request)
        if not num_external:
            return
        first, offered = sequence.offered
        count = num_external // self.block_size
        assert count <= offered, f"{count} blocks to restore, {offered} were found"
        blocks = list(block_ids[first : first + count])
        sequence.loading = set(blocks)
        keys = sequence.keys[first : first + count]
        self.loads.append(BlockTransfer(request.request_id, keys, blocks))

    def plan(self, output: Any) -> tuple[list[BlockTransfer], list[BlockTransfer]]:
        """The loads and stores of a step. output: vLLM's SchedulerOutput."""
        loads, self.loads = self.loads, []
        stores = []
        for new in output.scheduled_new_reqs:
            if sequence := self.sequences.get(new.req_id):
                sequence.block_ids = list(new.block_ids[0])
                stores.append(self._store(sequence, output, new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if sequence := self.sequences.get(request_id):
                if request_id in cached.resumed_req_ids:
                    sequence.block_ids = []
                if blocks is not None:
                    sequence.block_ids += blocks[0]
                stores.append(self._store(sequence, output, computed))
        return loads, [transfer for transfer in stores if transfer.keys]

    def loads_failed(self, block_ids: Iterable[int]) -> None:
        """Blocks that could not be restored. Their requests are computed, without another try."""
        failed = set(block_ids)
        for sequence in self.sequences.values():
            if sequence.loading & failed:
                sequence.load_failed = True

    def finished(self, request_id: str) -> None:
        self.sequences.pop(request_id, None)

    def _sequence(self, request: Any) -> CachedSequence:
        return self.sequences.setdefault(request.request_id, CachedSequence(request))

    def _extend_keys(self, sequence: CachedSequence) -> None:
        request = sequence.request
        if request.num_tokens // self.block_size > len(sequence.keys):
            sequence.keys = block_keys(
                request.all_token_ids, self.block_size, sequence.keys, request.cache_salt
            )

    def _is_stored(self, key: bytes) -> bool:
        return all(files.has(key) for files in self.files)

    def _store(self, sequence: CachedSequence, output: Any, num_computed: int) -> BlockTransfer:
        """The blocks that are whole after this step, whose tokens are known, and that are in no
        file."""
        request = sequence.request
        transfer = BlockTransfer(request.request_id)
        computed = num_computed + output.num_scheduled_tokens[request.request_id]
        num_whole = min(computed, request.num_tokens) // self.block_size
        if num_whole > sequence.num_stored:
            self._extend_keys(sequence)
            for index in range(sequence.num_stored, num_whole):
                if not self._is_stored(sequence.keys[index]):
                    transfer.keys.append(sequence.keys[index])
                    transfer.block_ids.append(sequence.block_ids[index])
            sequence.num_stored = num_whole
        return transfer
