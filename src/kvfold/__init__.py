"""kvfold: shrink a language model's KV cache and measure what it costs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvfold.registration import register

if TYPE_CHECKING:
    from kvfold import recipes as recipes
    from kvfold.api import compress as compress
    from kvfold.config import Ratios as Ratios
    from kvfold.engine.async_llm import AsyncLLM as AsyncLLM
    from kvfold.engine.llm import LLM as LLM
    from kvfold.engine.packed import PackedContext as PackedContext
    from kvfold.engine.request import CacheParams as CacheParams
    from kvfold.engine.request import SamplingParams as SamplingParams
    from kvfold.evaluation.auto import best_policy as best_policy
    from kvfold.loading import reference as reference
    from kvfold.recovery import recover as recover
    from kvfold.seam.attach import attach as attach
    from kvfold.seam.attach import detach as detach
    from kvfold.seam.named import load as load

__version__ = "0.1.0"
# Where public names are; torch and transformers are imported when the first of them is asked for.
_HOMES = {
    "LLM": "engine.llm",
    "AsyncLLM": "engine.async_llm",
    "CacheParams": "engine.request",
    "Ratios": "config",
    "PackedContext": "engine.packed",
    "SamplingParams": "engine.request",
    "attach": "seam.attach",
    "best_policy": "evaluation.auto",
    "compress": "api",
    "detach": "seam.attach",
    "load": "seam.named",
    "recover": "recovery",
    "reference": "loading",
}
__all__ = ["__version__", "recipes", *_HOMES]

register()


def __getattr__(name: str) -> Any:
    if name == "recipes":
        return import_module("kvfold.recipes")
    if name not in _HOMES:
        raise AttributeError(f"module 'kvfold' has no attribute {name!r}")
    found = getattr(import_module(f"kvfold.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
