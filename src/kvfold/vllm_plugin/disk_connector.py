"""KVFoldDiskConnector: a KV connector of vLLM that stores whole blocks of the cache as files and
restores them, for later requests, after a restart, or in other servers that share the folder.

    --kv-transfer-config '{"kv_connector": "KVFoldDiskConnector", "kv_role": "kv_both",
                           "kv_connector_extra_config": {"path": "/folder"}}'

With kv_role kv_producer a server stores blocks only, with kv_consumer it restores them only.

A block is found by its tokens and by a fingerprint of weights, maps and layout, so blocks of
another cache are never restored. Each worker tells the scheduler its fingerprint when the cache
has been allocated; the scheduler names the folder, in the metadata of every step.
"""

import hashlib
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

import kvfold
from kvfold.vllm_plugin.connectors import DISK_CONNECTOR
from kvfold.vllm_plugin.disk_scheduler import BlockTransfer, DiskScheduler
from kvfold.vllm_plugin.disk_worker import QUEUE_BYTES, DiskWorker
from kvfold.vllm_plugin.fingerprint import facts_digest, named_tensors, tensors_digest
from kvfold.vllm_plugin.log import logger

FORMAT = 1  # of files; raise it when the bytes of a block change their meaning
SETTINGS = ("path", "queue_gib")
IDLE_SECONDS = 0.005  # that a step without tokens waits for blocks that are being read


