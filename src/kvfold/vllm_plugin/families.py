"""Which models the plugin can serve as folded checkpoints."""

from typing import Any

from kvfold.models.families import family_of
from kvfold.models.folded import attention_windows
from kvfold.models.rotary import LONG_ROPE, rope_type
from kvfold.vllm_plugin import ARCHITECTURES

ELSEWHERE = "serve it with kvfold.LLM"


def architecture(config: Any) -> str:
    """The vLLM architecture for models of a transformers config. Raises ValueError if the plugin
    does not support it."""
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"kvfold's plugin for vLLM does not serve model type {config.model_type!r}; it serves"
            f" {', '.join(ARCHITECTURES)}: {ELSEWHERE}"
        )
    if any(attention_windows(config)):
        raise ValueError(
            "kvfold's plugin for vLLM does not serve sliding windows, which this"
            f" {config.model_type} model has: {ELSEWHERE}, whose cache drops what is behind them"
        )
    if rope_type(config) in LONG_ROPE:
        raise ValueError(
            f"rope_type {rope_type(config)!r} changes the RoPE tables of a sequence when it is"
            " long; paged caches do not support it: use transformers' generate"
        )
    family_of(config)
    return ARCHITECTURES[config.model_type]
