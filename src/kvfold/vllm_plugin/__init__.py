"""vLLM plugin: serves kvfold's compressed checkpoints, maps and low-bit caches in vLLM's engine.

vLLM calls `register` in each of its processes, through the entry point `vllm.general_plugins`.
"""

import os

# What the user set, if anything: vLLM changes the variable when it compiles a model.
KERNEL_FOLDER = os.environ.get("TRITON_CACHE_DIR")

# Model type: class in `models`, whose name is registered as an architecture of vLLM.
ARCHITECTURES = {
    "llama": "KVFoldLlamaForCausalLM",
    "mistral": "KVFoldMistralForCausalLM",
    "qwen2": "KVFoldQwen2ForCausalLM",
    "qwen3": "KVFoldQwen3ForCausalLM",
    "phi3": "KVFoldPhi3ForCausalLM",
    "opt": "KVFoldOPTForCausalLM",
}


def register() -> None:
    """Register kvfold's checkpoint format, model classes, attention backend and KV connectors
    with vLLM. May be called more than once.

    They are imported only when a server uses them.

    Raises ValueError, naming the versions that work, if this vLLM lacks something that the plugin
    uses.
    """
    from kvfold.utils.versions import check_vllm

    check_vllm()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.attention.backends.registry import register_backend

    from kvfold.vllm_plugin.connectors import MODULES
    from kvfold.vllm_plugin.loading import wrap_loaders
    from kvfold.vllm_plugin.quantization import KVFoldQuantization

    register_quantization_config("kvfold")(KVFoldQuantization)
    register_backend("KVFOLD", "kvfold.vllm_plugin.backend.KVFoldBackend")
    for name in ARCHITECTURES.values():
        ModelRegistry.register_model(name, f"kvfold.vllm_plugin.models:{name}")
    for name, module in MODULES.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
    wrap_loaders()
