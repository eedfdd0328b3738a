"""Families of models whose weights can be folded. Adding one: a file beside this and one line here.

Maps beside the weights need none.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvfold.errors import SettingError
from kvfold.models.adapter import Family
from kvfold.models.gemma2 import Gemma2Family
from kvfold.models.gpt_neox import GPTNeoXFamily
from kvfold.models.llama import LlamaFamily
from kvfold.models.opt import OPTFamily
from kvfold.models.phi3 import Phi3Family
from kvfold.models.qwen3 import Qwen3Family

FAMILIES: tuple[type[Family], ...] = (
    LlamaFamily,
    Qwen3Family,
    Phi3Family,
    Gemma2Family,
    OPTFamily,
    GPTNeoXFamily,
)


def check_model(model: Any, legal: str = "a name or a loaded causal LM") -> None:
    """Raises SettingError for what is no causal LM of transformers', loaded. legal: for users."""
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        what = f"{model!r:.100}" if not isinstance(model, nn.Module) else _described(model)
        raise SettingError(f"`model` must be {legal}; got {what}")


def _described(model: nn.Module) -> str:
    """What a module is that is no causal LM, and the way out, for users."""
    name = type(model).__name__
    if hasattr(model, "peft_config"):
        return f"{name}, an adapter of PEFT: merge it first, with model.merge_and_unload()"
    if isinstance(model, PreTrainedModel):
        return f"{name}, which has no head of logits: load it with AutoModelForCausalLM"
    return f"{name}, which is no model of transformers'"


def has_family(config: Any) -> bool:
    """Whether a transformers config is of one of FAMILIES."""
    return any(config.model_type in family.model_types for family in FAMILIES)


def family_of(config: Any) -> type[Family]:
    """The family of a transformers config. Raises ValueError for a type that none has."""
    for family in FAMILIES:
        if config.model_type in family.model_types:
            return family
    supported = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
    raise ValueError(
        f"model type {config.model_type!r} is of no family that kvfold folds: {supported}. Maps"
        " beside the weights serve any type: `kvfold compress` without --fold makes them"
    )
