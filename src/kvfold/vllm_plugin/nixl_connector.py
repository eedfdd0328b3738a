"""KVFoldNixlConnector: vLLM's NixlConnector for a compressed cache. A server that decodes copies
blocks from the GPU memory of the server that computed the prompt.

    --kv-transfer-config '{"kv_connector": "KVFoldNixlConnector", "kv_role": "kv_producer"}'

vLLM names blocks by their numbers, and compares two servers once, before the first copy. It
compares versions, the model's name and shape, and the bytes of a block, so it would copy blocks of
other maps, other weights or another rotation. Here it also compares the fingerprint that names the
disk connector's folders, and never copies if the fingerprints differ.

A request whose parameters cannot be right, or whose blocks may be another's by now, is computed
here (`nixl_parameters`).
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector import utils
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from kvfold.vllm_plugin.connectors import NIXL_CONNECTOR
from kvfold.vllm_plugin.disk_connector import cache_fingerprint
from kvfold.vllm_plugin.log import logger
from kvfold.vllm_plugin.nixl_parameters import DIGEST, EXPIRY, digest, parameters_problem

MAX_FETCHED = 10_000  # requests of other servers that are remembered
MISMATCH = "compatibility hash mismatch"  # in vLLM's message
# vLLM before 0.28 registers keys and values apart, unless the cache is one of latents.
SPLITS_CACHES = hasattr(utils.TransferTopology, "get_transfer_cache_regions")


class KVFoldNixlConnector(NixlConnector):
    """See the module's docstring. Raises ValueError for caches whose blocks cannot be copied."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Requests whose blocks were asked for, by server and name. They may be another's since.
        self.fetched: dict[tuple[str, str], None] = {}

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """None: vLLM's order of heads and tokens means nothing to a compressed cache."""
        return None

    def on_new_request(self, request: Any) -> None:
        if request.kv_transfer_params is not None and (problem := self.problem(request)):
            logger.warning(
                "%s: request %s is computed here, as no block is copied with its"
                " kv_transfer_params: %s",
                NIXL_CONNECTOR,
                request.request_id,
                problem,
            )
            request.kv_transfer_params = None
        super().on_new_request(request)

    def problem(self, request: Any) -> str | None:
        """What is wrong with a request's parameters; None if they may be used."""
        scheduler: Any = self.connector_scheduler
        params = request.kv_transfer_params
        # A request that the API refused gives blocks back, with a prompt of one token.
        refused = request.abort_immediately
        tokens = scheduler._get_remote_prefill_token_count(request.num_prompt_tokens)
        num_blocks = []
        for group, limit in zip(
            transfer_groups(self.kv_cache_config), scheduler.blocks_per_sw, strict=True
        ):
            needed = -(-tokens // group.kv_cache_spec.block_size)
            num_blocks.append(min(needed, limit) if limit else needed)
        problem = parameters_problem(
            params,
            None if refused else (request.prompt_token_ids or [])[:tokens],
            num_blocks,
            self.engine_id,
            self._vllm_config.parallel_config.tensor_parallel_size,
            time.time(),
        )
        if problem is None and params.get("do_remote_prefill") and not refused:
            name = params["remote_engine_id"], params["remote_request_id"]
            if name in self.fetched:
                return "their blocks were asked for before, and may be another prompt's since"
            self.fetched[name] = None
            if len(self.fetched) > MAX_FETCHED:
                del self.fetched[next(iter(self.fetched))]
        return problem

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        held, params = super().request_finished_all_groups(request, block_ids)
        if held and params is not None:
            scheduler: Any = self.connector_scheduler
            # A heartbeat of the other server, which keeps the blocks here, must come before.
            seconds = scheduler._kv_lease_duration - scheduler._heartbeat_interval
            params[EXPIRY] = time.time() + seconds
            params[DIGEST] = digest(params, request.prompt_token_ids or [])
        return held, params

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        worker: Any = self.connector_worker
        check_compressed(self._vllm_config, kv_caches)
        if SPLITS_CACHES:
            worker.use_mla = True
            worker._layer_specs |= {name: opaque_spec(x) for name, x in kv_caches.items()}
        super().register_kv_caches(kv_caches)
        addresses = worker.kv_caches_base_addr[worker.engine_id][worker.tp_rank]
        check_regions(kv_caches, addresses, worker.block_len_per_layer, worker.num_regions)
        fingerprint = cache_fingerprint(self._vllm_config, self.kv_cache_config, kv_caches)
        worker.compat_hash = f"{worker.compat_hash}-{fingerprint}"
        worker.xfer_handshake_metadata = replace(
            worker.xfer_handshake_metadata, compatibility_hash=worker.compat_hash
        )
        worker._nixl_handshake = explained(worker._nixl_handshake)
        if worker._is_hma_required and not hasattr(worker, "get_transfer_results"):
            mark_failed_blocks(worker, len(self.kv_cache_config.kv_cache_groups))


def transfer_groups(config: Any) -> Any:
    """The groups of layers whose blocks are copied: in vLLM 0.25.1 all."""
    return getattr(config, "transfer_groups", config.kv_cache_groups)


def opaque_spec(cache: Tensor) -> MLAAttentionSpec:
    """A spec whose blocks vLLM copies as they are. cache: blocks first."""
    return MLAAttentionSpec(
        block_size=1, num_kv_heads=1, head_size=cache[0].nbytes // cache.itemsize, dtype=cache.dtype
    )


def check_compressed(vllm_config: VllmConfig, caches: Mapping[str, Tensor]) -> None:
    """Raises ValueError if a layer has a cache of vLLM's own."""
    layers = vllm_config.compilation_config.static_forward_context
    for name in caches:
        if not hasattr(getattr(layers[name], "impl", None), "model_cache"):
            raise ValueError(
                f"{NIXL_CONNECTOR}: the cache of {name} is not compressed. If none is, use vLLM's"
                " NixlConnector; caches of both kinds together cannot be copied"
            )


def check_regions(
    caches: Mapping[str, Tensor], addresses: list[int], sizes: list[int], num_regions: int
) -> None:
    """Raises ValueError unless vLLM copies a block of every cache as a whole.

    addresses, sizes: of first blocks, as vLLM registered them; num_regions: that it copies from.
    """
    registered = dict(zip(addresses, sizes, strict=True))
    wanted = {x.data_ptr(): x[0].nbytes for x in caches.values()}
    if registered != wanted or num_regions != len(wanted):
        raise ValueError(
            f"{NIXL_CONNECTOR}: vLLM would copy {num_regions} parts of a block with"
            f" {sum(sizes)} bytes; the cache has {len(wanted)} with {sum(wanted.values())}. Models"
            " whose layers share memory are not supported: leave the connector out"
        )


def mark_failed_blocks(worker: Any, num_groups: int) -> None:
    """Tell the scheduler which blocks were not copied when a copy failed. vLLM 0.25.1 answers with
    what is in them, unless blocks of all layers have one size and no layer has a window.

    Raises ValueError for several groups of layers, whose blocks its scheduler cannot tell apart.
    """
    if num_groups > 1:
        raise ValueError(
            f"{NIXL_CONNECTOR}: after a copy that failed, this version of vLLM answers with wrong"
            " tokens for models with windows: use vLLM 0.32, or leave the connector out"
        )
    handle = worker._handle_failed_transfer

    @wraps(handle)
    def mark(request_id: str, *args: Any, **kwargs: Any) -> Any:
        copied = worker._recving_metadata.get(request_id)
        if copied is not None and copied.local_block_ids:
            worker._invalid_block_ids.put(set(copied.local_block_ids[0]))
        return handle(request_id, *args, **kwargs)

    worker._handle_failed_transfer = mark


def explained(handshake: Callable[..., Any]) -> Callable[..., Any]:
    """A worker's handshake that says in its error what may differ."""

    @wraps(handshake)
    def explain(*args: Any, **kwargs: Any) -> Any:
        try:
            return handshake(*args, **kwargs)
        except RuntimeError as error:
            if MISMATCH not in str(error):
                raise
            raise RuntimeError(
                f"{NIXL_CONNECTOR}: the other server's cache differs from this one's, so none of"
                " its blocks is copied. Weights, maps, bits, rotation, tensor parallelism and"
                " versions of kvfold and vLLM must be the same: start both servers with the same"
                " settings"
            ) from error

    return explain
