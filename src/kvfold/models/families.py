"""The model families whose weights can be folded. To add one, write a module and add a line here.

Maps need no family.
"""

from inspect import signature
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvfold.models.adapter import Family
from kvfold.models.gemma2 import Gemma2Family
from kvfold.models.gpt_neox import GPTNeoXFamily
from kvfold.models.llama import LlamaFamily
from kvfold.models.opt import OPTFamily
from kvfold.models.phi3 import Phi3Family
from kvfold.models.qwen3 import Qwen3Family
from kvfold.utils.errors import SettingError

FAMILIES: tuple[type[Family], ...] = (
    LlamaFamily,
    Qwen3Family,
    Phi3Family,
    Gemma2Family,
    OPTFamily,
    GPTNeoXFamily,
)


def check_model(model: Any, legal: str = "a name or a loaded causal LM") -> None:
    """Raises SettingError for anything but a loaded causal LM of transformers. legal: what is
    legal, for the message."""
    check_decoder(model, legal)
    if model.get_output_embeddings() is None:
        raise SettingError(
            f"`model` must be {legal}; got {type(model).__name__}, which has no head of logits:"
            " load it with AutoModelForCausalLM"
        )


def check_decoder(model: Any, legal: str = "a loaded causal LM") -> None:
    """Raises SettingError for anything but a loaded decoder model of transformers, with or without
    a language-model head. legal: what is legal, for the message."""
    if not isinstance(model, nn.Module):
        raise SettingError(f"`model` must be {legal}; got {_one_line(model)}")
    if why := _no_decoder(model):
        raise SettingError(f"`model` must be {legal}; got {type(model).__name__}, {why}")


def _one_line(value: Any) -> str:
    """A value as an error shows it; data of many lines by its class alone."""
    text = f"{value!r:.100}"
    return text if "\n" not in text and len(text) < 100 else f"an object {type(value).__name__}"


def _no_decoder(model: nn.Module) -> str | None:
    """Why a module is not a decoder that kvfold takes, and the way out, for users; None if it is
    one."""
    if hasattr(model, "_orig_mod"):
        return "which torch.compile made: give the model that was compiled"
    if not isinstance(model, PreTrainedModel):
        if hasattr(model, "peft_config"):
            return "an adapter of PEFT: merge it first, with model.merge_and_unload()"
        return "which is no model of transformers': give the model that it holds, if it holds one"
    if model.config.is_encoder_decoder:
        return "an encoder with a decoder: kvfold serves decoders alone"
    if not _embeds_tokens(model):
        return "which has no embedding of tokens"
    if needed := _needed(model):
        return f"whose forward needs `{needed}`: give the language model inside it"
    hooked = any(hasattr(module, "_hf_hook") for module in model.modules())
    if not hooked and any(x.is_meta for x in model.parameters()):
        return "whose weights are on the meta device, without numbers: load them first"
    return None


def _embeds_tokens(model: PreTrainedModel) -> bool:
    try:
        return hasattr(model.get_input_embeddings(), "num_embeddings")
    except NotImplementedError:
        return False


def _needed(model: PreTrainedModel) -> str | None:
    """Name of an argument that a model's forward requires besides token ids; None if there is
    none."""
    parameters = signature(model.forward).parameters.values()
    required = (x for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD and x.default is x.empty)
    return next((x.name for x in required if x.name != "input_ids"), None)


def has_family(config: Any) -> bool:
    """Whether one of FAMILIES serves a transformers config."""
    return any(config.model_type in family.model_types for family in FAMILIES)


def family_of(config: Any) -> type[Family]:
    """The family of a transformers config. Raises ValueError if none serves its model type."""
    for family in FAMILIES:
        if config.model_type in family.model_types:
            return family
    supported = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
    raise ValueError(
        f"model type {config.model_type!r} is of no family that kvfold folds: {supported}. Maps"
        " beside the weights serve any type: `kvfold compress` without --fold makes them"
    )
