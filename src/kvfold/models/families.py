"""Families of models whose weights can be folded. Adding one: a file beside this and one line here.

Maps beside the weights need none.
"""

from typing import Any

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
        raise SettingError(f"`model` must be {legal}; got {model!r:.100}")


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
