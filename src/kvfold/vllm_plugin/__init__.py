"""kvfold inside vLLM: compressed checkpoints, and caches of few bits, served by vLLM's engine.

vLLM calls `register` in each of its processes, through the entry point `vllm.general_plugins`.
"""

# Model type to the class in `models`, whose name vLLM then knows as an architecture.
ARCHITECTURES = {
    "llama": "KVFoldLlamaForCausalLM",
    "mistral": "KVFoldMistralForCausalLM",
    "qwen2": "KVFoldQwen2ForCausalLM",
    "qwen3": "KVFoldQwen3ForCausalLM",
    "phi3": "KVFoldPhi3ForCausalLM",
    "opt": "KVFoldOPTForCausalLM",
}


def register() -> None:
    """Tell vLLM of the checkpoints' format, their models and their attention, which are imported
    when somebody serves one. May be called again.

    Raises ValueError, which says which versions work, if this vLLM lacks what the plugin uses."""
    from kvfold.utils.versions import check_vllm

    check_vllm()
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.attention.backends.registry import register_backend

    from kvfold.vllm_plugin.loading import watch_loading
    from kvfold.vllm_plugin.quantization import KVFoldQuantization

    register_quantization_config("kvfold")(KVFoldQuantization)
    register_backend("KVFOLD", "kvfold.vllm_plugin.backend.KVFoldBackend")
    for name in ARCHITECTURES.values():
        ModelRegistry.register_model(name, f"kvfold.vllm_plugin.models:{name}")
    watch_loading()
