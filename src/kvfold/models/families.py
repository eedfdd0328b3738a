"""Supported model families. Adding one: a file beside this and one line here."""

from typing import Any

from kvfold.models.adapter import Family
from kvfold.models.gpt_neox import GPTNeoXFamily
from kvfold.models.llama import LlamaFamily
from kvfold.models.opt import OPTFamily
from kvfold.models.phi3 import Phi3Family
from kvfold.models.qwen3 import Qwen3Family

FAMILIES: tuple[type[Family], ...] = (
    LlamaFamily,
    Qwen3Family,
    Phi3Family,
    OPTFamily,
    GPTNeoXFamily,
)


def family_of(config: Any) -> type[Family]:
    """The family of a transformers config. Raises ValueError for an unsupported model type."""
    for family in FAMILIES:
        if config.model_type in family.model_types:
            _check_config(config)
            return family
    supported = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
    raise ValueError(
        f"model type {config.model_type!r} is not supported; supported types: {supported}. "
        "Soft-capped attention (gemma2) and ALiBi (bloom, falcon) are not supported."
    )


def _check_config(config: Any) -> None:
    if getattr(config, "attn_logit_softcapping", None):
        raise ValueError("soft-capped attention scores cannot be taken in a compressed space")


def attention_windows(config: Any) -> list[int | None]:
    """How many tokens each layer sees, its own included; None: all."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]