@dataclass
class WorkerCache(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler: its rank, its fingerprint and the bytes of a block."""

    rank: int
    fingerprint: str
    num_bytes: int


@dataclass
class DiskMetadata(KVConnectorMetadata):
    """What the workers move in a step.

    folder: of the files; None: not known yet.
    idle: no token is computed in this step.
    """

    folder: Path | None
    idle: bool
    loads: list[BlockTransfer] = field(default_factory=list)
    stores: list[BlockTransfer] = field(default_factory=list)


@dataclass(frozen=True)
class DiskSettings:
    """`kv_connector_extra_config`. path: a folder. queue_bytes: as in `DiskWorker`."""

    path: Path
    queue_bytes: int

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "DiskSettings":
        """Raises ValueError, and creates the folder."""
        if unknown := sorted(set(extra) - set(SETTINGS)):
            raise ValueError(
                f"{DISK_CONNECTOR}: kv_connector_extra_config has no {unknown[0]}. Legal:"
                f" {', '.join(SETTINGS)}"
            )
        path, queue = extra.get("path"), extra.get("queue_gib", QUEUE_BYTES / 2**30)
        if not isinstance(path, str) or not path:
            raise ValueError(
                f"{DISK_CONNECTOR}: path in kv_connector_extra_config must be a folder for blocks;"
                f' got {path!r}. For example {{"path": "/var/cache/kvfold"}}'
            )
        if isinstance(queue, bool) or not isinstance(queue, int | float) or queue <= 0:
            raise ValueError(
                f"{DISK_CONNECTOR}: queue_gib in kv_connector_extra_config must be a positive"
                f" number of GiB; got {queue!r}"
            )
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{DISK_CONNECTOR}: cannot create path {path}: {error}") from None
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise ValueError(f"{DISK_CONNECTOR}: path {path} is not writable; name another folder")
        return cls(folder, int(queue * 2**30))


class KVFoldDiskConnector(KVConnectorBase_V1):
    """See the module's docstring.

    Raises ValueError for settings that are not legal, and for models that it does not serve.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError(
                f"{DISK_CONNECTOR}: this model has {len(kv_cache_config.kv_cache_groups)} kinds of"
                " cache, and blocks of one kind alone cannot be restored: leave the connector out"
            )
        self.settings = DiskSettings.parse(self._kv_transfer_config.kv_connector_extra_config)
        # A damaged block is computed again; the scheduler reads this after it made the connector.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self.config, self.cache_config = vllm_config, kv_cache_config
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.scheduler = DiskScheduler(block_size)
        self.folder: Path | None = None
        self.worker: DiskWorker | None = None
        self.fingerprint = ""

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what was not stored is computed again."""
        return False

    # Workers

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        num_blocks, limit = self.cache_config.num_blocks, self.settings.queue_bytes
        self.worker = DiskWorker(kv_caches, num_blocks, limit)
        self.fingerprint = cache_fingerprint(self.config, self.cache_config, kv_caches)

    def get_handshake_metadata(self) -> WorkerCache:
        assert self.worker is not None
        rank = self.config.parallel_config.rank
        return WorkerCache(rank, self.fingerprint, self.worker.num_bytes)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata, worker = self._step()
        if metadata.folder is not None:
            worker.connect(metadata.folder, self.config.parallel_config.rank)
            worker.load(metadata.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        metadata, worker = self._step()
        if metadata.stores:
            assert metadata.folder is not None
            worker.connect(metadata.folder, self.config.parallel_config.rank)
            worker.store(metadata.stores)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        metadata, worker = self._step()
        # An engine without work takes one empty step after another, which would slow the threads
        # that read.
        return None, worker.take_loaded(IDLE_SECONDS if metadata.idle else 0.0)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self.worker is None else self.worker.take_failed()

    def shutdown(self) -> None:
        if self.worker is not None:
            self.worker.shutdown()

    def _step(self) -> tuple[DiskMetadata, DiskWorker]:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, DiskMetadata) and self.worker is not None
        return metadata, self.worker

    # Scheduler

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        workers = [x for x in metadata.values() if isinstance(x, WorkerCache)]
        workers.sort(key=lambda worker: worker.rank)
        texts = ",".join(worker.fingerprint for worker in workers)
        folder = hashlib.sha256(texts.encode()).hexdigest()[:32]
        self.folder = self.settings.path / folder
        sizes = [worker.num_bytes for worker in workers]
        self.scheduler.connect(self.folder, sizes)
        logger.info(
            "kvfold: blocks of %d tokens and %d bytes are stored in %s",
            self.scheduler.block_size, sum(sizes), self.folder,
        )  # fmt: skip

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        count = self.scheduler.num_matched_tokens(request, num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> DiskMetadata:
        loads, stores = self.scheduler.plan(scheduler_output)
        if not self._kv_transfer_config.is_kv_producer:
            stores = []
        idle = not scheduler_output.total_num_scheduled_tokens
        return DiskMetadata(self.folder, idle, loads, stores)

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler.loads_failed(connector_output.invalid_block_ids or ())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request.request_id)
        return False, None


def cache_fingerprint(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, caches: Mapping[str, Tensor]
) -> str:
    """A digest of what decides the bytes of this process's blocks besides tokens."""
    context = vllm_config.compilation_config.static_forward_context
    layers = {name: context[name] for name in sorted(caches)}
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    config = {key: x for key, x in model.hf_config.to_dict().items() if not key.startswith("_")}
    block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    blocks = kv_cache_config.num_blocks
    facts = {
        "format": FORMAT,
        "versions": [kvfold.__version__, vllm.__version__],
        "machine": [platform.machine(), next(iter(caches.values())).device.type],
        "weights": [weights_digest(name, layer) for name, layer in layers.items()],
        "config": config,
        "dtypes": [str(model.dtype), str(vllm_config.cache_config.cache_dtype)],
        "length": model.max_model_len if has_changing_rope(config) else None,
        "block": block_size,
        "caches": [[[n for n in x.shape if n != blocks], str(x.dtype)] for x in caches.values()],
        "process": [parallel.rank, parallel.tensor_parallel_size],
        "layouts": [layout_facts(layer, block_size) for layer in layers.values()],
        "maps": tensors_digest(map_tensors(layers.items())),
    }
    return facts_digest(facts)


def weights_digest(name: str, layer: Any) -> str:
    digest = getattr(layer, "weights_digest", None)
    if digest is None:
        raise ValueError(
            f"kvfold: the weights of {name} were loaded without kvfold's plugin, so its"
            " blocks cannot be told from those of other weights: let vLLM load plugins"
            " (VLLM_PLUGINS), or leave the connector out"
        )
    return str(digest)


def has_changing_rope(config: Mapping[str, Any]) -> bool:
    """Whether RoPE may depend on the maximum length, as in YaRN and its relatives."""
    text = str(config.get("rope_parameters") or config.get("rope_scaling") or "default")
    return "default" not in text


def layout_facts(layer: Any, block_size: int) -> list[str]:
    """What a layer stores where, if kvfold stores it."""
    impl: Any = getattr(layer, "impl", None)
    model_cache = getattr(impl, "model_cache", None)
    if model_cache is None:
        return [type(impl).__name__]
    settings = model_cache.rotate, model_cache.cache, model_cache.dtype, model_cache.share
    groups = model_cache.layout(block_size).groups_of_layer(impl.maps.index)
    return [repr(settings), repr(model_cache.spec.layers[impl.maps.index]), repr(list(groups))]


def map_tensors(layers: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Tensor]]:
    """The maps of all layers that have maps beside the weights, by name."""
    for name, layer in layers:
        projections = getattr(getattr(layer, "impl", None), "projections", None)
        if projections is not None:
            yield f"{name}.scale", torch.tensor(projections.scale)
            yield from named_tensors(projections.maps, name)
