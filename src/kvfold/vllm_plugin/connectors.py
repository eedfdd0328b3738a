"""Which of vLLM's KV connectors may move blocks of a compressed cache.

Most connectors find blocks by their tokens and the model's name. Blocks written with other maps or
bits have the same tokens and name, so another server would read them as its own and answer with
wrong tokens. Allowed are connectors whose blocks stay inside the server, and kvfold's own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

DISK_CONNECTOR = "KVFoldDiskConnector"
MODULE = "kvfold.vllm_plugin.disk_connector"
# Names of connectors: their blocks stay in the memory of the server that wrote them.
INTERNAL = ("OffloadingConnector", "SimpleCPUOffloadConnector", "DecodeBenchConnector")
SAFE = (DISK_CONNECTOR, *INTERNAL)
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


def uses_disk_connector(vllm_config: Any) -> bool:
    return any(name == DISK_CONNECTOR for name, _, _ in configured_connectors(vllm_config))


def check_disk_connector(vllm_config: Any) -> None:
    """Raises ValueError if blocks of this server cannot be stored, or if damaged ones would fail
    their requests. The connector sets that policy itself, unless it is one of several."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    problem = None
    if vllm_config.model_config.is_hybrid:
        problem = (
            "this model has recurrent states beside attention, and blocks of attention alone"
            " cannot be restored: leave the connector out"
        )
    elif parallel.pipeline_parallel_size > 1:
        problem = "it was not tried with pipeline parallelism: leave one of them out"
    elif parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        problem = "context parallelism splits blocks: leave one of them out"
    elif transfer.kv_connector == MULTIPLE and transfer.kv_load_failure_policy != "recompute":
        problem = (
            f'in a {MULTIPLE}, "kv_load_failure_policy" of --kv-transfer-config must be'
            f' "recompute"; got "{transfer.kv_load_failure_policy}", with which a damaged block'
            " would fail its request"
        )
    if problem is not None:
        raise ValueError(f"kvfold's plugin for vLLM: {DISK_CONNECTOR}: {problem}")


def check_connectors(vllm_config: Any) -> None:
    """Raises ValueError, naming those that are safe, for a KV connector that could restore blocks
    of another cache."""
    for name, module, extra in configured_connectors(vllm_config):
        if reason := unsafe_reason(name, module, extra):
            raise ValueError(
                f"kvfold's plugin for vLLM: KV connector {name}: {reason}. Blocks that were"
                " written with other maps or bits would be restored as wrong tokens. Safe"
                f" connectors: {', '.join(SAFE)}; to keep blocks on disk or to share them between"
                f' servers, use --kv-transfer-config \'{{"kv_connector": "{DISK_CONNECTOR}",'
                ' "kv_role": "kv_both", "kv_connector_extra_config": {"path": "/folder"}}\''
            )


def unsafe_reason(name: str, module: str | None, extra: Mapping[str, Any]) -> str | None:
    """Why a connector must not move blocks of a compressed cache; None if it may.

    module: where it is loaded from; None: vLLM's or a plugin's registry.
    extra: its `kv_connector_extra_config`.
    """
    if name not in SAFE or module not in (None, MODULE if name == DISK_CONNECTOR else None):
        return "it is not known to tell blocks of different caches apart"
    if name != "OffloadingConnector":
        return None
    if extra.get("secondary_tiers"):
        return "its secondary_tiers find blocks by their tokens and the model's name alone"
    spec = extra.get("spec_name", CPU_SPEC)
    if spec == "TieringOffloadingSpec" or (spec == CPU_SPEC and not extra.get("spec_module_path")):
        return None
    return f"spec_name {spec} is not known to keep its blocks in memory"
