"""Which of vLLM's KV connectors may move blocks of a compressed cache.

Most connectors find blocks by their tokens and the model's name. Blocks written with other maps or
bits have the same tokens and name, so another server would read them as its own and answer with
wrong tokens. Allowed are connectors whose blocks stay inside the server, and kvfold's own, which
compare a fingerprint of the cache.
"""

from collections.abc import Iterator, Mapping
from typing import Any

DISK_CONNECTOR = "KVFoldDiskConnector"
NIXL_CONNECTOR = "KVFoldNixlConnector"
# kvfold's own connectors, and their modules.
MODULES = {
    DISK_CONNECTOR: "kvfold.vllm_plugin.disk_connector",
    NIXL_CONNECTOR: "kvfold.vllm_plugin.nixl_connector",
}
# Names of connectors: their blocks stay in the memory of the server that wrote them.
INTERNAL = ("OffloadingConnector", "SimpleCPUOffloadConnector", "DecodeBenchConnector")
SAFE = (*MODULES, *INTERNAL)
MULTIPLE = "MultiConnector"
CPU_SPEC = "CPUOffloadingSpec"


def configured_connectors(vllm_config: Any) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
    """The connectors of vLLM's config: (name, module or None, extra config). Those of a
    MultiConnector one by one."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector != MULTIPLE:
        yield transfer.kv_connector, transfer.kv_connector_module_path, extra
        return
    for child in extra.get("connectors", ()):
        yield (
            child.get("kv_connector"),
            child.get("kv_connector_module_path"),
            child.get("kv_connector_extra_config", {}),
        )


def check_own_connectors(vllm_config: Any) -> bool:
    """Whether one of kvfold's own connectors is configured. Raises ValueError if it cannot serve
    this server."""
    names = {name for name, _, _ in configured_connectors(vllm_config)}
    if DISK_CONNECTOR in names:
        check_disk_connector(vllm_config)
    if NIXL_CONNECTOR in names:
        check_nixl_connector(vllm_config)
    return not names.isdisjoint(MODULES)


def check_disk_connector(vllm_config: Any) -> None:
    """Raises ValueError if blocks of this server cannot be stored, or if damaged ones would fail
    their requests. The connector sets that policy itself, unless it is one of several."""
    transfer = vllm_config.kv_transfer_config
    problem = immovable_reason(vllm_config)
    if problem is None and (
        transfer.kv_connector == MULTIPLE and transfer.kv_load_failure_policy != "recompute"
    ):
        problem = (
            f'in a {MULTIPLE}, "kv_load_failure_policy" of --kv-transfer-config must be'
            f' "recompute"; got "{transfer.kv_load_failure_policy}", with which a damaged block'
            " would fail its request"
        )
    if problem is not None:
        raise ValueError(f"kvfold's plugin for vLLM: {DISK_CONNECTOR}: {problem}")


def check_nixl_connector(vllm_config: Any) -> None:
    """Raises ValueError if blocks of this server cannot be copied by NIXL, or if servers with
    other blocks would not be refused."""
    transfer = vllm_config.kv_transfer_config
    extra, device = transfer.kv_connector_extra_config, vllm_config.device_config.device_type
    problem = immovable_reason(vllm_config)
    if transfer.kv_connector == MULTIPLE:
        problem = f"it was not tried in a {MULTIPLE}: use one of them"
    elif not extra.get("enforce_handshake_compat", True):
        problem = (
            "enforce_handshake_compat must be true, or blocks of other maps or bits would be"
            " copied as wrong tokens: leave it out"
        )
    elif transfer.kv_buffer_device != device:
        problem = (
            f'kv_buffer_device of --kv-transfer-config must be "{device}"; got'
            f' "{transfer.kv_buffer_device}". Blocks are copied from where they are'
        )
    if problem is not None:
        raise ValueError(f"kvfold's plugin for vLLM: {NIXL_CONNECTOR}: {problem}")


def immovable_reason(vllm_config: Any) -> str | None:
    """Why blocks of this server cannot move, and the way out; None if they can."""
    parallel = vllm_config.parallel_config
    if vllm_config.model_config.is_hybrid:
        return (
            "this model has recurrent states beside attention, and blocks of attention alone"
            " cannot be restored: leave the connector out"
        )
    if parallel.pipeline_parallel_size > 1:
        return "it was not tried with pipeline parallelism: leave one of them out"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism splits blocks: leave one of them out"
    return None


def check_connectors(vllm_config: Any) -> None:
    """Raises ValueError, naming those that are safe, for a KV connector that could restore blocks
    of another cache."""
    for name, module, extra in configured_connectors(vllm_config):
        if reason := unsafe_reason(name, module, extra):
            raise ValueError(
                f"kvfold's plugin for vLLM: KV connector {name}: {reason}. Blocks that were"
                " written with other maps or bits would be restored as wrong tokens. Safe"
                f" connectors: {', '.join(SAFE)}; in place of NixlConnector use {NIXL_CONNECTOR};"
                " to keep blocks on disk or to share them between"
                f' servers, use --kv-transfer-config \'{{"kv_connector": "{DISK_CONNECTOR}",'
                ' "kv_role": "kv_both", "kv_connector_extra_config": {"path": "/folder"}}\''
            )


def unsafe_reason(name: str, module: str | None, extra: Mapping[str, Any]) -> str | None:
    """Why a connector must not move blocks of a compressed cache; None if it may.

    module: where it is loaded from; None: vLLM's or a plugin's registry.
    extra: its `kv_connector_extra_config`.
    """
    if name not in SAFE or module not in (None, MODULES.get(name)):
        return "it is not known to tell blocks of different caches apart"
    if name != "OffloadingConnector":
        return None
    if extra.get("secondary_tiers"):
        return "its secondary_tiers find blocks by their tokens and the model's name alone"
    spec = extra.get("spec_name", CPU_SPEC)
    if spec == "TieringOffloadingSpec" or (spec == CPU_SPEC and not extra.get("spec_module_path")):
        return None
    return f"spec_name {spec} is not known to keep its blocks in memory"
