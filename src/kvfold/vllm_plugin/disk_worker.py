"""Moves blocks between a cache and files: the worker's half of the disk connector. It imports no
vLLM.

Storing never holds up a step: blocks are copied on the device, and threads write them. If they fall
behind, blocks are left out.

Shapes: n blocks, bytes of a block's payload P, of a layer in it p.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from kvfold.vllm_plugin.block_files import BlockFiles, DamagedBlock
from kvfold.vllm_plugin.disk_scheduler import BlockTransfer
from kvfold.vllm_plugin.log import logger

CHUNK_BYTES = 64 << 20  # that are copied and written, or read, at a time
NUM_THREADS = 8
QUEUE_BYTES = 4 << 30  # of memory for blocks that wait to be written


class LayerBlocks:
    """The blocks of one layer's cache, as the attention backend shaped it.

    cache: blocks are its first dimension or, behind one for keys and values, its second. A block
        may be several consecutive entries there.
    """

    def __init__(self, cache: Tensor, num_blocks: int) -> None:
        dims = [dim for dim in (0, 1) if dim < cache.dim() and cache.shape[dim] == num_blocks]
        dims += [dim for dim in (0, 1) if dim < cache.dim() and cache.shape[dim] % num_blocks == 0]
        if not dims:
            raise ValueError(
                f"kvfold: a cache of shape {tuple(cache.shape)} has no dimension of {num_blocks}"
                " blocks, so they cannot be stored; leave the KV connector out"
            )
        self.entries = widest(cache.movedim(dims[0], 0))
        self.per_block = len(self.entries) // num_blocks
        self.num_bytes = self.entries[: self.per_block].nbytes

    def gather(self, blocks: Tensor) -> Tensor:
        """uint8 [n, p] of blocks int64 [n]."""
        gathered = self.entries.index_select(0, self._indices(blocks)).contiguous()
        return gathered.view(len(blocks), -1).view(torch.uint8)

    def scatter(self, blocks: Tensor, payload: Tensor) -> None:
        """Write uint8 [n, p] into blocks int64 [n]."""
        shape = len(blocks) * self.per_block, *self.entries.shape[1:]
        values = payload.contiguous().view(self.entries.dtype).view(shape)
        self.entries.index_copy_(0, self._indices(blocks), values)

    def _indices(self, blocks: Tensor) -> Tensor:
        inside = torch.arange(self.per_block, device=blocks.device)
        return (blocks[:, None] * self.per_block + inside).flatten()


def widest(cache: Tensor) -> Tensor:
    """The same bytes as int64 where they allow it, which is copied faster, or as uint8."""
    size = cache.element_size()
    places = [cache.storage_offset(), cache.shape[-1], *cache.stride()[:-1]]
    if cache.stride(-1) == 1 and all(place * size % 8 == 0 for place in places):
        return cache.view(torch.int64)
    return cache.view(torch.uint8) if size == 1 else cache


class DiskWorker:
    """The blocks of one process.

    caches: by layer. Layers that share memory count once.
    queue_bytes: at most so many wait to be written; what comes on top is not stored.
    queued_bytes: of blocks that wait to be written.
    moved: bytes that were stored and loaded, blocks that were skipped or damaged.
    """

    def __init__(
        self, caches: Mapping[str, Tensor], num_blocks: int, queue_bytes: int = QUEUE_BYTES
    ) -> None:
        distinct = {(x.data_ptr(), x.shape, x.stride()): x for x in caches.values()}
        self.layers = [LayerBlocks(cache, num_blocks) for cache in distinct.values()]
        self.ends = list(accumulate(layer.num_bytes for layer in self.layers))
        self.num_bytes, self.queue_bytes = self.ends[-1], queue_bytes
        self.device = next(iter(caches.values())).device
        self.files: BlockFiles | None = None
        self.moved: Counter[str] = Counter()
        self._executor = ThreadPoolExecutor(NUM_THREADS, "kvfold blocks")
        self._lock = threading.Lock()
        self._some_loaded = threading.Condition(self._lock)
        self.queued_bytes = 0
        self._waiting: Counter[str] = Counter()  # chunks that are being read, by request
        self._loaded: set[str] = set()
        self._failed: set[int] = set()
        self._copies = None
        if self.device.type == "cuda":
            self._copies = torch.cuda.Stream(self.device)

    def connect(self, folder: Path, rank: int) -> None:
        """Store blocks in `folder` from now on."""
        if self.files is None:
            self.files = BlockFiles(folder, self.num_bytes, rank)
            self.files.remove_scratch()

    def store(self, transfers: Iterable[BlockTransfer]) -> None:
        """Store blocks as they are after the work that the current stream has been given."""
        assert self.files is not None
        if not self.files.can_write():
            return
        for transfer in transfers:
            for keys, blocks in self._chunks(transfer):
                if not self._reserve(len(keys)):
                    return
                payload = self._gather(self._indices(blocks))
                host, copied = self._to_host(payload)
                self._executor.submit(self._write, keys, host, copied)

    def load(self, transfers: Iterable[BlockTransfer]) -> None:
        """Restore blocks, after the work that the current stream has been given."""
        for transfer in transfers:
            ready = None
            if self._copies is not None:
                ready = torch.cuda.current_stream(self.device).record_event()
            chunks = list(self._chunks(transfer))
            with self._lock:
                self._waiting[transfer.request_id] += len(chunks)
            for keys, blocks in chunks:
                self._executor.submit(self._load, transfer.request_id, keys, blocks, ready)

    def take_loaded(self, seconds: float = 0.0) -> set[str]:
        """Requests whose blocks were restored, or could not be, since the last call. If blocks are
        being read, wait up to `seconds` for a request."""
        with self._some_loaded:
            if self._waiting and not self._loaded and seconds:
                self._some_loaded.wait(seconds)
            loaded, self._loaded = self._loaded, set()
        return loaded

    def take_failed(self) -> set[int]:
        """Blocks that could not be restored since the last call."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def shutdown(self) -> None:
        """Wait until all blocks are written."""
        self._executor.shutdown(wait=True)

    def _chunks(self, transfer: BlockTransfer) -> Iterator[tuple[list[bytes], list[int]]]:
        step = max(1, CHUNK_BYTES // self.num_bytes)
        for i in range(0, len(transfer.keys), step):
            yield transfer.keys[i : i + step], transfer.block_ids[i : i + step]

    def _reserve(self, count: int) -> bool:
        """Reserve memory for blocks that wait to be written. False if there is no more."""
        with self._lock:
            if self.queued_bytes + count * self.num_bytes > self.queue_bytes:
                if not self.moved["skipped_blocks"]:
                    logger.warning(
                        "kvfold: blocks come faster than %s takes them; some are not stored. Raise"
                        " queue_gib of the connector, or take a faster disk",
                        self.files and self.files.folder,
                    )
                self.moved["skipped_blocks"] += count
                return False
            self.queued_bytes += count * self.num_bytes
        return True

    def _indices(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64).to(self.device, non_blocking=True)

    def _gather(self, blocks: Tensor) -> Tensor:
        """uint8 [n, P] of blocks int64 [n]: all layers, one after another."""
        payload = torch.empty(len(blocks), self.num_bytes, dtype=torch.uint8, device=self.device)
        for layer, end in zip(self.layers, self.ends, strict=True):
            payload[:, end - layer.num_bytes : end] = layer.gather(blocks)
        return payload

    def _to_host(self, payload: Tensor) -> tuple[Tensor, "torch.cuda.Event | None"]:
        """A copy in host memory, and the event after which it is complete."""
        if self._copies is None:
            return payload, None
        host = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True)
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            host.copy_(payload, non_blocking=True)
            payload.record_stream(self._copies)
            return host, self._copies.record_event()

    def _write(self, keys: list[bytes], host: Tensor, copied: "torch.cuda.Event | None") -> None:
        assert self.files is not None
        try:
            if copied is not None:
                copied.synchronize()
            for key, payload in zip(keys, host.numpy(), strict=True):
                if self.files.write(key, payload.data):
                    self._count("stored_bytes", self.num_bytes)
        except Exception:  # of a thread nobody waits for
            logger.exception("kvfold: blocks were not stored")
        finally:
            with self._lock:
                self.queued_bytes -= len(keys) * self.num_bytes

    def _load(
        self,
        request_id: str,
        keys: list[bytes],
        blocks: list[int],
        ready: "torch.cuda.Event | None",
    ) -> None:
        failed = set(blocks)
        try:
            failed -= set(self._restore(keys, blocks, ready))
        except Exception:  # the request is computed instead
            logger.exception("kvfold: blocks of request %s were not restored", request_id)
        with self._lock:
            self._failed |= failed
            self._waiting[request_id] -= 1
            if not self._waiting[request_id]:
                del self._waiting[request_id]
                self._loaded.add(request_id)
                self._some_loaded.notify()

    @torch.inference_mode()  # as the cache was made
    def _restore(
        self, keys: list[bytes], blocks: list[int], ready: "torch.cuda.Event | None"
    ) -> list[int]:
        """Read blocks and write them into the cache. Returns those that could be read."""
        shape = len(keys), self.num_bytes
        host = torch.empty(shape, dtype=torch.uint8, pin_memory=self._copies is not None)
        rows = [i for i, key in enumerate(keys) if self._read(key, host[i].numpy().data)]
        restored = [blocks[i] for i in rows]
        if not rows:
            return restored
        if len(rows) < len(keys):
            host = host[rows]
        if self._copies is None:
            self._scatter(self._indices(restored), host)
        else:
            assert ready is not None
            with torch.cuda.stream(self._copies):
                self._copies.wait_event(ready)
                payload = host.to(self.device, non_blocking=True)
                self._scatter(self._indices(restored), payload)
                done = self._copies.record_event()
            done.synchronize()
        self._count("loaded_bytes", len(rows) * self.num_bytes)
        return restored

    def _scatter(self, blocks: Tensor, payload: Tensor) -> None:
        for layer, end in zip(self.layers, self.ends, strict=True):
            layer.scatter(blocks, payload[:, end - layer.num_bytes : end])

    def _read(self, key: bytes, payload: memoryview) -> bool:
        assert self.files is not None
        try:
            self.files.read(key, payload)
        except DamagedBlock as error:
            self._count("damaged_blocks", 1)
            logger.warning("kvfold: a stored block is damaged and computed again: %s", error)
            self.files.remove(key)
            return False
        except OSError as error:
            logger.warning("kvfold: a stored block cannot be read and is computed again: %s", error)
            return False
        return True

    def _count(self, name: str, count: int) -> None:
        with self._lock:
            self.moved[name] += count
